"""The random streams of a job with divided layers: the seed of each worker, and dropout from a named stream."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fleet.errors import ConfigError
from fleet.job.axes import Axes
from fleet.strategies._shared.random_streams import TRACKER, RNGStatesTracker
from fleet.strategies.tensor_parallel.layers import STREAM

tracker = TRACKER
_MODES = ("upscale_in_train", "downscale_in_infer")


def get_rng_state_tracker() -> RNGStatesTracker:
    """Returns the random streams of this process.

    Example:
        >>> with get_rng_state_tracker().rng_state():
        ...     x = torch.nn.functional.dropout(x)  # another mask on each worker of the mp axis
    """
    return tracker


def seed_streams(seed: int | None, axes: Axes | None, device: torch.device | None = None) -> int:
    """Seeds the global stream alike on all workers, and 'model_parallel_rng' by stage and part; returns the seed.

    The stream gets ``seed + 1 + mp_rank * stages + stage``. Workers that differ in their data only have the same
    streams.

    Args:
        seed: the seed; ``None`` takes ``torch.initial_seed()`` of worker 0, so every worker must call.
        axes: the place of this worker; ``None`` in a single process.
        device: where the workers can exchange a number.

    Raises:
        ConfigError: the seed is negative or no whole number.
    """
    if seed is None:
        agreed = torch.tensor(torch.initial_seed() % 2**62, device=device)
        if axes is not None and axes.world_size > 1 and dist.is_initialized():
            dist.broadcast(agreed, 0)
        seed = int(agreed)
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ConfigError(f"model_parallel_random_seed(seed={seed!r}) takes a whole number of at least 0, or None.")
    # The global stream is the same on all: masks of undivided activations must be equal along mp.
    tracker.reset()
    place = 0 if axes is None else axes.rank("mp") * axes.size("pp") + axes.rank("pp")
    tracker.add(STREAM, seed + 1 + place)
    torch.manual_seed(seed)
    return seed


def determinate_seed(rng_name: str) -> Tensor:
    """Returns a seed drawn from the stream ``rng_name``, as a tensor of one whole number."""
    with tracker.rng_state(rng_name):
        return torch.randint(0, 2**31 - 1, (1,))


def dropout(
    x: Tensor,
    p: float = 0.5,
    axis: int | list[int] | None = None,
    rng_name: str | None = None,
    training: bool = True,
    mode: str = "upscale_in_train",
    name: str | None = None,
) -> Tensor:
    """Returns ``x`` with elements set to zero with probability ``p``, drawn from the stream ``rng_name``.

    Args:
        x: the tensor.
        p: the probability, 0 to 1.
        axis: dimensions along which elements are dropped one by one; along the others all together.
        rng_name: a stream of :func:`get_rng_state_tracker`; ``None`` is the global one. It needs ``axis`` None.
        training: False drops nothing.
        mode: 'upscale_in_train' divides by ``1 - p`` in training; 'downscale_in_infer' multiplies by it otherwise.
        name: accepted for Fleet's signature.

    Raises:
        ConfigError: a value is outside its bounds.
    """
    if isinstance(p, bool) or not isinstance(p, int | float) or not 0 <= p <= 1:
        raise ConfigError(f"dropout(p={p!r}) takes a number from 0 to 1.")
    if mode not in _MODES:
        raise ConfigError(f"dropout(mode={mode!r}) is one of {', '.join(_MODES)}.")
    if axis is not None and rng_name is not None:
        raise ConfigError(f"dropout(axis={axis!r}, rng_name={rng_name!r}): a named stream needs axis=None.")
    if not training:
        return x if mode == "upscale_in_train" else x * (1 - p)
    with nullcontext() if rng_name is None else tracker.rng_state(rng_name):
        if axis is not None:
            kept = [a % x.dim() for a in ([axis] if isinstance(axis, int) else axis)]
            mask = F.dropout(x.new_ones([size if d in kept else 1 for d, size in enumerate(x.shape)]), p)
            dropped = x * mask
        else:
            dropped = F.dropout(x, p)
    return dropped if mode == "upscale_in_train" else dropped * (1 - p)
