"""train_batch and eval_batch: a pipeline of any mesh computes what one process computes."""

from __future__ import annotations

import copy
import warnings
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from fleet import fleet
from fleet.common.log import LOGGER
from fleet.common.notes import add_note
from fleet.errors import UnsupportedOptionError
from fleet.job.running import running_session
from fleet.meta_parallel import LayerDesc, PipelineDatasetPreprocessor, PipelineLayer
from fleet.strategies.pipeline.hooks import PipelineParallelMicroStepLocations as Places
from tests.helpers.staged_training import CE, Case, batch_of, check_case, layers_of, micro_batches, start
from tests.helpers.workers import run_workers

TWO = {"pp_degree": 2, "dp_degree": 1}


def scaled(model: Any, data: Any, optimizer: Any) -> Any:
    scaler = fleet.distributed_scaler(torch.amp.GradScaler("cpu", init_scale=1024.0))
    return model.train_batch(data, optimizer, scaler=scaler)


def two_stages(rank: int, world_size: int) -> None:
    cases = {
        "1F1B": Case(TWO),
        "F-then-B": Case(TWO, pipeline={"schedule_mode": "F-then-B"}),
        "fewer micro-batches than stages": Case(TWO, num_micro=1, size=8),
        "a smaller last micro-batch": Case(TWO, num_micro=3, size=3),
        "two chunks": Case(TWO, chunks=2),
        "two chunks, uneven": Case(TWO, chunks=2, num_micro=7, rows=13),
        "tied": Case(TWO, kind="tied"),
        "tied, synchronised": Case(TWO, kind="tied", pp_configs={"sync_param": True, "sync_moment": True}),
        "structures": Case(TWO, kind="structures"),
        "dynamic shapes": Case(TWO, kind="structures", pp_configs={"enable_dynamic_shape": True}),
        "shapes each time": Case(TWO, pipeline={"p2p_cache_shape": False}),
        "iterator": Case(TWO, feed=micro_batches),
        "preprocessor": Case(TWO, feed=lambda x, y: PipelineDatasetPreprocessor(lambda: micro_batches(x, y))),
        "lists": Case(TWO, feed=lambda x, y: (list(x.split(2)), list(y.split(2)))),
        "divided late": Case(TWO, pp_configs={"delay_scale_loss": True}, num_micro=3, size=3),
        "recomputed": Case(TWO, model={"recompute_interval": 2}),
        "by name": Case(TWO, model={"seg_method": "layer:Linear"}),
        "in place first": Case(TWO, kind="in place", model={"seg_method": [0, 3, 8]}),
        "in place first, recomputed": Case(
            TWO, kind="in place", model={"seg_method": [0, 3, 8], "recompute_interval": 2}
        ),
        "frozen first": Case(TWO, freeze=("0.", "1.", "3.")),
        "scaler": Case(TWO, takes=scaled),
        "bfloat16": Case(TWO, options={"amp": True, "amp_configs": {"dtype": "bfloat16"}}, tolerance=0.06, steps=1),
        "float16": Case(TWO, options={"amp": True, "amp_configs": {"dtype": "float16"}}, tolerance=0.02, steps=1),
    }
    for name, case in cases.items():
        try:
            check_case(case)
        except Exception as error:
            add_note(error, f"The case was {name!r}.")
            raise
    the_rest_of_the_surface()


def the_rest_of_the_surface() -> None:
    start(Case(TWO))
    layers = PipelineLayer(layers_of("plain"), loss_fn=[CE, lambda out, y: CE(out, y) * 2])
    inner = torch.optim.SGD(layers.parameters(), lr=0.1)
    model, optimizer = fleet.distributed_model(layers), fleet.distributed_optimizer(inner)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)
    x, y = batch_of("plain", 8)
    seen: list[Any] = []
    model.register_hook(Places.FORWARD_END, lambda **given: seen.append((given["step_id"], given["output_tensor"])))
    model.register_backward_pipeline_parallel_hook(1, seen.append)
    first, second = model.train_batch([x, y], optimizer, scheduler)
    torch.testing.assert_close(second, 2 * first)
    assert [entry if isinstance(entry, int) else entry[0] for entry in seen if entry != 1] == [0, 1, 2, 3]
    assert seen.count(1) == 1
    assert optimizer.get_lr() == pytest.approx(0.05)
    by_micro, _ = model.train_batch([x, y], optimizer, return_micro_batch_loss=True)
    assert by_micro.shape == (4,)
    loss, _ = model.eval_batch([x, y], compute_loss=True)
    assert not model.training
    outputs = model.eval_batch([x, None])
    if model.is_pipeline_last_stage():
        torch.testing.assert_close(CE(torch.cat(outputs), y), loss)
        with torch.no_grad():
            assert model.get_static_scheduler() == "f0;b0;f1;b1;f2;b2;f3;b3;"
    else:
        assert outputs == []
        assert model.get_static_scheduler() == "f0;f1;b0;f2;b1;f3;b2;b3;"
    with pytest.raises(ValueError, match="Call loss = model.train_batch"):
        model(x)
    twin = copy.deepcopy(model)
    kept, state = twin.full_state_dict(), model.full_state_dict()
    assert kept.keys() == state.keys()
    assert all(torch.equal(kept[name], value) for name, value in state.items())
    with pytest.raises(ValueError, match="on a copy of a model"):
        twin.eval_batch([x, y], True)
    refusals(model, optimizer, x, y)


