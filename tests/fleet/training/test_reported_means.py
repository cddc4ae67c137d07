"""Public reports of masked losses: the plain mean is wrong and verify says so; with fleet.mean both are right."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.fleet.training.reported_means import REPORTS, ROWS, dataset, network, train
from tests.helpers.checked_training import flat, start, weights
from tests.helpers.verifying import causes, verify
from tests.helpers.workers import run_workers

SCRIPT = Path("tests/fleet/training/reported_means.py")


def expected(name: str) -> Tensor:
    """Returns the parameters after the same updates in one process of plain torch, each over all its tokens."""
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), 0.5)
    tokens, labels = dataset().tensors
    for x, y in zip(tokens.split(2 * ROWS), labels.split(2 * ROWS), strict=True):
        terms = REPORTS[name].terms(net(x), y)
        optimizer.zero_grad()
        sum((factor * total / count for total, count, factor in terms), torch.zeros(())).backward()
        optimizer.step()
    return flat(net.state_dict())


def forms(rank: int, world_size: int) -> dict[str, tuple[Tensor, Tensor]]:
    found = {}
    for name in REPORTS:
        both = []
        for form in ("plain", "mean"):
            start({})
            both.append(weights(train(name, form)))
        found[name] = (both[0], both[1])
    return found


def test_the_plain_means_are_wrong_and_fleet_mean_is_right() -> None:
    assert len({report.source for report in REPORTS.values()}) == 8
    for found in run_workers(forms, 2, backend=None):
        for name, (plain, mean) in found.items():
            right = expected(name)
            assert float((plain - right).abs().max()) > 1e-4, name
            assert float((mean - right).abs().max() / right.abs().max()) < 1e-6, name


@pytest.mark.slow
@pytest.mark.parametrize("name", REPORTS)
def test_verify_names_the_plain_mean_and_finds_fleet_mean_equal(name: str, tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "mean").mkdir()
    report = verify(SCRIPT, tmp_path / "plain", arguments=[name, "plain"])
    assert report["outcome"] == "differs", report["notes"]
    assert causes(report)[:1] == ["loss-over-own-batch"], report["findings"]
    assert "loss = fleet.mean(total, count)" in report["findings"][0]["sentence"]
    report = verify(SCRIPT, tmp_path / "mean", arguments=[name, "mean"])
    assert report["outcome"] == "equal", (report["findings"], report["notes"])
