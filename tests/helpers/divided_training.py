"""A small GPT in three forms, plain, divided over the mp axis, and with its sequence divided too, and their comparison.

Every worker also trains the plain form alone on all rows, and compares its parts with parts of that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, HIDDEN, HEADS, TOKENS, ROWS = 16, 16, 4, 8, 4


@dataclass(frozen=True)
class Kit:
    """The layers of one form.

    Attributes:
        column: a linear layer from whole to divided features.
        row: a linear layer from divided to whole features.
        vocabulary: the embedding.
        loss: the loss of each row of logits.
        enter: what happens in front of the first block, to activations ``[tokens, rows, hidden]``.
        leave: what happens in front of the logits.
        mark: what happens to the parameters of norms.
    """

    column: Callable[[int, int], nn.Module]
    row: Callable[[int, int], nn.Module]
    vocabulary: Callable[[int, int], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    enter: Callable[[Tensor], Tensor]
    leave: Callable[[Tensor], Tensor]
    mark: Callable[[Tensor], None]


def plain_kit() -> Kit:
    """Returns torch's own layers."""

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")

    return Kit(nn.Linear, nn.Linear, nn.Embedding, loss, lambda x: x, lambda x: x, lambda p: None)


def divided_kit() -> Kit:
    """Returns Fleet's divided layers."""
    from fleet.layers.mpu.mp_ops import _c_identity
    from fleet.meta_parallel import (
        ColumnParallelLinear,
        ParallelCrossEntropy,
        RowParallelLinear,
        VocabParallelEmbedding,
    )

    return Kit(
        column=lambda i, o: ColumnParallelLinear(i, o, has_bias=True, gather_output=False),
        row=lambda i, o: RowParallelLinear(i, o, input_is_parallel=True),
        vocabulary=VocabParallelEmbedding,
        loss=ParallelCrossEntropy(),
        enter=lambda x: x,
        leave=_c_identity,
        mark=lambda p: None,
    )


def sequence_kit(marks: bool = True) -> Kit:
    """Returns Fleet's divided layers for a divided sequence; without ``marks`` nobody adds up the norms' gradients."""
    from fleet.meta_parallel import ParallelCrossEntropy, VocabParallelEmbedding
    from fleet.utils.sequence_parallel_utils import (
        AllGatherOp,
        ColumnSequenceParallelLinear,
        RowSequenceParallelLinear,
        ScatterOp,
        mark_as_sequence_parallel_parameter,
    )

    return Kit(
        column=lambda i, o: ColumnSequenceParallelLinear(i, o, has_bias=True, gather_output=False),
        row=lambda i, o: RowSequenceParallelLinear(i, o, input_is_parallel=True),
        vocabulary=VocabParallelEmbedding,
        loss=ParallelCrossEntropy(),
        enter=ScatterOp.apply,
        leave=AllGatherOp.apply,
        mark=mark_as_sequence_parallel_parameter if marks else lambda p: None,
    )


