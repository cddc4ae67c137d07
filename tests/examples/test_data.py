"""The example's data: the digits, folders of images, and their splits."""

from __future__ import annotations

import gc
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from tests.examples.scripts import example_module

data = example_module("data")

COLOURS = {"blue": (0, 0, 255), "red": (255, 0, 0)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes of ten images: JPEG and PNG, several sizes, modes and spellings of the suffix."""
    for name, colour in COLOURS.items():
        (tmp_path / name / "more").mkdir(parents=True)
        for number in range(10):
            image = Image.new("RGB", (20 + number, 40 - number), colour)
            suffix = ("jpg", "png", "JPEG")[number % 3]
            image.save(tmp_path / name / ("more" if number > 7 else ".") / f"{number}.{suffix}")
    (tmp_path / "blue" / "notes.txt").write_text("not an image")
    (tmp_path / ".hidden").mkdir()
    return tmp_path


def test_the_digits_are_all_there_and_split_by_class() -> None:
    train, test, names = data.open_data("digits", 8, 0)
    assert len(train) + len(test) == 1797
    assert names == [str(digit) for digit in range(10)]
    for digit in range(10):
        share = test.labels.count(digit) / (test.labels.count(digit) + train.labels.count(digit))
        assert share == pytest.approx(0.2, abs=0.01)


def test_the_split_is_the_same_for_every_process_and_disjoint() -> None:
    labels = np.arange(1000) % 7
    train, test = data.split_indices(labels, seed=3)
    assert data.split_indices(labels, seed=3) == (train, test)
    assert sorted(train + test) == list(range(1000))
    assert data.split_indices(labels, seed=4)[1] != test
    # Global random state has no say in it.
    np.random.seed(1)
    torch.manual_seed(1)
    assert data.split_indices(labels, seed=3) == (train, test)


def test_a_class_of_two_gives_one_image_to_each_part() -> None:
    train, test = data.split_indices(np.array([0, 0, 1, 1]), seed=0)
    assert sorted(i // 2 for i in train) == sorted(i // 2 for i in test) == [0, 1]


@pytest.mark.parametrize("size", [8, 16])
def test_digits_are_normalised_and_scaled(size: int) -> None:
    train, test, _ = data.open_data("digits", size, 0)
    image, label = test[0]
    assert image.shape == (3, size, size)
    assert isinstance(label, int)
    assert float(train.images.mean()) == pytest.approx(0, abs=1e-4)
    assert float(train.images[:, 0].std()) == pytest.approx(1, abs=1e-3)


def test_only_training_digits_move_and_the_seed_decides_how() -> None:
    train, test, _ = data.open_data("digits", 16, 0)
    assert torch.equal(test[0][0], test[0][0])
    views = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        views.append(torch.stack([train[i][0] for i in range(20)]))
    assert torch.equal(views[0], views[1])
    assert not torch.equal(views[0], views[2])
    # An eighth of 16 pixels: each view is the image moved by at most two pixels.
    image, view = train.images[0], train[0][0]
    padded = torch.nn.functional.pad(image, [2] * 4, value=float(image.min()))
    moved = [padded[:, i : i + 16, j : j + 16] for i in range(5) for j in range(5)]
    assert any(torch.equal(view, candidate) for candidate in moved)


def test_a_folder_gives_every_image_its_class(folder: Path) -> None:
    train, test, names = data.open_data(str(folder), 12, 0)
    assert names == ["blue", "red"]
    assert (len(train), len(test)) == (16, 4)
    assert sorted(label for _, label in test.files) == [0, 0, 1, 1]
    assert not {path for path, _ in train.files} & {path for path, _ in test.files}
    again = data.open_data(str(folder), 12, 0)
    assert again.test.files == test.files
    for part in (train, test):
        for image, label in part:
            assert image.shape == (3, 12, 12)
            # The brightest channel after normalisation is the colour of the class.
            assert int(image.mean(dim=(1, 2)).argmax()) == {0: 2, 1: 0}[label]


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1", "CMYK"])
def test_every_kind_of_pixel_becomes_rgb(tmp_path: Path, mode: str) -> None:
    path = tmp_path / ("image.jpg" if mode == "CMYK" else "image.png")
    Image.new("RGB", (9, 7), (200, 10, 10)).convert(mode).save(path)
    image = data.read_image(path)
    assert (image.mode, image.size) == ("RGB", (9, 7))


def test_pixels_are_normalised_with_the_usual_mean_and_deviation() -> None:
    image = data.normalised(Image.new("RGB", (2, 3), (255, 0, 0)))
    assert image.shape == (3, 3, 2)
    assert image[:, 0, 0].tolist() == pytest.approx([(1 - 0.485) / 0.229, -0.456 / 0.224, -0.406 / 0.225])


def test_training_views_vary_and_test_views_do_not() -> None:
    ramp = Image.fromarray(np.tile(np.arange(64, dtype=np.uint8) * 4, (48, 1))).convert("RGB")
    torch.manual_seed(0)
    views = [np.array(data.random_view(ramp, 16)) for _ in range(40)]
    assert all(view.shape == (16, 16, 3) for view in views)
    mirrored = sum(int(view[0, 0, 0] > view[0, -1, 0]) for view in views)
    assert 8 < mirrored < 32
    assert len({view.tobytes() for view in views}) > 30
    centre = np.array(data.centre_view(ramp, 16)).astype(int)
    assert np.array_equal(centre, np.array(data.centre_view(ramp, 16)))
    # The middle 42 of 64 columns.
    assert centre[0, 0, 0] == pytest.approx(4 * 11 + 4, abs=6)
    assert centre[0, -1, 0] == pytest.approx(4 * 52 - 4, abs=6)


@pytest.mark.parametrize("content", [b"", b"not an image", "cut"], ids=["empty", "text", "cut short"])
@pytest.mark.parametrize("suffix", ["jpg", "png"])
def test_a_broken_file_is_named(tmp_path: Path, content: bytes | str, suffix: str) -> None:
    path = tmp_path / f"broken.{suffix}"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        noise = np.random.default_rng(0).integers(0, 255, (40, 40, 3), dtype=np.uint8)
        Image.fromarray(noise).save(path)
        path.write_bytes(path.read_bytes()[:-900])
    with pytest.raises(ValueError, match=rf"broken\.{suffix}' cannot be decoded.*Repair or remove"):
        data.read_image(path)


def first_error(loader: DataLoader[object]) -> str:
    """Returns the message of the ValueError that reading the whole loader raises."""
    try:
        list(loader)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_broken_file_is_named_when_another_process_decodes_it(folder: Path) -> None:
    for number in range(10):
        for path in (folder / "red").rglob(f"{number}.*"):
            path.write_bytes(b"\xff\xd8 nothing more")
    train, _, _ = data.open_data(str(folder), 8, 0)
    loader = DataLoader(train, num_workers=1, multiprocessing_context="fork")
    assert re.search(r"red/.*' cannot be decoded as an image", first_error(loader))
    gc.collect()  # the traceback held the loader's process


def test_folders_that_cannot_be_trained_on_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'digits' or a folder of class folders; .*absent' is not a folder"):
        data.open_data(str(tmp_path / "absent"), 8, 0)
    with pytest.raises(ValueError, match="holds 0 class folders; a classifier needs at least 2"):
        data.open_data(str(tmp_path), 8, 0)
    (tmp_path / "only").mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "only" / "1.png")
    with pytest.raises(ValueError, match="only' holds 1 JPEG or PNG files; a class needs at least 2"):
        data.open_data(str(tmp_path), 8, 0)
    Image.new("RGB", (4, 4)).save(tmp_path / "only" / "2.png")
    with pytest.raises(ValueError, match="holds 1 class folders"):
        data.open_data(str(tmp_path), 8, 0)
