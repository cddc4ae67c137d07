"""Sequences divided over the sep axis: the split of the inputs, and the exchange inside attention."""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fleet.checks.same_rows import SameSequences
from fleet.errors import ConfigError
from fleet.job.axes import Axes
from fleet.job.running import running_job
from fleet.strategies.tensor_parallel import regions

_Inputs = TypeVar("_Inputs", Tensor, dict[str, Tensor])


def running_axes(call: str) -> Axes:
    """Returns the axes of the running job; raises ConfigError where ``call`` comes before ``fleet.init``."""
    job = running_job()
    if job is None:
        raise ConfigError(f"{call} asks the running job for its workers: call fleet.init(is_collective=True) first.")
    return job.axes


def axis_group(axis: str, given: Any, call: str) -> dist.ProcessGroup | None:
    """Returns ``given``, or the running job's group along ``axis``; ``None`` for one worker alone.

    Raises:
        ConfigError: ``given`` is another group than the job's along ``axis``, over which gradients are added up.
    """
    if given is None:
        return running_axes(call).group(axis)
    group = regions.group_of(given)
    job = running_job()
    if group is None or job is None:
        return group
    ranks = dist.get_process_group_ranks(group)
    own = list(job.axes.ranks(axis))
    if ranks != own:
        raise ConfigError(
            f"{call} got a group of the ranks {ranks}; along {axis} this worker is with {own}, and the gradients are "
            f"added up over those. Leave the group out, or set hybrid_configs['{axis}_degree']."
        )
    return group


def split_inputs_sequence_dim(
    inputs: _Inputs, sep_rank: int | None = None, sep_degree: int | None = None, dim: int = -1
) -> _Inputs:
    """Returns this worker's segment of whole sequences.

    Args:
        inputs: a tensor ``[rows, tokens]``, or a dictionary of such tensors, with the tokens of whole sequences.
        sep_rank: the place along sep; ``None`` is this worker's.
        sep_degree: the number of segments; ``None`` is the job's.
        dim: the dimension of the tokens.

    Raises:
        ConfigError: the tokens do not divide by the number of segments.

    Example:
        >>> split_inputs_sequence_dim(torch.arange(6).view(1, 6), sep_rank=1, sep_degree=2)
        tensor([[3, 4, 5]])
    """
    rank, degree = place_along("sep", sep_rank, sep_degree, "split_inputs_sequence_dim()")

    def segment(tokens: Tensor) -> Tensor:
        check_parts(tokens, dim, degree, "split_inputs_sequence_dim()", "sep_degree")
        return tokens.chunk(degree, dim)[rank]

    note_rows(inputs, "sep", degree)
    return each(inputs, segment)


class ReshardLayer(nn.Module):
    """Exchanges a division of the sequence for a division of the heads, or back.

    Each worker of ``sep_group`` gives ``[b, s / sep, heads, d]`` and gets ``[b, s, heads / sep, d]``, or the other way
    round with ``split_axis=1, concat_axis=2`` exchanged for ``split_axis=2, concat_axis=1``; backward is the reverse.

    Args:
        sep_group: the workers; ``None`` is the sep axis of the job.

    Example:
        >>> ReshardLayer()(torch.zeros(2, 8, 4, 16), split_axis=2, concat_axis=1).shape  # one worker alone
        torch.Size([2, 8, 4, 16])
    """

    def __init__(self, sep_group: Any = None) -> None:
        super().__init__()
        axis_group("sep", sep_group, "ReshardLayer")  # refuses another group

    def forward(self, x: Tensor, split_axis: int = 1, concat_axis: int = 2) -> Tensor:
        """Returns ``x`` divided along ``split_axis`` and whole along ``concat_axis``.

        Raises:
            ConfigError: ``split_axis`` does not divide by the number of workers.
        """
        # Not kept: a copy of the model has no use for a process group.
        group = axis_group("sep", None, "ReshardLayer")
        if group is None:
            return x
        check_parts(x, split_axis, group.size(), "ReshardLayer", "sep_degree")
        return regions.all_to_all(x, group, split_axis, concat_axis)


