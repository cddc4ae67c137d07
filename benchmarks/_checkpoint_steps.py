"""One worker of a checkpoint benchmark: saves and loads a state, and writes what it has measured.

Arguments: what, MB of the state of all workers, rounds, a folder for checkpoints, a file for the result.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fleet as facade
from fleet import fleet
from fleet.checkpoint.commit import read_index
from fleet.checkpoint.items import SavedTensors
from fleet.checkpoint.storage import LocalFolder

_BYTES = 12  # of a parameter with the state of AdamW, without gradients
_POLL_S = 0.02


def timed(call: Callable[[], Any]) -> float:
    """Returns how long ``call`` takes, begun by all workers together."""
    if dist.is_initialized():
        dist.barrier()
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def job(MB: float, options: dict[str, Any], lean: bool = False) -> dict[str, Any]:
    """Returns a model of layers and its optimizer after one step, ``MB`` of parameters and states.

    ``lean`` fills the states of the optimizer without a step, so that nothing but parameters and states takes memory.
    """
    strategy = fleet.DistributedStrategy()
    strategy.update(options)
    facade.init(is_collective=True, strategy=strategy, log_level="ERROR")
    width = 1024
    count = max(2, round(MB * 1e6 / _BYTES / width / width / 2))
    model: nn.Module = nn.Sequential(*[layer for _ in range(count) for layer in pair(width, options)])
    if options.get("pipeline"):
        from fleet.meta_parallel import PipelineLayer

        model = PipelineLayer(list(model), num_stages=2, loss_fn=nn.MSELoss())
    wrapped = fleet.distributed_model(model)
    optimizer = fleet.distributed_optimizer(torch.optim.AdamW(model.parameters()))
    if lean:
        fill(optimizer.user_optimizer)
        return {"model": wrapped, "optimizer": optimizer}
    if options.get("pipeline"):
        wrapped.train_batch((torch.ones(1, width), torch.zeros(1, width)), optimizer)
        return {"model": wrapped, "optimizer": optimizer}
    wrapped(torch.ones(1, width)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return {"model": wrapped, "optimizer": optimizer}


def pair(width: int, options: dict[str, Any]) -> list[nn.Module]:
    """Returns two layers, divided by columns and by rows where the job divides layers."""
    if "tensor_parallel" in options:
        from fleet.meta_parallel import ColumnParallelLinear, RowParallelLinear

        return [
            ColumnParallelLinear(width, width, has_bias=True, gather_output=False),
            RowParallelLinear(width, width, input_is_parallel=True),
        ]
    return [nn.Linear(width, width), nn.Linear(width, width)]


def fill(optimizer: torch.optim.Optimizer) -> None:
    """Gives each parameter the states that AdamW has after a step, of numbers that no step has computed."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            moments = {name: torch.full_like(p.detach(), 1e-3) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[p] = {"step": torch.tensor(1.0), **moments}


def own_tensors(objects: dict[str, Any]) -> list[Tensor]:
    """Returns this worker's parameters and states."""
    found: list[Tensor] = [p.detach() for p in objects["model"].parameters()]
    for state in objects["optimizer"].user_optimizer.state.values():
        found += [value for value in state.values() if isinstance(value, Tensor)]
    return [value.to_local() if hasattr(value, "to_local") else value for value in found]


def stops(objects: dict[str, Any], rounds: int, folder: Path) -> dict[str, list[float]]:
    """Measures how long training stops for each form of a save, round by round."""
    import torch.distributed.checkpoint as dcp

    own = own_tensors(objects)
    kept = [value.clone() for value in own]
    times: dict[str, list[float]] = {}

    def note(name: str, seconds: float) -> None:
        times.setdefault(name, []).append(seconds)

    def copy() -> None:
        for place, value in zip(kept, own, strict=True):
            place.copy_(value)

    state = {f"t{number}": value for number, value in enumerate(own)}
    for _ in range(rounds + 1):
        note("memcpy", timed(copy))
        fresh: list[Tensor] = []
        note("memcpy, fresh", timed(lambda made=fresh: made.extend(value.clone() for value in own)))
        del fresh
        note("fleet", timed(lambda: fleet.checkpoint.save(folder / "fleet", objects, asynchronous=True)))
        fleet.checkpoint.wait()
        futures: list[Any] = []
        where = folder / "dcp"
        note("dcp", timed(lambda made=futures, to=f"{where}": made.append(dcp.async_save(state, checkpoint_id=to))))
        futures[0].result()
        rank = dist.get_rank()
        note("torch", timed(lambda at=rank: torch.save(state, folder / f"torch.{at}")))
        dist.barrier()
        if rank == 0:
            shutil.rmtree(where, ignore_errors=True)
        dist.barrier()
    return {name: values[1:] for name, values in times.items()}


