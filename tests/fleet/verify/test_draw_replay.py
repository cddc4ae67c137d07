"""One process gets the draws of the workers, joined; recomputation gets those of the forward pass."""

from pathlib import Path

import torch

from fleet.verify.draw_replay import Draws


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
    draws.active = True
    with torch.no_grad():
        drawn(draws, 2)
    draws.next_window()
    assert not list(tmp_path.iterdir())
