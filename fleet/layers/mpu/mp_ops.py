"""The exchanges between whole and divided activations, under the names that model code of Fleet calls.

Example:
    >>> hidden = _c_identity(x)  # its gradient is the sum over the workers
    >>> logits = torch.nn.functional.linear(hidden, model.weight)  # this worker's part of the vocabulary
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from fleet.errors import ConfigError, UnsupportedOptionError
from fleet.strategies.tensor_parallel.place import place_in
from fleet.strategies.tensor_parallel.regions import copy_to, gather_from, reduce_from, scatter_to

__all__ = ["split"]


def _c_identity(tensor: Tensor, group: Any = None, skip_c_identity_dynamic: bool = False) -> Tensor:
    """Returns ``tensor``; backward adds up its gradients over the workers.

    Args:
        tensor: a whole activation that enters a divided region.
        group: the workers; ``None`` is the mp axis of the job.
        skip_c_identity_dynamic: accepted; there is no operator to skip.
    """
    return copy_to(tensor, place_in(group, "_c_identity").group)


def _mp_allreduce(
    tensor: Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    use_calc_stream: bool = True,
    use_model_parallel: bool = True,
    skip_c_identity_dynamic: bool = False,
) -> Tensor:
    """Returns the sum of ``tensor`` over the workers; backward hands the gradient on. Fleet writes it into ``tensor``.

    Args:
        tensor: this worker's term.
        op: the sum; nothing else has this gradient.
        group: the workers; ``None`` is the mp axis of the job.
        use_calc_stream: accepted; torch orders the streams.
        use_model_parallel: accepted.
        skip_c_identity_dynamic: accepted; there is no operator to skip.

    Raises:
        ConfigError: ``op`` is another operation.
    """
    if op != dist.ReduceOp.SUM:
        raise ConfigError(f"_mp_allreduce(op={op!r}) adds up; use torch.distributed.all_reduce for anything else.")
    return reduce_from(tensor, place_in(group, "_mp_allreduce").group)


def _c_split(tensor: Tensor, group: Any = None) -> Tensor:
    """Returns this worker's slice of the last dimension; backward gathers on the last dimension."""
    return scatter_to(tensor, place_in(group, "_c_split").group)


def _c_concat(tensor: Tensor, group: Any = None) -> Tensor:
    """Returns the tensors of all workers along the last dimension; backward takes the own slice."""
    return gather_from(tensor, place_in(group, "_c_concat").group)


def split(*args: Any, **kwargs: Any) -> Any:
    """Refused, as in Paddle's dynamic mode: it creates a layer at every call.

    Raises:
        UnsupportedOptionError: always; it names the layers to use.
    """
    raise UnsupportedOptionError(
        "split() creates a layer where it is called, which trains nothing outside a static graph. Create "
        "fleet.meta_parallel.ColumnParallelLinear (operation='linear', axis=1), RowParallelLinear (axis=0) or "
        "VocabParallelEmbedding (operation='embedding') in your module's __init__, and call that."
    )