def refusals(model: Any, optimizer: Any, x: Any, y: Any) -> None:
    """Both stages raise at once, whichever of them sees the mistake."""
    with pytest.raises(ValueError, match="refused its data|takes at most accumulate_steps"):
        model.train_batch([torch.cat([x, x]), y], optimizer)
    with pytest.raises(ValueError, match="4 micro-batches and the labels 3"):
        model.train_batch([x, y[:6]], optimizer)
    with pytest.raises(ValueError, match="fleet.distributed_optimizer"):
        model.train_batch([x, y], optimizer.user_optimizer)
    calls = {True: lambda: model.train_batch([x, y], optimizer), False: lambda: model.eval_batch([x, y], True)}
    with pytest.raises(ValueError, match="run different calls"):
        calls[model.is_pipeline_first_stage()]()
    with pytest.raises(ValueError, match="PipelineLayer"):
        fleet.distributed_model(nn.Linear(2, 2))
    with pytest.raises(UnsupportedOptionError, match="nothing runs then"):
        model.register_bubble_pipeline_parallel_hook(0, print)
    with pytest.raises(UnsupportedOptionError, match="full_state_dict"):
        model.save_state_dict("here")
    for wrong in ({"use_dualpipev": True}, {"use_cudagraph": True}, {"recompute_ctx": {"partition": True}}):
        with pytest.raises(UnsupportedOptionError):
            PipelineLayer(layers_of("plain"), **wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="asks for 3 stages, and the job has 2"):
        PipelineLayer(layers_of("plain"), num_stages=3)


def test_two_stages_are_one_process() -> None:
    """Sections 6, 7 and study 6: every gradient of step 1 and later, losses, weights; all forms of data; refusals."""
    run_workers(two_stages, 2, backend=None, timeout_s=150)


def four_workers(rank: int, world_size: int) -> None:
    both = {"pp_degree": 2, "dp_degree": 2}
    overlaps = {"dp_comm_overlap": True}
    cases = {
        "copies": Case(both),
        "overlapped": Case(both, pp_configs=overlaps, options={"fuse_grad_size_in_MB": 1}),
        "one by one, overlapped, chunks": Case(
            both, chunks=2, pp_configs=overlaps, options={"fuse_all_reduce_ops": False}
        ),
        "tied": Case(both, kind="tied", pp_configs=overlaps),
        "summed": Case(both, options={"gradient_scale_configs": {"scale_strategy": "sum"}}, scale=2.0, rate=0.1),
        "narrow wire": Case(both, options={"fp16_allreduce": True}, tolerance=2e-3, steps=1),
        "four stages": Case({"pp_degree": 4, "dp_degree": 1}),
        "four stages, two micro-batches": Case({"pp_degree": 4, "dp_degree": 1}, num_micro=2, size=4),
        "sharded": Case({"pp_degree": 2, "dp_degree": 1, "sharding_degree": 2}),
    }
    for name, case in cases.items():
        try:
            check_case(case)
        except Exception as error:
            add_note(error, f"The case was {name!r}.")
            raise
    unused_parameters(both)


class Sometimes(nn.Module):
    """Uses one of two layers, by the rank of the data."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.even, self.never = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.always(x)
        session = running_session()
        return self.even(found) if session is not None and session.job.axes.data_rank == 0 else found


def unused_parameters(degrees: dict[str, int]) -> None:
    """A parameter that some copy used has a gradient on all; one that none used has none."""
    start(Case(degrees, options={"find_unused_parameters": True}))
    layers = PipelineLayer([LayerDesc(Sometimes), LayerDesc(nn.Linear, 6, 5)], loss_fn=CE)
    inner = torch.optim.SGD(layers.parameters(), lr=0.1)
    found: list[str] = []
    inner.register_step_pre_hook(lambda *_: found.extend(n for n, p in layers.named_parameters() if p.grad is not None))
    model, optimizer = fleet.distributed_model(layers), fleet.distributed_optimizer(inner)
    x, y = batch_of("plain", 8)
    model.train_batch([x, y], optimizer)
    used = ["0.always.weight", "0.always.bias", "0.even.weight", "0.even.bias"]
    assert found == (used if model.is_pipeline_first_stage() else ["1.weight", "1.bias"])


def test_four_workers_are_one_process() -> None:
    """Sections 7.5, 8.1: stages with copies; buckets that overlap; ties and the sum over stages before that over dp."""
    run_workers(four_workers, 4, backend=None, timeout_s=200)


def test_one_process_trains_with_the_same_script() -> None:
    """Section 1.3, one process: train_batch works without stages, and so does the plain loop."""
    run_workers(alone, 1, backend=None)


def alone(rank: int, world_size: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in (Case({}), Case({}, chunks=2, num_micro=3, size=3), Case({}, kind="tied")):
            check_case(case)
    model = fleet.distributed_model(PipelineLayer(layers_of("plain"), loss_fn=CE))
    x, y = batch_of("plain", 4)
    CE(model(x), y).backward()
    assert all(p.grad is not None for p in model.parameters())
    said: list[str] = []
    with patch.object(LOGGER, "warning", said.append):
        fleet.distributed_model(PipelineLayer(layers_of("plain"), loss_fn=CE))
        assert said == []
        fleet.distributed_model(nn.Linear(2, 2))
    assert said == [
        "pipeline_configs was set and changes nothing: 'pipeline' is off, and Linear is no PipelineLayer, whose "
        "train_batch reads it."
    ]
