"""The small GPT with activations divided by sequence between its divided layers: Fleet's form and torch's."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from _hybrid_models import Size
from torch import Tensor, nn
from torch.nn import functional as F


class SequenceBlock(nn.Module):
    """Attention and an MLP on ``[tokens, rows, hidden]``, of which a worker holds some tokens outside the layers."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        from fleet.utils import sequence_parallel_utils as spu

        hidden, self.width = size.hidden, size.hidden // size.heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv = spu.ColumnSequenceParallelLinear(hidden, 3 * hidden, has_bias=True, gather_output=False)
        self.o = spu.RowSequenceParallelLinear(hidden, hidden, input_is_parallel=True)
        self.up = spu.ColumnSequenceParallelLinear(hidden, 4 * hidden, has_bias=True, gather_output=False)
        self.down = spu.RowSequenceParallelLinear(4 * hidden, hidden, input_is_parallel=True)
        for parameter in [*self.norm1.parameters(), *self.norm2.parameters()]:
            spu.mark_as_sequence_parallel_parameter(parameter)

    def forward(self, x: Tensor) -> Tensor:
        """Takes and returns this worker's tokens."""
        heads = self.qkv(self.norm1(x)).unflatten(-1, (-1, 3 * self.width)).permute(1, 2, 0, 3)
        q, k, v = heads.chunk(3, -1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.permute(2, 0, 1, 3).flatten(2))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


class SequenceModel(nn.Module):
    """Whole embedding and head around blocks whose activations are divided by sequence."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        from fleet.utils import sequence_parallel_utils as spu

        self.scatter, self.gather = spu.ScatterOp.apply, spu.GatherOp.apply
        self.embed = nn.Embedding(size.vocab, size.hidden)
        self.blocks = nn.Sequential(*(SequenceBlock(size) for _ in range(size.layers)))
        self.norm, self.head = nn.LayerNorm(size.hidden), nn.Linear(size.hidden, size.vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Takes ``[rows, tokens]``, returns logits."""
        divided = self.blocks(self.scatter(self.embed(x).transpose(0, 1).contiguous()))
        logits: Tensor = self.head(self.norm(self.gather(divided))).transpose(0, 1)
        return logits


def cut_by_torch_with_sequences(model: nn.Sequential) -> nn.Module:
    """Divides the plain model with parallelize_module and SequenceParallel, as torch's tutorial does."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import parallel as tp

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    last = len(model) - 1
    styles: dict[str, Any] = {
        "0": tp.PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1), use_local_output=True),
        str(last - 1): tp.SequenceParallel(),
        str(last): tp.ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate(), use_local_output=True),
    }
    for place in range(1, last - 1):
        styles |= {f"{place}.norm1": tp.SequenceParallel(), f"{place}.norm2": tp.SequenceParallel()}
        styles |= {f"{place}.{name}": tp.ColwiseParallel(input_layouts=Shard(1)) for name in ("q", "k", "v", "up")}
        styles |= {f"{place}.{name}": tp.RowwiseParallel(output_layouts=Shard(1)) for name in ("o", "down")}
    return tp.parallelize_module(model, mesh, styles)
