"""The process group as the other end: order, what can travel, what it costs; whole models: test_state_dicts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fleet.checkpoint.boxes import held_boxes, whole_shape
from fleet.checkpoint.commit import read_index
from fleet.checkpoint.index import Index
from fleet.checkpoint.items import Item, SavedTensors, Wanted
from fleet.checkpoint.model_tensors import ModelTensors
from fleet.checkpoint.saving import gathered, pending_share
from fleet.checkpoint.state_dicts import ModelStates
from fleet.checkpoint.storage import LocalFolder
from fleet.checkpoint.to_group import GroupSource, StateGroup, StateMesh, described, in_layer_order
from fleet.errors import CheckpointError
from fleet.job.axes import Axes, make_axes
from fleet.strategies._shared.parameter_layout import Layout, cut, layouts_of, set_layout
from fleet.strategies._shared.parts import mark_part, marked_part
from tests.helpers.workers import run_workers

HOST = torch.device("cpu")


def test_order() -> None:
    """By the index of the layer, inside a layer as they are, shared layers first."""
    names = ["10.b", "2.w", "2.a", "shared_layers.embed.weight", "9.x.1.y"]
    assert in_layer_order(names) == ["shared_layers.embed.weight", "2.w", "2.a", "9.x.1.y", "10.b"]


def item(tensor: torch.Tensor, layout: Layout) -> Item:
    """Returns the description of a tensor."""
    return Item("w", whole_shape(tensor, layout), held_boxes(tensor, layout), (0,))


def test_what_travels() -> None:
    """Tensors by their whole shape; numbers and texts; nothing else, except where it stays."""
    layout = Layout("mp", 0, 2, 1, (4, 3))
    part, other = torch.zeros(2, 3), torch.zeros(3, dtype=torch.int64)
    assert described("w", part, item(part, layout)) == ["w", "float32", [4, 3], None]
    assert described("w", other, item(other, layout)) == ["w", "int64", [3], None]
    assert described("n", 3, None) == ["n", "value", [], 3]
    assert described("n", object(), None, travels=False) == ["n", "value", [], None]
    with pytest.raises(CheckpointError, match="'n' is a object"):
        described("n", object(), None)


def test_cutting() -> None:
    """A whole tensor becomes the part, a part stays, and other shapes are left for the error of torch."""
    net = nn.ParameterDict({name: nn.Parameter(torch.zeros(2)) for name in ("w", "own", "odd")})
    for name in net:
        set_layout(net, name, Layout("mp", 0, 2, 1, (4,)))
    state = {"w": torch.arange(4), "own": torch.arange(2), "odd": torch.arange(3), "n": 1}
    found = ModelStates(net, StateMesh(Axes({"mp": 2}, 1), HOST)).fitted(state)
    assert found["w"].tolist() == [2, 3]
    assert found["own"] is state["own"]
    assert found["odd"] is state["odd"]
    assert found["n"] == 1
    assert cut(state["w"], None) is state["w"]


def test_places() -> None:
    """Which part of how many; another mesh of as many workers has other parts."""
    states = StateMesh(Axes({"dp": 2, "pp": 2, "mp": 2}, 5), HOST)
    layout = Layout("mp", 0, 2, 1, (4,))
    assert states.place([layout]) == {"rank": 1, "degree": 4, "pp": 2, "mp": 2}
    assert states.place([layout], {"rank": 1, "degree": 2}) == {"rank": 3, "degree": 8, "pp": 2, "mp": 2}
    alone = StateMesh(Axes({"dp": 2}, 1), HOST)
    assert alone.place([]) is None
    assert alone.place([], {"rank": 1, "degree": 2}) == {"rank": 1, "degree": 2}
    assert not alone.is_divided([])
    net = nn.Linear(2, 2)
    set_layout(net, "weight", Layout("mp", 0, 1, 0, (2, 2)))
    assert layouts_of(net) == {}


def test_marks() -> None:
    """A mark on the state survives files; plain dictionaries carry none."""
    state: Any = nn.Linear(1, 1).state_dict()
    mark_part(state, {"rank": 1, "degree": 2})
    assert marked_part([{"net": state}, 3]) == {"rank": 1, "degree": 2}
    assert marked_part({"net": dict(state)}) is None
    plain: dict[str, Any] = {}
    mark_part(plain, {"rank": 0, "degree": 1})
    assert marked_part(plain) is None


def peers_differ(rank: int, world_size: int) -> list[str]:
    """Returns what is said where the workers of one stage hold other entries, and what a list of stages is."""
    said = []
    axes = make_axes({"pp": 2, "mp": 2}, rank, torch.distributed.group.WORLD, 60)
    states = StateMesh(axes, HOST)
    group = states.copy_group()
    assert group.post(states.stage) == [0, 0, 1, 1]
    with pytest.raises(CheckpointError) as found:
        states.names([f"{rank}.w"])
    said.append(f"{found.value}")
    net = nn.ModuleDict({f"{states.stage}": nn.ParameterDict({"w": torch.full((1,), 1.0 * rank)})})
    net.register_parameter("tied", nn.Parameter(torch.full((2,), 1.0 * rank)))
    whole = ModelStates(net, states).whole(keep=True)
    said += [f"{name}@{int(tensor[0]) // 2}" for name, tensor in whole.items()]
    return said


def test_stages_are_united() -> None:
    """A tied entry belongs to the first stage; peers that differ raise on every worker."""
    for said in run_workers(peers_differ, 4):
        assert "rank 1 (pp 0, mp 1) differs from its peers along mp" in said[0]
        assert said[1:] == ["tied@0", "0.w@0", "1.w@1"]


class Large(nn.Module):
    """Six matrices of 32 MiB, of which each worker holds half."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        for number in range(6):
            name = f"w{number}"
            self.register_parameter(name, nn.Parameter(torch.full((4096, 1024), float(rank)), requires_grad=False))
            set_layout(self, name, Layout("mp", 0, 2, rank, (8192, 1024)))


