"""What holds in a job with mp_degree above 1; each function runs on every worker, after the one before."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fleet
from fleet import fleet as job
from fleet.errors import ConfigError, OptionWarning
from fleet.meta_parallel import (
    ColumnParallelLinear,
    ParallelCrossEntropy,
    RowParallelLinear,
    VocabParallelEmbedding,
    get_rng_state_tracker,
)
from tests.helpers import divided_training as training


class Pair(nn.Module):
    """A norm in front of two divided layers."""

    def __init__(self, drops: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.up = ColumnParallelLinear(4, 8, has_bias=True, gather_output=False)
        self.down = RowParallelLinear(8, 4, input_is_parallel=True)
        self.drops = drops

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(self.norm(x)))
        if self.drops:
            with get_rng_state_tracker().rng_state():
                h = F.dropout(h, 0.5)
        y = self.down(h)
        return F.dropout(y, 0.5) if self.drops else y


class Wrong(nn.Module):
    """Drops elements of a whole activation by masks that differ between the workers."""

    def forward(self, x: Tensor) -> Tensor:
        with get_rng_state_tracker().rng_state():
            return F.dropout(x, 0.5)


def with_mp(world_size: int, **mp_configs: Any) -> dict[str, Any]:
    return {"hybrid_configs": {"mp_degree": world_size, "mp_configs": mp_configs}}


def everywhere(tensor: Tensor) -> list[Tensor]:
    """Returns the tensor of every worker."""
    found = [torch.empty_like(tensor) for _ in range(job.worker_num())]
    torch.distributed.all_gather(found, tensor.detach().contiguous())
    return found


def are_equal(tensor: Tensor) -> bool:
    found = everywhere(tensor)
    return all(torch.equal(found[0], other) for other in found)


def prepared(model: nn.Module, lr: float = 0.1) -> tuple[Any, Any]:
    optimizer = torch.optim.Adam(model.parameters(), lr)
    return job.distributed_model(model), job.distributed_optimizer(optimizer)


def start_is_equal(rank: int, world_size: int) -> None:
    """Surface 1.3: undivided parameters and buffers are those of the first worker; parts and no_sync ones are not."""
    torch.manual_seed(rank)
    training.start(mp=world_size)
    model = Pair()
    nn.init.normal_(model.norm.weight, generator=torch.Generator().manual_seed(rank))
    model.expert = nn.Parameter(torch.full((2,), float(rank)))
    model.expert.no_sync = True
    model.register_buffer("count", torch.tensor([float(rank)]))
    assert not are_equal(model.norm.weight)
    copied = copy.deepcopy(model)
    copied.expert.no_sync = True
    for net in (model, copied):  # a deep copy drops attributes of parameters, and is as good
        parts = everywhere(net.up.weight)
        assert not torch.equal(parts[0], parts[1])  # each draws its own part
        job.distributed_model(net)
        assert are_equal(net.norm.weight)
        assert are_equal(net.count)
        assert not are_equal(net.expert)
        assert torch.equal(everywhere(net.up.weight)[0], parts[0])


def streams(rank: int, world_size: int) -> None:
    """Section 4 and P1: one agreed seed; masks of whole activations are equal, those of divided ones are not."""
    torch.manual_seed(10 + rank)
    training.start(mp=world_size)
    assert torch.initial_seed() == 10  # rank 0's
    drawn = torch.rand(8)
    assert are_equal(drawn)
    with get_rng_state_tracker().rng_state():
        assert not are_equal(torch.rand(8))
    training.start({**with_mp(world_size), "tensor_parallel_configs": {"tensor_init_seed": 77}})
    assert torch.initial_seed() == 77
    saved = get_rng_state_tracker().get_states_tracker()
    with get_rng_state_tracker().rng_state():
        own = torch.rand(4)
    torch.manual_seed(77 + 1 + rank)
    assert torch.equal(own, torch.rand(4))
    get_rng_state_tracker().set_states_tracker(saved)
    with get_rng_state_tracker().rng_state():
        assert torch.equal(own, torch.rand(4))


def recompute_is_bit_equal(rank: int, world_size: int) -> None:
    """Section 10: the tracker's streams are as in forward when a segment is computed again, and go on afterwards."""
    found = []
    for how in ("plain", "recompute", "hybrid", "option"):
        on: dict[str, Any] = {"recompute": True, "recompute_configs": {"checkpoints": ["0"]}} if how == "option" else {}
        training.start({**with_mp(world_size), **on, "tensor_parallel_configs": {"tensor_init_seed": 5}})
        net = nn.Sequential(Pair(drops=True), Pair(drops=True))
        model = job.distributed_model(net)
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
        torch.manual_seed(4)
        group = job.get_hybrid_communicate_group().get_model_parallel_group()
        if how == "recompute":
            y = model[1](fleet.utils.recompute(model[0], x))
        elif how == "hybrid":
            y = model[1](fleet.utils.recompute_hybrid({"mp_group": group, "partition": True}, model[0], x))
        else:
            y = net(x)
        with get_rng_state_tracker().rng_state():
            between = torch.rand(2)
        y.square().sum().backward()
        with get_rng_state_tracker().rng_state():
            found.append([y.detach(), x.grad, *(p.grad for p in net.parameters()), between, torch.rand(2)])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    with pytest.raises(ConfigError, match="5 elements"):
        fleet.utils.recompute_hybrid({"mp_group": group, "partition": True}, torch.tanh, torch.ones(5))


