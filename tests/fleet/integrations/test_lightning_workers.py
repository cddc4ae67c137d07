"""What FleetStrategy does in both of Lightning's frameworks: options act as in Fleet's own loop, or are refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from fleet.errors import ConfigError
from fleet.role_maker.record import RoleRecord
from tests.helpers.ready_python import run_python
from tests.helpers.sources import ROOT
from tests.helpers.workers import run_workers

pytestmark = pytest.mark.slow
# Rows that compute what plain torch computes on the rows of both workers.
AS_ONE = ("plain", "recompute", "sharding 1", "sharding 2", "sharding 3", "sync_batch_norm", "check_nan_inf")


def in_worker(rank: int, world_size: int, folder: str) -> Any:
    """Returns everything that the helper measures; Lightning is imported here, and not where tests are collected."""
    from tests.helpers import lightning_options

    return lightning_options.everything(rank, world_size, folder)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Returns what two workers have measured."""
    return run_workers(in_worker, 2, str(tmp_path_factory.mktemp("files")), backend=None, timeout_s=400)


def test_options_train_as_in_fleets_own_loop(found: list[dict[str, Any]]) -> None:
    first, second = (results["weights"] for results in found)
    assert len(first) > 30
    for title, row in first.items():
        for name, value in row["Fleet"].items():
            for framework in ("Trainer", "Fabric"):
                where = f"{title}, {framework}: {name}"
                torch.testing.assert_close(row[framework][name], value, atol=0, rtol=0, msg=where)
            if title.partition(",")[0] in AS_ONE:
                torch.testing.assert_close(value, row["torch"][name], atol=1e-6, rtol=1e-5, msg=title)
            if "localsgd" not in title:
                torch.testing.assert_close(second[title]["Trainer"][name], value, atol=0, rtol=0, msg=title)
    assert not torch.equal(
        first["plain, clip None"]["Fleet"]["0.weight"], first["plain, clip 0.2"]["Fleet"]["0.weight"]
    )


def test_manual_backward_scales_small_gradients(found: list[dict[str, Any]]) -> None:
    """The loss of manual_backward is an output of the model: amp scales what comes back to it."""
    results = found[0]["small losses"]
    for name, value in results["SmallAutomatic"].items():
        torch.testing.assert_close(results["Small"][name], value, atol=0, rtol=0, msg=name)


def test_what_cannot_be_done_is_refused_with_the_reason(found: list[dict[str, Any]]) -> None:
    from tests.helpers.lightning_options import REFUSED

    for results in found:
        texts = results["refusals"]
        assert {name: text for name, text in texts.items() if not re.search(REFUSED[name][0], text)} == {}


def test_divided_layers_train_and_resume_in_the_trainer(found: list[dict[str, Any]]) -> None:
    """Tensor parallelism: the checkpoint is whole, and each worker takes its part of it."""
    results = found[0]["divided layers"]
    assert results["Fleet"]["net.0.weight"].shape == (8, 6)
    for name, value in results["Fleet"].items():
        for kind in ("Trainer", "resumed"):
            torch.testing.assert_close(results[kind][name], value, atol=0, rtol=0, msg=f"{kind}: {name}")


def test_collective_calls(found: list[dict[str, Any]]) -> None:
    first, second = (results["exchanges"] for results in found)
    for results in (first, second):
        assert results["broadcast"]["list"] == [1, None, 2.5]
        assert results["broadcast"]["tensor"].tolist() == [0, 1, 2]
        assert results["from 1"] == "worker 1"
        assert results["gathered"].tolist() == [[0, 7], [1, 7]]
        assert (results["mean"].item(), results["sum"].item(), results["max"].item()) == (1.5, 3, 1)
        assert (results["whole mean"].item(), results["text"]) == (2, "text")
        assert (results["all"], results["any"]) == (False, True)
    assert (first["gradient"].item(), second["gradient"].item()) == (4.0, 6.0)
    assert (first["who"], second["who"]) == ([0, 0, 0, 2, "cpu"], [1, 1, 0, 2, "cpu"])
    assert (first["zero"], second["zero"]) == (True, False)
    assert second["rows"] == {"num_replicas": 2, "rank": 1}


RECORD = RoleRecord(global_rank=5, world_size=8, local_rank=1, local_world_size=4, num_nodes=2, source="torchrun")


def test_the_environment_is_that_of_the_job() -> None:
    from fleet.integrations._lightning_workers import FleetEnvironment

    environment = FleetEnvironment(RECORD)
    environment.set_world_size(3)
    environment.set_global_rank(3)
    assert environment.creates_processes_externally
    found = (environment.global_rank(), environment.world_size(), environment.local_rank(), environment.node_rank())
    assert found == (5, 8, 1, 1)
    assert (environment.main_address, environment.main_port, environment.detect()) == ("127.0.0.1", 0, False)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"devices": "auto"},
        {"devices": -1},
        {"devices": 4},
        {"devices": "4"},
        {"devices": [0, 1, 2, 3]},
        {"num_nodes": 2},
        {"num_nodes": 1, "devices": "0,1,2,3"},
    ],  # fmt: skip
)
def test_arguments_that_agree_with_the_job(given: dict[str, Any]) -> None:
    from fleet.integrations._lightning_workers import check_arguments

    check_arguments("Trainer", given, RECORD, torch.device("cuda", 1))


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"devices": 2}, "asks for 2 processes on this node, and torchrun started 4.*--nproc_per_node=2"),
        ({"devices": "0,1"}, "asks for 2 processes"),
        ({"devices": [4, 5, 6, 7]}, "does not hold GPU 1"),
        ({"num_nodes": 3}, "runs on 2 node.*--nnodes=3"),
    ],
)
def test_arguments_that_contradict_the_job(given: dict[str, Any], rule: str) -> None:
    from fleet.integrations._lightning_workers import check_arguments

    with pytest.raises(ConfigError, match=rule):
        check_arguments("Trainer", given, RECORD, torch.device("cuda", 1))


@pytest.mark.parametrize("module", ["fabric", "lightning"])
def test_without_lightning_the_error_names_the_extra(module: str) -> None:
    code = f"import sys; sys.modules['lightning'] = None; import fleet.integrations.{module}"
    done = run_python(code, cwd=ROOT)
    assert done.returncode == 1
    assert "pip install '.[lightning]'" in done.stderr.splitlines()[-1]
