"""Image classification data: scikit-learn's handwritten digits, or a folder with one sub-folder of images per class.

Both are split into training and test data, stratified and seeded: every process with the same seed gets the same
split. Nothing here depends on ranks; the training script decides which process sees which images.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset

try:
    from PIL import Image
    from sklearn.datasets import load_digits
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}: the examples need `pip install '.[examples]'`, run in the clone.") from None

IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png"}
TEST_SHARE = 0.2
# Mean and standard deviation of ImageNet's channels: the values that published ResNet weights expect.
CHANNEL_MEAN = (0.485, 0.456, 0.406)
CHANNEL_STD = (0.229, 0.224, 0.225)

Sample = tuple[Tensor, int]


class ImageData(NamedTuple):
    """The two parts of a data set and the names of its classes; images are float (3, image_size, image_size)."""

    train: Digits | ImageFolder
    test: Digits | ImageFolder
    class_names: list[str]


def open_data(source: str, image_size: int, seed: int = 0) -> ImageData:
    """Returns the data that ``--data`` names: ``digits``, or the path of a folder of class folders.

    Raises:
        ValueError: the folder is absent, holds fewer than two classes, or a class has fewer than two images.
    """
    if source == "digits":
        return open_digits(image_size, seed)
    return open_folder(Path(source), image_size, seed)


def split_indices(labels: NDArray[np.int64], seed: int) -> tuple[list[int], list[int]]:
    """Returns the indices of training and test samples; one fifth of every class (at least one) is for the test.

    Example:
        >>> train, test = split_indices(np.array([0] * 5 + [1] * 10), seed=0)
        >>> len(train), len(test)
        (12, 3)
    """
    rng = np.random.default_rng(seed)
    train: list[int] = []
    test: list[int] = []
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label)).tolist()
        num_test = max(1, round(len(members) * TEST_SHARE))
        test += members[:num_test]
        train += members[num_test:]
    return sorted(train), sorted(test)


class Digits(Dataset[Sample]):
    """Handwritten digits in memory; training shifts each image by up to an eighth of its size."""

    def __init__(self, images: Tensor, labels: list[int], *, training: bool) -> None:
        self.images, self.labels, self.training = images, labels, training
        self.shift = images.shape[-1] // 8 if training else 0

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Sample:
        image = self.images[index]
        if self.shift:
            size = image.shape[-1]
            padded = functional.pad(image, [self.shift] * 4, value=float(image.min()))
            top, left = torch.randint(0, 2 * self.shift + 1, (2,)).tolist()
            image = padded[:, top : top + size, left : left + size]
        return image, self.labels[index]


def open_digits(image_size: int, seed: int) -> ImageData:
    """Returns the 1,797 handwritten 8x8 digits that come with scikit-learn, scaled to ``image_size``."""
    raw: Any = load_digits()
    images = torch.from_numpy(raw.images).float().unsqueeze(1)
    images = functional.interpolate(images, (image_size, image_size), mode="bilinear", align_corners=False)
    labels: NDArray[np.int64] = raw.target
    train, test = split_indices(labels, seed)
    images = (images - images[train].mean()) / images[train].std()
    images = images.expand(-1, 3, -1, -1)
    return ImageData(
        Digits(images[train], labels[train].tolist(), training=True),
        Digits(images[test], labels[test].tolist(), training=False),
        [str(name) for name in raw.target_names],
    )


class ImageFolder(Dataset[Sample]):
    """JPEG and PNG files, opened on access, so that the DataLoader's workers decode them."""

    def __init__(self, files: list[tuple[Path, int]], view: Callable[[Image.Image], Image.Image]) -> None:
        self.files, self.view = files, view

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Sample:
        path, label = self.files[index]
        return normalised(self.view(read_image(path))), label


def open_folder(root: Path, image_size: int, seed: int) -> ImageData:
    """Returns the images of ``root/<class>/*.jpg|jpeg|png``; classes are numbered in the order of their names."""
    if not root.is_dir():
        raise ValueError(f"--data takes 'digits' or a folder of class folders; {str(root)!r} is not a folder.")
    folders = sorted(entry for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    files: list[tuple[Path, int]] = []
    for label, folder in enumerate(folders):
        found = sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES)
        if len(found) < 2:
            raise ValueError(
                f"Class folder {str(folder)!r} holds {len(found)} JPEG or PNG files; a class needs at least 2, "
                "one to train on and one to test on."
            )
        files += [(path, label) for path in found]
    if len(folders) < 2:
        raise ValueError(f"{str(root)!r} holds {len(folders)} class folders; a classifier needs at least 2.")
    train, test = split_indices(np.array([label for _, label in files]), seed)
    return ImageData(
        ImageFolder([files[i] for i in train], partial(random_view, size=image_size)),
        ImageFolder([files[i] for i in test], partial(centre_view, size=image_size)),
        [folder.name for folder in folders],
    )


def read_image(path: Path) -> Image.Image:
    """Returns the decoded file in RGB; raises ValueError that names a file that cannot be decoded."""
    try:
        with Image.open(path) as file:
            image: Image.Image = file.convert("RGB")
            return image
    except Exception as error:  # each decoder raises its own kinds: OSError, SyntaxError, struct.error and others
        message = f"{str(path)!r} cannot be decoded as an image ({error}). Repair or remove the file."
        raise ValueError(message) from error


def random_view(image: Image.Image, size: int) -> Image.Image:
    """Returns a random part of the image (35 to 100 % of its area, sides at most 4:3), mirrored half the time."""
    width, height = image.size
    share, ratio, x, y, mirror = torch.rand(5).tolist()
    area = width * height * (0.35 + 0.65 * share)
    aspect = math.exp((2 * ratio - 1) * math.log(4 / 3))
    crop_width = min(width, max(1, round(math.sqrt(area * aspect))))
    crop_height = min(height, max(1, round(math.sqrt(area / aspect))))
    left, top = x * (width - crop_width), y * (height - crop_height)
    box = (left, top, left + crop_width, top + crop_height)
    view = image.resize((size, size), Image.Resampling.BILINEAR, box=box, reducing_gap=2.0)
    return view.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirror < 0.5 else view


def centre_view(image: Image.Image, size: int) -> Image.Image:
    """Returns the middle square of the image, seven eighths of its shorter side, as usual for 224 of 256 pixels."""
    width, height = image.size
    side = max(1.0, min(width, height) * 7 / 8)
    left, top = (width - side) / 2, (height - side) / 2
    return image.resize((size, size), Image.Resampling.BILINEAR, box=(left, top, left + side, top + side))


def normalised(image: Image.Image) -> Tensor:
    """Returns the image as float (3, height, width), normalised with ImageNet's mean and deviation."""
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (CHANNEL_MEAN, CHANNEL_STD))
    return (pixels - mean) / std