def nothing_divided(rank: int, world_size: int) -> None:
    """A model without a divided parameter would be trained twice; a layer made before fleet.init is whole."""
    training.start()
    early = Pair()
    assert early.up.weight.shape == (8, 4)
    training.start(mp=world_size)
    with pytest.raises(ConfigError, match="no divided parameter.*ColumnParallelLinear.*here: '0', '1'"):
        job.distributed_model(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    with pytest.raises(ConfigError, match=r"'up' \(ColumnParallelLinear\) was created before fleet.init"):
        job.distributed_model(early)
    alone = torch.distributed.new_group([0, 1]) if world_size > 2 else None
    if alone is not None and rank < 2:
        with pytest.raises(ConfigError, match="mp axis of this job"):
            VocabParallelEmbedding(8, 4, mp_group=alone)


def other_rows(rank: int, world_size: int) -> None:
    """P6: other rows on the workers of one model are copied over with a warning, or refused; labels are noticed."""
    own = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))
    training.start(with_mp(world_size))
    model, _ = prepared(Pair())
    x = own.clone()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(x)
        model(own.clone())
    assert are_equal(x)  # in place
    said = [str(w.message) for w in caught if w.category is OptionWarning]
    assert len(said) == (rank > 0)  # once
    assert not said or "fleet.data_rank() of fleet.data_replicas()" in said[0]
    wide = own[:, :1].expand(3, 4)  # no memory of its own, so it is replaced
    assert are_equal(model(wide))
    with pytest.raises(ConfigError, match="differ in structure, shape"):
        model(torch.ones(3 + rank, 4))

    training.start(with_mp(world_size, need_broadcast_data=False))
    model, optimizer = prepared(Pair())
    same = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    model(same)
    with pytest.raises(ConfigError, match=r"differ between the workers \[0, 1.*fleet.data_replicas\(\)"):
        model(own)
    (model(same) * own).sum().backward()  # as labels of other rows would
    with pytest.raises(ConfigError, match="from different losses:(.|\n)*from the same labels"):
        optimizer.step()
    with pytest.raises(ConfigError, match=r"the labels differ between the workers \[0, 1"):
        ParallelCrossEntropy()(torch.randn(3, 4), torch.full((3,), rank))
    with pytest.raises(ConfigError, match=r"the labels differ between the workers \[0, 1"):
        ParallelCrossEntropy()(torch.randn(3 + rank, 4), torch.zeros(3 + rank, dtype=torch.long))

    training.start(with_mp(world_size))  # dropout of a whole activation from the wrong stream
    model, optimizer = prepared(nn.Sequential(Pair(), Wrong(), nn.Linear(4, 4)))
    with torch.no_grad():
        outputs = model(same)
    assert not are_equal(outputs)
    model(same).square().sum().backward()
    with pytest.raises(ConfigError, match="from different losses:(.|\n)*the same dropout masks"):
        optimizer.step()


