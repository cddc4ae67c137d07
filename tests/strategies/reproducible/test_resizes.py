"""Issue 44: after resizes, kills and resumes the same bits as the undisturbed run of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.reproducible_elastic import Disturbed, differences, in_forks, launched, undisturbed
from tests.helpers.reproducible_training import Case, differing_bits

# One for each seed: batch norm and dropout; a divided state, clipped; loss scaling and merged rounds.
CASES = [
    Case(model="conv", rule="adamw", logical=4, batch=2, clip="torch", schedule="step"),
    Case(
        model="attention", rule="momentum", logical=5, batch=2, clip="global", schedule="cosine",
        options={"sharding": True, "sharding_configs": {"stage": 1, "sharding_degree": -1}},
    ),
    Case(
        model="mlp", rule="adam", logical=3, batch=2, counts=True,
        options={
            "amp": True, "amp_configs": {"dtype": "float16", "init_loss_scaling": 2.0**20, "incr_every_n_steps": 7},
            "gradient_merge": True, "gradient_merge_configs": {"k_steps": 2},
        },
    ),
]  # fmt: skip


def check(case: Case, found: Disturbed, folder: Path) -> None:
    """Compares with one process that nobody disturbs, update by update and at the end."""
    right = undisturbed(case, found.epochs, folder / "undisturbed")
    assert len({*right.losses}) == len(right.losses) > 6
    assert differences(found, right) == []
    assert {step for step, _ in found.losses} == {step for step, _ in right.losses}
    for rank, bits in enumerate(found.bits):
        assert differing_bits(right.bits[0], bits) == {}, f"worker {rank} after {found}"


def test_a_kill_and_a_resize(tmp_path: Path) -> None:
    found = in_forks(CASES[0], tmp_path / "disturbed", seed=1, resizes=1, kills=1)
    assert len(found.kills) == 1
    assert len(found.resizes) == 2
    check(CASES[0], found, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(len(CASES)))
def test_a_few_resizes_and_kills(seed: int, tmp_path: Path) -> None:
    check(CASES[seed], in_forks(CASES[seed], tmp_path / "disturbed", seed, resizes=4, kills=4), tmp_path)


@pytest.mark.slow
def test_the_launcher_restarts_and_resizes(tmp_path: Path) -> None:
    check(CASES[0], launched(CASES[0], tmp_path / "disturbed", seed=0, resizes=1, kills=2), tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(len(CASES)))
def test_twenty_resizes_and_twenty_kills(seed: int, tmp_path: Path) -> None:
    found = in_forks(CASES[seed], tmp_path / "disturbed", seed, resizes=20, kills=20)
    assert len(found.kills) == len(found.resizes) - 1 == 20
    check(CASES[seed], found, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(len(CASES)))
def test_twenty_resizes_and_twenty_kills_under_the_launcher(seed: int, tmp_path: Path) -> None:
    check(CASES[seed], launched(CASES[seed], tmp_path / "disturbed", seed, resizes=20, kills=20), tmp_path)