def peak_of_a_gather(rank: int, world_size: int) -> tuple[int, int, list[float]]:
    """Returns how far the peak of memory rose, the size of the result, and numbers of it."""
    states = StateMesh(make_axes({"mp": 2}, rank, torch.distributed.group.WORLD, 60), HOST)
    model = ModelStates(Large(rank), states)
    ModelStates(nn.Linear(1, 1), states).whole(keep=True)  # whatever the first exchange takes
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that from now on
    before = peak_bytes()
    state = model.whole(keep=rank == 0)
    numbers = [float(value) for value in state["w3"][4095:4097, 0]] if rank == 0 else []
    return peak_bytes() - before, sum(tensor.nbytes for tensor in state.values()), numbers


def peak_bytes() -> int:
    """Returns the most memory that this process has had."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs the peak of a process from now on")
def test_a_gather_needs_one_entry_more_than_its_result() -> None:
    """The worker that keeps the state has its parts, the result and one entry; the other one only an entry."""
    entry, some = 32 << 20, 8 << 20
    for grown, size, numbers in run_workers(peak_of_a_gather, 2):
        assert size in (0, 6 * entry)
        assert grown <= size + entry + some, f"{grown >> 20} MiB for {size >> 20} MiB"
        assert numbers in ([], [0.0, 1.0])


def one_share(rank: int, world_size: int, path: str) -> Any:
    """Lets worker 0 write what both hold, and read it for both."""
    axes = make_axes({"mp": 2}, rank, torch.distributed.group.WORLD, 60)
    group = StateGroup.of_everyone(HOST)
    net = nn.ParameterDict({"w": nn.Parameter(torch.full((2, 3), float(rank)), requires_grad=False)})
    set_layout(net, "w", Layout("mp", 0, 2, rank, (4, 3)))
    job = SimpleNamespace(collective=True, axes=axes, global_rank=rank, world_size=world_size)
    pending = pending_share([ModelTensors("net", net, axes)], job)
    with pytest.raises(CheckpointError, match=r"save\(\): no room \(worker 1\)"):
        gathered(pending if rank == 0 else None, "no room" if rank else "", group, "save()")
    whole = gathered(pending, "", group, "save()")
    saved = None
    if whole is not None:
        folder = LocalFolder(path)
        whole.write(folder, "ab")
        saved = SavedTensors(folder, read_index(folder))
    index = Index.from_json(group.post("" if saved is None else saved.index.to_json())[0], "index")
    source = GroupSource(index, "worker 0's", group, saved=saved)
    net["w"].fill_(9.0)
    adapter = ModelTensors("net", net, axes)
    assert not adapter.check(source)
    wanted = adapter.wanted(source) if rank else Wanted()
    source.verify_all([wanted])
    source.fill_all([wanted])
    assert source.are_equal([("net/w", "net/w")]) == [True]
    assert source.are_equal([]) == []
    if saved is not None:  # damage is an error on every worker
        file = next(Path(path).glob("data-*"))
        data = file.read_bytes()
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        source = GroupSource(index, "worker 0's", group, saved=SavedTensors(LocalFolder(path), index))
    with pytest.raises(CheckpointError, match="do not match their sum"):
        source.verify_all([wanted])
    source.close()
    return index.tensors["net/w"].shape, net["w"].unique().tolist()


def test_worker_0_writes_and_reads_for_all(tmp_path: Path) -> None:
    """One share holds the blocks of all; each worker gets its part of what it wants, and errors are everyone's."""
    assert run_workers(one_share, 2, str(tmp_path / "a")) == [((4, 3), [9.0]), ((4, 3), [1.0])]
