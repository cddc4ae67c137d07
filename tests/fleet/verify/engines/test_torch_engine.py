"""torch's wrappers are seen through, and layers that are divided are known from parameters stored in parts."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from fleet.verify.engines.torch_engine import TorchEngine
from fleet.verify.engines.training_engine import EngineJob, RunPlan


@pytest.fixture
def group() -> Iterator[None]:
    """One worker, as a job of torch."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_a_wrapper_is_seen_through() -> None:
    net = nn.Linear(2, 2)
    assert TorchEngine().is_wrapper(DistributedDataParallel(net))
    assert not TorchEngine().is_wrapper(net)
    job = TorchEngine().job(net)
    assert job is not None
    assert (job.engine, job.data_rank, job.parts) == ("torch", None, False)
    assert TorchEngine().parameters([net]) is None


def test_workers_that_the_script_starts_itself_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("spawn", "start_processes"):
        monkeypatch.setattr(torch.multiprocessing, name, getattr(torch.multiprocessing, name))
    plan = RunPlan(alone=False, copies=1, strategy="", folder=tmp_path)
    TorchEngine().install(None, plan)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="starts processes of the script's own"):
        torch.multiprocessing.spawn(print, nprocs=2)


@pytest.mark.usefixtures("group")
def test_divided_layers_make_one_copy_of_all_workers_and_sharded_ones_do_not() -> None:
    mesh = init_device_mesh("cpu", (1,))
    engine = TorchEngine()
    divided = parallelize_module(nn.Sequential(nn.Linear(2, 2)), mesh, {"0": ColwiseParallel()})
    job = engine.job(divided)
    assert job is not None
    assert (job.data_rank, job.parts) == (0, True)
    whole = engine.parameters([divided])
    assert whole is not None
    assert not any(isinstance(value, DTensor) for value in whole.values())
    copies = nn.ParameterList([distribute_tensor(torch.ones(2, 2), mesh, [Replicate()])])
    assert engine.job(copies) == EngineJob(engine="torch")  # each worker takes samples of its own
    sharded: nn.Module = fully_shard(nn.Linear(2, 2), mesh=mesh)
    assert engine.job(sharded) == EngineJob(engine="torch")
    assert engine.parameters([sharded]) is None
