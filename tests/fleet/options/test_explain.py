"""explain: the order, the effects, what changes nothing and what is refused; it never raises for a refusal."""

from __future__ import annotations

import io
import warnings
from typing import Any

import pytest

import fleet
from fleet.errors import OptionWarning
from fleet.facade import Fleet
from fleet.options import DistributedStrategy
from fleet.options.explain import explain, explanation, mesh_lines
from fleet.paddle.strategy_factory import StrategyFactory
from fleet.strategies import REGISTRY


def test_plain_job(capsys: pytest.CaptureFixture[str]) -> None:
    """One step, its effect, printed and returned."""
    text = explain(DistributedStrategy(), world_size=2)
    assert capsys.readouterr().out == text + "\n"
    assert text.splitlines()[0] == "2 workers: data_parallel"
    assert f"   model: {REGISTRY['data_parallel'].model_effect}" in text
    assert "Refused" not in text
    assert "changes nothing" not in text


def test_one_worker_has_nothing_to_apply() -> None:
    """A single process is left alone."""
    out = io.StringIO()
    assert explain(DistributedStrategy(), world_size=1, file=out) == "1 worker: nothing to apply"
    assert out.getvalue() == "1 worker: nothing to apply\n"


def test_order_and_effects() -> None:
    """Every chosen strategy stands in the order of application with what it does."""
    strategy = DistributedStrategy()
    strategy.fp16_allreduce = True
    strategy.sync_batch_norm = True
    lines = explanation(strategy, 4).splitlines()
    assert lines[0] == "4 workers: sync_batch_norm -> data_parallel -> fp16_allreduce"
    assert [line for line in lines if line[:1].isdigit()][1:] == [
        "1. sync_batch_norm", "2. data_parallel", "3. fp16_allreduce",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("num", "workers", "hosted", "kept", "sent"),
    [
        (8, 1, "8 logical workers on 1 process: 8;", "up to 3 copies", None),
        (8, 2, "8 logical workers on 2 processes: 4, 4;", "up to 2 copies", "as many bytes as with data_parallel"),
        # Blocks 0-2, 3-5, 6-7 are the nodes (0 1) 2, 3 (4 5), (6 7): 5 sums in the place of 3, and one half of all.
        (8, 3, "8 logical workers on 3 processes: 3, 3, 2;", "up to 2 copies", "1.33 times the bytes of data_parallel"),
        (3, 3, "3 logical workers on 3 processes: 1, 1, 1;", None, "as many bytes as with data_parallel"),
        (32, 16, "32 logical workers on 16 processes: 2 each;", "up to 1 copy", "as many bytes as with data_parallel"),
        (20, 9, "on 9 processes: 3 on each of the first 2, 2 on each of the others;", "up to 2 copies", " times"),
    ],
)
def test_logical_workers_say_their_hosts_and_their_cost(
    num: int, workers: int, hosted: str, kept: str | None, sent: str | None
) -> None:
    strategy = DistributedStrategy()
    strategy.reproducible = True
    strategy.reproducible_configs = {"logical_workers": num}
    text = explanation(strategy, workers)
    assert hosted in text
    assert ("of the gradients between turns" in text) == (kept is not None) == (f"keeps {kept}" in text)
    assert ("the processes send" in text) == (sent is not None) == (f"{sent}" in text)


def test_refused_combination_is_shown() -> None:
    """Conflicts, wrong combinations and what is not offered, each with its reason."""
    strategy = DistributedStrategy()
    strategy.lars = True
    strategy.lamb = True
    strategy.recompute = True
    strategy.semi_auto = True
    strategy.hybrid_configs = {"dp_degree": 3}
    text = explanation(strategy, 2)
    assert "(refused; see below)" in text.splitlines()[0]
    refused = text.partition("\nRefused:\n")[2]
    assert "'lars' and 'lamb' cannot both be on: both replace the update rule." in refused
    assert "recompute_configs['checkpoints'] is []" in refused
    assert "dp_degree=3 is 3, but 2 processes" in refused
    assert "DistributedStrategy.semi_auto = True cannot be honoured: there is no planner" in refused


def test_what_changes_nothing_is_listed() -> None:
    """Settings without meaning and settings of what is off, once each, with the reason."""
    strategy = DistributedStrategy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OptionWarning)
        strategy.nccl_comm_num = 2
        strategy.hybrid_configs = {"dp_configs": {"nccl_config": {"nchannels": 4}}}
    strategy.amp_configs = {"incr_ratio": 4.0}
    strategy.a_sync = True
    text = explanation(strategy, 2)
    assert "Refused" not in text
    listed = text.partition("\nAccepted, changes nothing:\n")[2].splitlines()
    assert len(listed) == 4
    assert any(line.startswith("- nccl_comm_num: ") for line in listed)
    assert any(line.startswith("- hybrid_configs['dp_configs']['nccl_config']['nchannels']: ") for line in listed)
    assert "- amp_configs was set and changes nothing: 'amp' is off." in listed
    assert any(line.startswith("- a_sync was set") and "collective job" in line for line in listed)


def test_parameter_server_job() -> None:
    """The other kind of job."""
    text = explanation(DistributedStrategy(), 2, collective=False)
    assert text.splitlines()[0].startswith("2 workers: a_sync")
    assert "data_parallel" not in text


