"""One process gets the draws of the workers, joined; recomputation gets those of the forward pass."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fleet.verify.draw_replay import Draws, _by_rows, _generators, _picker, _seed
from fleet.verify.record_files import RecordFile, read_record


def drawn(draws: Draws, rows: int) -> torch.Tensor:
    return draws.counted("rand", lambda: torch.rand(rows, 3))


def test_one_process_gets_what_the_workers_drew(tmp_path: Path) -> None:
    parts = []
    for rank in range(2):
        torch.manual_seed(rank)
        draws = Draws(tmp_path / str(rank))
        draws.folder.mkdir()
        draws.active = True
        parts.append(drawn(draws, 4))
        draws.next_window()
    one = Draws(tmp_path, [tmp_path / "0", tmp_path / "1"])
    one.active = True
    assert torch.equal(drawn(one, 8), torch.cat(parts))
    drawn(one, 8)  # which no worker drew
    assert one.unequal == ["rand"]


def test_draws_outside_the_training_loop_are_left_alone(tmp_path: Path) -> None:
    draws = Draws(tmp_path)
    drawn(draws, 2)
    draws.next_window()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("evaluates", [(), (0,), (0, 1)])
def test_draws_without_gradients_are_those_of_the_workers(tmp_path: Path, evaluates: tuple[int, ...]) -> None:
    """A frozen encoder draws its latents without gradients, and a worker may evaluate between two updates."""
    parts: list[torch.Tensor] = []

    def train(draws: Draws, rows: int, evaluates: bool) -> None:
        draws.active = True
        with torch.no_grad():
            latents = drawn(draws, rows)
        parts.extend([latents, drawn(draws, rows)])
        for _ in range(100 if evaluates else 0):
            with torch.no_grad():
                drawn(draws, 5)

    for rank in range(2):
        torch.manual_seed(rank)
        draws = Draws(tmp_path / str(rank))
        draws.folder.mkdir()
        train(draws, 4, rank in evaluates)
        draws.next_window()
    one = Draws(tmp_path, [tmp_path / "0", tmp_path / "1"])
    train(one, 8, 0 in evaluates)
    assert torch.equal(parts[4], torch.cat([parts[0], parts[2]]))
    assert torch.equal(parts[5], torch.cat([parts[1], parts[3]]))
    assert one.unequal == []


def recorded(folder: Path, *windows: list[int], batches: bool = False) -> Path:
    """Returns the folder of a worker that drew these numbers, one draw each, between its updates."""
    record = RecordFile(folder)
    if batches:
        record.write("batch")
    record.close()
    draws = Draws(folder)
    draws.begin()
    draws.counted("rand", lambda: torch.tensor([9]))  # made before the last optimizer
    draws.begin()
    for numbers in windows:
        for number in numbers:
            draws.counted("rand", lambda value=number: torch.tensor([value, -value]))
        draws.next_window()
    return folder


def test_a_script_that_draws_its_batches_gets_those_of_all_workers_from_the_last_optimizer_on(tmp_path: Path) -> None:
    sources = [recorded(tmp_path / str(rank), [rank + 1], [rank + 3]) for rank in range(2)]
    one = Draws(tmp_path, sources)
    one.begin()
    assert not one.active
    one.begin()
    zeros = torch.tensor([0, 0])
    assert one.counted("rand", lambda: zeros).tolist() == [1, -1, 2, -2]
    one.next_window()
    assert one.counted("rand", lambda: zeros).tolist() == [3, -3, 4, -4]
    loaded = [recorded(tmp_path / f"loaded {rank}", [rank + 1], batches=True) for rank in range(2)]
    fed = Draws(tmp_path, loaded)
    fed.active = True
    assert fed.counted("rand", lambda: zeros) is zeros
    assert fed.unequal == ["rand"]


def test_one_process_that_takes_more_batches_gets_the_draws_in_turn(tmp_path: Path) -> None:
    sources = [recorded(tmp_path / str(rank), [rank + 1], [rank + 3]) for rank in range(2)]
    one = Draws(tmp_path, sources, in_turn=True)
    one.begin()
    one.begin()
    found = []
    for _ in range(2):
        found += [one.counted("rand", lambda: torch.tensor([0, 0])).tolist()[0] for _ in range(2)]
        one.next_window()
    assert found == [1, 2, 3, 4]


def test_single_numbers_are_told_apart_and_all_workers_can_be_given_those_of_the_first(tmp_path: Path) -> None:
    def drawing(draws: Draws, seed: int) -> list[float]:
        np.random.seed(seed)
        draws.begin()
        found = [draws.counted("numpy.random.beta", lambda: np.random.beta(1.0, 1.0)) for _ in range(2)]
        draws.next_window()
        return found

    (tmp_path / "0").mkdir()
    (tmp_path / "1").mkdir()
    first, second = drawing(Draws(tmp_path / "0"), 0), drawing(Draws(tmp_path / "1"), 1)
    assert first != second
    one = Draws(tmp_path, [tmp_path / "0", tmp_path / "1"])
    drawing(one, 0)
    assert one.numbers == ["numpy.random.beta"] * 2
    (tmp_path / "again").mkdir()
    assert drawing(Draws(tmp_path / "again", alike=tmp_path / "0"), 1) == first


def test_rows_that_python_picks_are_those_of_all_workers(tmp_path: Path) -> None:
    rows = [(torch.tensor([i]), "row") for i in range(50)]
    parts = []
    for rank in range(2):
        random.seed(rank)
        expected = random.sample(rows, 3)
        random.seed(rank)
        draws = Draws(tmp_path / str(rank))
        draws.folder.mkdir()
        draws.begin()
        parts += _picker(draws, "random.sample", random.sample)(rows, 3)
        assert parts[-3:] == expected
        draws.next_window()
    one = Draws(tmp_path, [tmp_path / "0", tmp_path / "1"])
    one.begin()
    assert _picker(one, "random.sample", random.sample)(rows, k=3) == parts
    assert _picker(one, "random.choice", random.choice)("a") == "a"
    assert one.unequal == ["random.choice"]


def test_generators_that_a_script_makes_draw_what_the_workers_drew(tmp_path: Path) -> None:
    parts = []
    for rank in range(2):
        draws = Draws(tmp_path / str(rank))
        draws.folder.mkdir()
        draws.begin()
        generator = _generators(draws, np.random.default_rng)(rank)
        assert isinstance(generator, np.random.Generator)
        parts += generator.integers(0, 99, 4).tolist()
        assert parts[-4:] == np.random.default_rng(rank).integers(0, 99, 4).tolist()
        draws.next_window()
    one = Draws(tmp_path, [tmp_path / "0", tmp_path / "1"])
    one.begin()
    make = _generators(one, np.random.default_rng)
    assert make(make(7)).integers(0, 99, 4).tolist() == parts


@pytest.mark.parametrize("active", [True, False])
def test_a_worker_notes_the_lines_of_its_permutations(tmp_path: Path, *, active: bool) -> None:
    def noted(seed: int) -> list[dict[str, Any]]:
        draws = Draws(tmp_path / str(seed))
        draws.active = active
        generator = torch.Generator().manual_seed(seed)
        draws.counted("randperm", lambda: torch.randperm(9, generator=generator))
        drawn(draws, 2)
        return read_record(draws.folder, "permutation")

    (first,), (second,) = noted(1), noted(2)
    assert first["n"] == 9
    assert first["where"].startswith(__file__)
    assert first["content"] != second["content"]


@pytest.mark.parametrize("inplace", [False, True])
def test_draws_inside_torch_are_those_of_the_workers_also_where_they_are_made_again(
    tmp_path: Path, *, inplace: bool
) -> None:
    def pass_through(draws: Draws, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rrelu = _by_rows(draws, "rrelu", torch.nn.functional.rrelu)
        before = torch.get_rng_state()
        found = []
        for _ in range(2):
            torch.set_rng_state(before)
            draws.settle()
            doubled = input.clone().requires_grad_() * 2
            value = rrelu(doubled, training=True, inplace=inplace)
            assert (value is doubled) == inplace
            value.sum().backward()
            found += [value, rrelu(value - 1, 0.2, 0.4, training=True)]
            draws._counts.clear()  # the second time stands for a recomputation
        draws.place_unseen(None)
        assert draws.unseen == {}
        assert torch.equal(found[0], found[2])
        assert torch.equal(found[1], found[3])
        return found[0], found[1]

    inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    made = []
    for rank, rows in enumerate(inputs.chunk(2)):
        torch.manual_seed(rank)
        draws = Draws(tmp_path / str(rank))
        draws.folder.mkdir()
        draws.begin()
        made.append(pass_through(draws, rows))
        assert len(draws.own) == 4
        draws.next_window()
    one = Draws(tmp_path, [tmp_path / "0", tmp_path / "1"])
    one.begin()
    for found, parts in zip(pass_through(one, inputs), zip(*made, strict=True), strict=True):
        assert torch.equal(found, torch.cat(parts))
    assert one.unequal == []


def test_what_draws_nothing_is_left_alone(tmp_path: Path) -> None:
    draws = Draws(tmp_path)
    draws.begin()
    alpha = _by_rows(draws, "alpha_dropout", torch.nn.functional.alpha_dropout)
    ones = torch.ones(4, 4)
    assert alpha(ones, 0.0, True) is not None
    assert torch.equal(alpha(ones, 0.5, False), ones)
    assert draws.own == []
    assert torch.equal(_by_rows(draws, "poisson", torch.poisson)(torch.zeros(2), torch.Generator()), torch.zeros(2))
    assert draws.own == []


def test_draws_that_nothing_here_makes_are_noticed_and_seeds_are_none(tmp_path: Path) -> None:
    draws = Draws(tmp_path)
    torch.dropout(torch.ones(4), 0.5, train=True)  # before the training loop
    draws.begin()
    drawn(draws, 2)
    _seed(draws, torch.manual_seed)(1)
    draws.place_unseen(None)
    draws.active = False
    torch.dropout(torch.ones(4), 0.5, train=True)
    draws.active = True
    draws.place_unseen(None)
    assert draws.unseen == {}
    torch.dropout(torch.ones(4), 0.5, train=True)
    drawn(draws, 2)
    module = torch.nn.Tanh()
    draws.place_unseen(module, {id(module): "net.act"}, ended=True)
    draws.place_unseen(None)
    assert (draws.unseen.pop("where")).startswith(__file__)
    assert draws.unseen == {"module": "net.act", "type": "Tanh", "ended": True}
    draws.next_window()
    assert draws.unseen == {}