def writes(objects: dict[str, Any], rounds: int, folder: Path) -> dict[str, list[float]]:
    """Measures a save beside the plain sequential write of the same bytes, both to new files and to disk."""
    own = own_tensors(objects)
    times: dict[str, list[float]] = {"fleet": [], "asynchronous": [], "plain": []}

    def plain() -> None:
        with open(folder / "plain.new", "wb", buffering=0) as file:
            for value in own:
                view = memoryview(value.contiguous().reshape(-1).view(torch.uint8).numpy())
                for at in range(0, len(view), 1 << 20):
                    file.write(view[at : at + (1 << 20)])
            os.fsync(file.fileno())
        os.replace(folder / "plain.new", folder / "plain")

    def beside() -> None:
        fleet.checkpoint.save(folder / "fleet", objects, asynchronous=True)
        fleet.checkpoint.wait()

    for _ in range(rounds + 1):
        times["plain"].append(timed(plain))
        times["fleet"].append(timed(lambda: fleet.checkpoint.save(folder / "fleet", objects)))
        times["asynchronous"].append(timed(beside))
    return {name: values[1:] for name, values in times.items()}


def reads(objects: dict[str, Any], folder: Path) -> dict[str, float]:
    """Returns bytes read on load over the bytes of this worker's parts, with and without sums."""
    found: dict[str, float] = {}
    sources: list[SavedTensors] = []
    original = SavedTensors.__init__

    def noted(self: SavedTensors, *arguments: Any, **names: Any) -> None:
        original(self, *arguments, **names)
        sources.append(self)

    SavedTensors.__init__ = noted  # type: ignore[method-assign]
    for name, check_sums in (("sums", True), ("no sums", False)):
        began = time.perf_counter()
        fleet.checkpoint.load(folder / "fleet", objects, check_sums=check_sums)
        found[f"{name}, s"] = time.perf_counter() - began
        own = sum(value.numel() * value.element_size() for value in own_tensors(objects))
        found[name] = sources[-1].num_read / own
    return found


def held_bytes() -> int:
    """Returns the memory of this process and its children, shared pages divided among those that share them.

    Pages of mapped files are not counted: the kernel takes them back whenever it needs them.
    """
    total, pids = 0, [os.getpid()]
    for pid in pids:
        try:
            for task in Path(f"/proc/{pid}/task").iterdir():
                pids += [int(child) for child in (task / "children").read_text().split()]
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                    total += int(line.split()[1]) * 1024
        except OSError:
            continue
    return total


def available_bytes() -> int:
    """Returns the memory that the machine can still give."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024


class Peak:
    """The largest memory while it is entered, beyond that at the beginning."""

    def __enter__(self) -> Peak:
        self._begin = self.most = held_bytes()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._end.wait(_POLL_S):
            self.most = max(self.most, held_bytes())

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()
        self.beyond = max(self.most, held_bytes()) - self._begin


def memory(objects: dict[str, Any], folder: Path) -> dict[str, float]:
    """Returns the memory of saves and a load beyond the state, over the state of this worker."""
    state = sum(value.numel() * value.element_size() for value in own_tensors(objects))
    found: dict[str, float] = {"state": state}
    with Peak() as peak:
        fleet.checkpoint.save(folder / "fleet", objects)
    found["save"] = peak.beyond / state
    with Peak() as peak:
        fleet.checkpoint.load(folder / "fleet", objects)
    found["load"] = peak.beyond / state
    room = min(fleet.util.all_gather(available_bytes()))
    if room > 1.5 * sum(fleet.util.all_gather(state)):  # the copy is as large as the state; the rest for others
        with Peak() as peak:
            fleet.checkpoint.save(folder / "fleet", objects, asynchronous=True)
            fleet.checkpoint.wait()
        found["asynchronous"] = peak.beyond / state
    return found


def gathered(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields what every worker has measured."""
    for text in fleet.util.all_gather(json.dumps(found)):
        yield json.loads(str(text))


def main() -> None:
    """Measures, and writes the result of all workers on worker 0."""
    what, MB, rounds, folder, result = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), sys.argv[5]
    options = json.loads(sys.argv[6])
    torch.set_num_threads(1)
    objects = job(MB, options, lean=what == "memory")
    found: dict[str, Any] = {}
    if what == "stops":
        found = stops(objects, rounds, folder)
    elif what == "writes":
        found = writes(objects, rounds, folder)
    elif what == "save":
        fleet.checkpoint.save(folder / "fleet", objects)
        found = {"files": len(read_index(LocalFolder(folder / "fleet")).files)}
    elif what == "reads":
        found = reads(objects, folder)
    elif what == "memory":
        found = memory(objects, folder)
    everyone = list(gathered(found))
    if fleet.worker_index() == 0:
        Path(result).write_text(json.dumps(everyone))


if __name__ == "__main__":
    main()