MODES: dict[str, tuple[dict[str, Any], str]] = {
    "sync": ({"a_sync": False}, "average those of all workers and update once per step, and takes parameters"),
    "async": ({"a_sync": True}, "update with those of each worker as they arrive, and takes parameters"),
    "geo": (
        {"a_sync": True, "a_sync_configs": {"k_steps": 7}},
        "steps here; every 7 steps it hands the servers what has changed, divided by the number of workers",
    ),
    "hybrid sync": (
        {"a_sync": False, "hybrid_configs": {"dp_degree": 3}},
        "averages dense gradients over the 3 workers and steps dense parameters here, with worker 0's learning rates; "
        "of rows it sends gradients to the servers, which average",
    ),
    "bounded async": (
        {"a_sync": True, "a_sync_configs": {"max_staleness": 4}},
        "servers; waits until every worker's gradients are applied, but for the last 4 steps\n",
    ),
    "published async": (
        {"a_sync": True, "a_sync_configs": {"publish": "folder:/x", "publish_every_s": 0.5}},
        "takes parameters from them; the servers publish changed rows every 0.5 s to folder:/x",
    ),
    "hybrid async": (
        {"a_sync": True, "hybrid_configs": {"dp_degree": 3}},
        "of rows it sends gradients in the background to the servers",
    ),
}


@pytest.mark.parametrize("mode", MODES)
def test_modes_of_the_parameter_server(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    """D.7: what is said of a mode is what it does; fleet.explain knows that the options are for a job with servers."""
    options, said = MODES[mode]
    strategy = DistributedStrategy()
    for key, value in options.items():
        setattr(strategy, key, value)
    text = Fleet().explain(strategy, 3)
    assert said in text
    assert text.startswith("3 workers: a_sync\n")
    assert "Refused" not in text
    assert "changes nothing" not in text
    assert ("averages dense gradients" in text) == ("hybrid" in mode)
    assert ("takes parameters" in text) == (mode in ("sync", "async", "bounded async", "published async"))
    assert ("waits until" in text) == ("bounded" in mode)


def test_a_mode_that_is_refused_is_explained() -> None:
    """D.7: no exception; the rule stands in the text. One worker averages with nobody."""
    strategy = DistributedStrategy()
    strategy.a_sync = False
    strategy.a_sync_configs = {"k_steps": 7}
    text = explanation(strategy, 2, collective=False)
    assert "geo training is asynchronous" in text.partition("\nRefused:\n")[2]
    strategy = DistributedStrategy()
    strategy.a_sync = True
    strategy.hybrid_configs = {"dp_degree": 1}
    text = explanation(strategy, 1, collective=False)
    assert "optimizer: steps dense parameters here; of rows" in text
    assert "averages" not in text
    text = explanation(StrategyFactory.create_half_async_strategy(), 2, collective=False)
    assert "sends the sum of CPU_NUM batches to the servers and waits" in text


def strategy_of(**degrees: int) -> fleet.DistributedStrategy:
    """Returns options with these degrees."""
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {f"{axis}_degree": size for axis, size in degrees.items()}
    return strategy


def test_who_holds_what() -> None:
    """8 workers, dp 2 x pp 2 x mp 2: the neighbours of the order dp, pp, mp, and ring factors 2 (k-1)/k."""
    strategy = strategy_of(mp=2, pp=2)
    strategy.pipeline_configs = {"accumulate_steps": 8}
    text = explain(strategy, 8, file=io.StringIO())
    assert "Mesh: dp 2 x pp 2 x mp 2; 2 groups of 4 workers train on different rows" in text
    assert "dp 2 (ranks 0,4 | 1,5 | 2,6 | 3,7)" in text
    assert "pp 2 (ranks 0,2 | 1,3 | 4,6 | 5,7)" in text
    assert "mp 2 (ranks 0,1 | 2,3 | 4,5 | 6,7)" in text
    assert "1 x P x 4 bytes / 4" in text
    assert "= 11.1% of a step with p = 2 stages, n = 8 micro-batches" in text
    assert "min(p - s, n) micro-batches, at most 2" in text


def test_bubbles() -> None:
    """(p-1)/(n+p-1); the recorded value for p = 4, n = 8 is 0.273."""
    strategy = strategy_of(pp=4)
    strategy.pipeline_configs = {"accumulate_steps": 8, "schedule_mode": "F-then-B"}
    [line] = [line for line in mesh_lines(strategy, 4) if "bubble" in line]
    assert "27.3%" in line
    assert "all 8" in line


def test_experts() -> None:
    """Experts lie along a second grid over the workers of sharding and mp, which is named too."""
    text = "\n".join(mesh_lines(strategy_of(ep=2, moe_sharding=2, sharding=4), 4))
    assert "ep 2 (ranks 0,1 | 2,3): hold different experts" in text
    assert "moe_sharding 2 (ranks 0,2 | 1,3): hold the same experts" in text
    assert "a worker sends for each layer of experts, the tokens" in text


def test_nothing_to_say() -> None:
    """Data parallelism has no mesh to explain, and degrees that do not fit are explained as a problem."""
    assert mesh_lines(fleet.DistributedStrategy(), 4) == []
    assert mesh_lines(strategy_of(mp=3), 4) == []
    assert len(mesh_lines(strategy_of(mp=8), 64)[-1]) > 0
    assert "| ..." in "\n".join(mesh_lines(strategy_of(mp=8), 64))