def sep_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = False,
    dropout: float = 0.0,
    scale: float | None = None,
    sep_group: Any = None,
) -> Tensor:
    """Returns the attention of this worker's segment to the whole sequence, by exchanging segments for heads.

    Args:
        q: ``[b, s / sep, heads, d]``, this worker's segment.
        k: the same, or with fewer heads that several query heads share.
        v: as ``k``.
        is_causal: hide later tokens from earlier ones.
        dropout: the probability to drop a weight; each worker draws from its own random stream, whose masks are not
            those of one process.
        scale: of the scores; ``None`` is ``d ** -0.5``.
        sep_group: the workers; ``None`` is the sep axis of the job.

    Raises:
        ConfigError: the heads of ``q``, or of ``k``, do not divide by the number of workers.
    """
    group = axis_group("sep", sep_group, "sep_attention()")
    check_attention(q, k, v, "sep_attention()")
    if group is not None:
        for x in (q, k):
            check_parts(x, 2, group.size(), "sep_attention(), whose dimension 2 is the heads", "sep_degree")
        look_at_queries(q, k, group, "sep_attention()")
    query, key, value = (regions.all_to_all(x, group, 2, 1).transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(
        query, key, value, dropout_p=dropout, is_causal=is_causal, scale=scale, enable_gqa=q.shape[2] != k.shape[2]
    )
    return regions.all_to_all(out.transpose(1, 2), group, 1, 2)


# ---- helpers of this axis and of cp ---------------------------------------------------------------------------------


def check_attention(q: Tensor, k: Tensor, v: Tensor, call: str) -> None:
    """Raises ConfigError unless queries, keys and values have shapes that belong together."""
    shapes = f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
    same = q.dim() == 4 and k.shape == v.shape and (*q.shape[:2], q.shape[3]) == (*k.shape[:2], k.shape[-1])
    if not same or q.shape[2] % k.shape[2]:
        raise ConfigError(
            f"{call} got q, k and v of the shapes {shapes}. Each is [rows, tokens of this worker, heads, size]; k and "
            "v are alike, and the heads of q are a multiple of theirs."
        )
    if len({q.dtype, k.dtype, v.dtype}) > 1:
        raise ConfigError(f"{call} got q, k and v of the types {q.dtype}, {k.dtype} and {v.dtype}; give them one type.")


def check_parts(x: Tensor, dim: int, parts: int, call: str, option: str) -> None:
    """Raises ConfigError unless dimension ``dim`` of ``x`` divides into ``parts``."""
    if x.shape[dim] % parts:
        raise ConfigError(
            f"{call}: dimension {dim} of a tensor of shape {tuple(x.shape)} has size {x.shape[dim]}, which does not "
            f"divide into {parts} parts. Choose a multiple of {parts}, or another {option}."
        )


def each(inputs: _Inputs, cut: Any) -> _Inputs:
    """Returns ``cut`` of a tensor, or of every tensor of a dictionary."""
    if isinstance(inputs, dict):
        return {name: cut(tensor) for name, tensor in inputs.items()}
    found: Tensor = cut(inputs)
    return found


def note_rows(inputs: Tensor | dict[str, Tensor], axis: str, degree: int) -> None:
    """Has the rows, which are whole along ``axis``, compared before the next forward of the running job."""
    job = running_job()
    if job is not None and degree > 1 and degree == job.axes.size(axis):
        # With both axes the rows are cut twice, first along cp: only then are they whole.
        if axis == "sep" and job.axes.size("cp") > 1:
            return
        for tensor in inputs.values() if isinstance(inputs, dict) else [inputs]:
            job.listeners.get(SameSequences).note(tensor)


def look_at_queries(q: Tensor, k: Tensor, group: dist.ProcessGroup, call: str) -> None:
    """Warns where the workers of ``group`` hold the same tokens; ``call`` is the attention that got ``q`` and ``k``.

    Raises ConfigError where they hold other numbers of them.
    """
    job = running_job()
    if job is not None:
        sequences = job.listeners.get(SameSequences)
        sequences.check_shapes((q, k), group, call)
        sequences.look_at(q, group, call)


def place_along(axis: str, rank: int | None, degree: int | None, call: str) -> tuple[int, int]:
    """Returns ``rank`` and ``degree``, each taken from the running job where it is ``None``."""
    if rank is None or degree is None:
        axes = running_axes(call)
        rank = axes.rank(axis) if rank is None else rank
        degree = axes.size(axis) if degree is None else degree
    if not 0 <= rank < degree:
        raise ConfigError(f"{call}: place {rank} of {degree} does not exist; places are 0 to {degree - 1}.")
    return rank, degree