class Block(nn.Module):
    """Attention and a feed-forward pair, each behind a norm."""

    def __init__(self, kit: Kit) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.query, self.key, self.value = (kit.column(HIDDEN, HIDDEN) for _ in range(3))
        self.out = kit.row(HIDDEN, HIDDEN)
        self.up, self.down = kit.column(HIDDEN, 2 * HIDDEN), kit.row(2 * HIDDEN, HIDDEN)
        for parameter in (*self.first.parameters(), *self.second.parameters()):
            kit.mark(parameter)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        heads = [self._heads(layer(h)) for layer in (self.query, self.key, self.value)]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)  # [rows, heads, tokens, size]
        x = x + self.out(mixed.permute(2, 0, 1, 3).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))

    def _heads(self, projected: Tensor) -> Tensor:
        tokens, rows, _ = projected.shape
        return projected.reshape(tokens, rows, -1, HIDDEN // HEADS).permute(1, 2, 0, 3)


class Gpt(nn.Module):
    """Two blocks between an embedding and logits with the same weight."""

    def __init__(self, kit: Kit) -> None:
        super().__init__()
        self.embedding = kit.vocabulary(VOCABULARY, HIDDEN)
        self.blocks = nn.Sequential(Block(kit), Block(kit))
        self.last = nn.LayerNorm(HIDDEN)
        for parameter in self.last.parameters():
            kit.mark(parameter)
        self.__dict__["kit"] = kit

    def forward(self, ids: Tensor) -> Tensor:
        x = self.last(self.blocks(self.kit.enter(self.embedding(ids.T))))
        return F.linear(self.kit.leave(x), self.embedding.weight)


def data(steps: int, replicas: int) -> Tensor:
    """Returns ids of every step, with the rows of all ``replicas``."""
    drawn = torch.Generator().manual_seed(5)
    return torch.randint(0, VOCABULARY, (steps, ROWS * replicas, TOKENS + 1), generator=drawn)


def whole_state() -> dict[str, Tensor]:
    """Returns the values from which every form begins."""
    torch.manual_seed(3)
    return {name: torch.randn_like(p) * 0.5 for name, p in Gpt(plain_kit()).named_parameters()}


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Gives ``model`` the values of :func:`whole_state`, or its parts of them."""
    from fleet.strategies._shared.parameter_layout import layout_of

    state = whole_state()
    for name, parameter in model.named_parameters():
        layout = layout_of(parameter)
        parameter.copy_(state[name] if layout is None else layout.part(state[name]))


def plain_training(steps: int, replicas: int) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Returns the losses, the first gradients and the last weights of one process on all rows."""
    model = Gpt(plain_kit())
    fill(model)
    optimizer, first, losses = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), {}, []
    for step, ids in enumerate(data(steps, replicas)):
        loss = model.kit.loss(model(ids[:, :-1]), ids[:, 1:].T).mean()
        loss.backward()
        if step == 0:
            first = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, first, {name: p.detach() for name, p in model.named_parameters()}


def apart(parts: Mapping[str, Tensor], wholes: Mapping[str, Tensor], layouts: Mapping[str, Any]) -> float:
    """Returns the largest distance of a part from that of the whole, relative to the norm of that.

    A bias of keys, whose gradient is zero but for rounding, counts relative to all.
    """
    scale = torch.stack([whole.norm() for whole in wholes.values()]).norm()
    found = 0.0
    for name, part in parts.items():
        expected = layouts[name].part(wholes[name]) if name in layouts else wholes[name]
        size = scale if "key.bias" in name else wholes[name].norm()
        found = max(found, float((part - expected).norm() / size))
    return found


def gathered(tensor: Any) -> Tensor:
    """Returns a copy of ``tensor``, gathered where sharding divides it once more."""
    from fleet.strategies._shared.parts import is_part

    whole: Tensor = tensor.full_tensor() if is_part(tensor) else tensor.clone()
    return whole


def compare(kit: Kit, steps: int = 4, wrap: Callable[[nn.Module], Any] | None = None) -> dict[str, float]:
    """Trains the form of ``kit`` in the running job; returns how far it is from one process on all rows.

    ``wrap`` sees the module before ``distributed_model`` does.
    """
    from fleet import fleet
    from fleet.job.running import running_session
    from fleet.strategies._shared.parameter_layout import layouts_in

    session = running_session()
    assert session is not None
    replicas, replica = session.job.axes.data_replicas, session.job.axes.data_rank
    losses, first, last = plain_training(steps, replicas)
    net = Gpt(kit)
    fill(net)
    if wrap is not None:
        wrap(net)
    model = fleet.distributed_model(net)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.1, momentum=0.9))
    layouts, gradients, mine = layouts_in(net), {}, []
    for step, ids in enumerate(data(steps, replicas)):
        own = ids[replica * ROWS : (replica + 1) * ROWS]
        loss = kit.loss(model(own[:, :-1].contiguous()), own[:, 1:].T.contiguous()).mean()
        loss.backward()
        if step == 0:
            gradients = {name: gathered(p.grad) for name, p in net.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.clear_grad()
        mine.append(fleet.all_reduce(loss.detach(), "sum").item() / session.job.world_size)
    return {
        "loss": max(abs(a - b) for a, b in zip(losses, mine, strict=True)),
        "gradients": apart(gradients, first, layouts),
        "weights": apart({name: gathered(p.detach()) for name, p in net.named_parameters()}, last, layouts),
        "divided": len(layouts),
    }


def start(options: Mapping[str, Any] | None = None, **degrees: int) -> None:
    """Calls ``fleet.init`` with degrees (``mp=2``) and further options."""
    from fleet import fleet

    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {f"{axis}_degree": degree for axis, degree in degrees.items()}
    for name, value in (options or {}).items():
        setattr(strategy, name, value)
    fleet.init(is_collective=True, strategy=strategy)
