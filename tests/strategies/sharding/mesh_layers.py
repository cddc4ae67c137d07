"""A model of Fleet's divided layers, with and without sequence parallelism, trained with sharding on the mesh."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu
from torch.nn.utils import clip_grad_norm_

import fleet
from fleet.meta_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from fleet.strategies._shared.parameter_layout import layouts_in
from fleet.utils.sequence_parallel_utils import (
    ColumnSequenceParallelLinear,
    GatherOp,
    RowSequenceParallelLinear,
    ScatterOp,
    mark_as_sequence_parallel_parameter,
)
from tests.helpers.toy_mesh import own_rows, whole_parameters
from tests.strategies._shared.norm_jobs import init

VOCABULARY, WIDTH, STEPS = 16, 8, 3


class Tokens(nn.Module):
    """Embedding, a block that is divided over mp, and a head."""

    def __init__(self, in_sequence: bool) -> None:
        super().__init__()
        self.in_sequence = in_sequence
        column = ColumnSequenceParallelLinear if in_sequence else ColumnParallelLinear
        row = RowSequenceParallelLinear if in_sequence else RowParallelLinear
        self.words = VocabParallelEmbedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = column(WIDTH, 2 * WIDTH, has_bias=True, gather_output=False)
        self.down = row(2 * WIDTH, WIDTH, has_bias=True, input_is_parallel=True)
        self.head = ColumnParallelLinear(WIDTH, VOCABULARY, has_bias=False, gather_output=True)
        for parameter in self.norm.parameters() if in_sequence else ():
            mark_as_sequence_parallel_parameter(parameter)

    def forward(self, ids: Tensor) -> Tensor:
        """Returns the scores of the next token, shape [rows, tokens, vocabulary]."""
        x = self.words(ids).transpose(0, 1)
        x = ScatterOp.apply(x) if self.in_sequence else x
        x = x + self.down(gelu(self.up(self.norm(x))))
        x = GatherOp.apply(x) if self.in_sequence else x
        scores: Tensor = self.head(x).transpose(0, 1)
        return scores


def train(rank: int, world_size: int, cases: list[tuple[dict[str, Any], bool]]) -> list[dict[str, Any]]:
    """Trains with each of ``cases``, options and whether in sequence; returns losses, norms and whole parameters."""
    return [train_once(options, in_sequence) for options, in_sequence in cases]


@torch.no_grad()
def fill(net: nn.Module) -> None:
    """Gives ``net`` the same whole weights on every mesh."""
    generator, layouts = torch.Generator().manual_seed(1), layouts_in(net)
    for name, parameter in net.named_parameters():
        layout = layouts.get(name)
        whole = torch.randn(parameter.shape if layout is None else layout.whole, generator=generator) * 0.3
        parameter.copy_(whole if layout is None else layout.part(whole))


def train_once(options: dict[str, Any], in_sequence: bool) -> dict[str, Any]:
    """Trains a few steps with clipping."""
    axes = init(**options)
    net = Tokens(in_sequence)
    fill(net)
    optimizer: Any = fleet.distributed_optimizer(torch.optim.AdamW(net.parameters(), 1e-2, eps=1e-4))
    model: Any = fleet.distributed_model(net)
    losses, norms = [], []
    for step in range(STEPS):
        ids = torch.randint(VOCABULARY, (8, 4), generator=torch.Generator().manual_seed(step))
        own = own_rows(ids, axes)
        loss = cross_entropy(model(own).flatten(0, 1), own.roll(1, 1).flatten())
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), 0.5)
        norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "weights": whole_parameters(model.module, axes)}