def missing_gradient(rank: int, world_size: int) -> None:
    training.start(with_mp(world_size))
    model, optimizer = prepared(Pair())
    model(torch.ones(3, 4)).sum().backward()
    if rank:
        model.norm.bias.grad = None
    with pytest.raises(ConfigError, match=r"'norm.bias' is held whole .* only 1 of them"):
        optimizer.step()


def marks(rank: int, world_size: int) -> None:
    """Section 5: without a mark training is wrong, and raises; a mark where the sequence is whole warns."""
    training.start(with_mp(world_size))
    with pytest.raises(ConfigError, match=r"blocks.0.first.weight.*mark_as_sequence_parallel_parameter"):
        training.compare(training.sequence_kit(marks=False), steps=1)
    training.start(with_mp(world_size))
    kit = training.sequence_kit(marks=False)

    def mark_later(net: nn.Module) -> None:
        from fleet.utils import sequence_parallel_utils as utils

        for name, parameter in net.named_parameters():
            if "first" in name or "second" in name or "last" in name:
                utils.mark_as_sequence_parallel_parameter(parameter)
                assert utils.is_sequence_parallel_parameter(parameter)
        utils.register_sequence_parallel_allreduce_hooks(net, 1, False)
        utils.register_sequence_parallel_allreduce_hooks(net, 1, False)

    assert training.compare(kit, steps=1, wrap=mark_later)["gradients"] < 1e-5
    training.start(with_mp(world_size))
    net = Pair()
    from fleet.utils.sequence_parallel_utils import mark_as_sequence_parallel_parameter

    mark_as_sequence_parallel_parameter(net.norm.weight)
    model, _ = prepared(net)
    with pytest.warns(OptionWarning, match=rf"'norm.weight'.*{world_size} times too large"):
        model(torch.randn(3, 4)).square().sum().backward()


def upkeep(rank: int, world_size: int) -> None:
    """Surface 8.1 rows 3 and 5: what sync_param, sync_grad, sync_moment and sync_mode do to parameters that differ."""

    def stepped(spoils: str, **mp_configs: Any) -> tuple[Any, Any]:
        training.start(with_mp(world_size, **mp_configs))
        model, optimizer = prepared(Pair())
        for step in range(3):  # beyond the first updates, whose gradients are compared
            model(torch.tensor([[1.0, 2.0, -1.0, 0.5]])).square().sum().backward()
            spoil = step == 2
            with torch.no_grad():
                if spoil and spoils == "parameter":
                    model.norm.weight += rank
                if spoil and spoils == "gradient":
                    model.norm.bias.grad += rank
                if spoil and spoils == "moment":
                    optimizer.state[model.norm.weight]["exp_avg"] += rank
            optimizer.step()
            optimizer.clear_grad()
        return model, optimizer

    model, _ = stepped("parameter", sync_param=False)
    assert not are_equal(model.norm.weight)
    for mode in ("broadcast", "average"):
        model, _ = stepped("parameter", sync_mode=mode)
        assert are_equal(model.norm.weight)
        mean = float(model.norm.weight.detach().mean())
        assert abs(mean - (1 if mode == "broadcast" else 1 + (world_size - 1) / 2)) < 0.5
        assert not are_equal(model.up.weight)
    model, _ = stepped("gradient", sync_param=False)
    assert not are_equal(model.norm.bias)
    model, optimizer = stepped("gradient", sync_param=False, sync_grad=True)
    assert are_equal(model.norm.bias)
    assert are_equal(optimizer.state[model.norm.bias]["exp_avg"])
    model, optimizer = stepped("moment")
    assert not are_equal(optimizer.state[model.norm.weight]["exp_avg"])
    model, optimizer = stepped("moment", sync_moment=True)
    assert are_equal(optimizer.state[model.norm.weight]["exp_avg"])
    model, _ = stepped("parameter", sync_param_name=["down"])  # P11: torch's names
    assert not are_equal(model.norm.weight)
    with pytest.raises(ConfigError, match=r"sync_param_name is \['layer_norm'\].*'norm.weight'"):
        stepped("", sync_param_name=["layer_norm"])


CHECKS = (
    start_is_equal,
    streams,
    recompute_is_bit_equal,
    nothing_divided,
    other_rows,
    missing_gradient,
    marks,
    upkeep,
)
