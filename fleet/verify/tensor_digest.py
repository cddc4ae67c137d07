"""Digests: a few numbers that stand for a tensor, so that two runs are compared without keeping their tensors.

[Note: Digests]
A projection is the inner product with a fixed vector of normal random numbers. Two tensors that differ by ``d`` have
projections that differ by about the norm of ``d``, whatever the difference looks like. Projections are linear: those
of the shards of one tensor add up to that of the whole, and the mean over workers is that of the mean tensor. Rows are
projected one by one, so that the rows of all workers can be laid beside those of one process in any order.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

MOST_ROWS = 4096
NO_MEMORY = (0, 0)
_SEED = 20240607
_CHUNK = 1 << 20
_BLOCK = 16384

_vectors: dict[str, Tensor] = {}


def _vector(length: int) -> Tensor:
    """Returns ``length`` normal random numbers, the same ones in every process; repeats after 16 Mi elements."""
    known = _vectors.get("v")
    if known is None or len(known) < length:
        size = min(max(_CHUNK, length), 16 * _CHUNK)
        made = torch.empty(size)
        for start in range(0, size, _CHUNK):  # chunk by chunk: the first numbers do not depend on the size
            stop = min(start + _CHUNK, size)
            generator = torch.Generator().manual_seed(_SEED + start)
            made[start:stop] = torch.randn(_CHUNK, generator=generator)[: stop - start]
        known = _vectors["v"] = made
    if length > len(known):
        return known.repeat(-(-length // len(known)))[:length]
    return known[:length]


@torch.no_grad()
def whole_digest(tensor: Tensor) -> dict[str, Any]:
    """Returns projection, sum of squares and number of elements; of a DTensor those of this worker's shard.

    ``part`` names the shard: equal ones are copies, and the numbers of different ones add up to those of the whole.
    """
    tensor = tensor.detach()
    part, vector = "", None
    if isinstance(tensor, DTensor):
        tensor, vector, part = _shard_of(tensor)
    flat = _plain(tensor)
    vector = _vector(flat.numel()) if vector is None else vector
    return {
        "p": float(_dot(flat, vector)),
        "s": float(_dot(flat, flat)),
        "n": flat.numel(),
        "part": part,
        "dtype": str(tensor.dtype).removeprefix("torch."),
    }


def exact_digest(tensor: Tensor) -> dict[str, Any]:
    """Returns :func:`whole_digest` with ``bits``: another text where any bit of ``tensor`` is another."""
    return {**whole_digest(tensor), "bits": content(tensor)}


def _shard_of(tensor: DTensor) -> tuple[Tensor, Tensor, str]:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    local = tensor.to_local()
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    vector = _vector(tensor.numel()).view(tensor.shape)
    for axis, (size, start) in enumerate(zip(shape, offset, strict=True)):
        vector = vector.narrow(axis, min(start, tensor.shape[axis]), size)
    # A shard that is the whole tensor is a copy, as on a mesh of one worker.
    part = "" if tuple(shape) == tuple(tensor.shape) else f"{tuple(offset)}+{tuple(shape)}"
    return local, vector.reshape(-1), part


def _plain(tensor: Tensor) -> Tensor:
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.reshape(-1) if tensor.is_floating_point() else tensor.reshape(-1).to(torch.float32)


def _dot(left: Tensor, right: Tensor) -> float:
    """Returns the inner product; float64 sums that of blocks of float32 where there are many elements."""
    if left.numel() <= 4 * _BLOCK:
        return float(left.double() @ right.double())
    left, right = left.float(), right.float()
    whole = left.numel() // _BLOCK * _BLOCK
    shape = (-1, 1, _BLOCK)
    blocks = torch.bmm(left[:whole].view(shape), right[:whole].view(shape).transpose(1, 2))
    rest = left[whole:].double() @ right[whole:].double()
    return float(blocks.double().sum() + rest)


@torch.no_grad()
def rows_digest(tensor: Tensor) -> dict[str, Any] | None:
    """Returns shape, sum of squares, and for the first two dimensions the projection of each row and their sum."""
    if isinstance(tensor, DTensor) or tensor.is_meta:
        return None
    tensor = tensor.detach()
    plain = _plain(tensor).view(tensor.shape) if not tensor.is_complex() and not tensor.is_sparse else None
    if plain is None or plain.numel() == 0:
        return None
    flat = plain.reshape(-1)
    found: dict[str, Any] = {
        "shape": list(plain.shape),
        "s": _dot(flat, flat),
        "dtype": str(tensor.dtype).removeprefix("torch."),
    }
    if plain.ndim == 0:
        return {**found, "value": float(plain)}
    for axis in range(min(plain.ndim, 2)):
        rows = plain.transpose(0, axis).reshape(plain.shape[axis], -1)
        projected = rows.float() @ _vector(rows.shape[1]) if rows.shape[1] > 1 else rows[:, 0].double()
        found[f"total{axis}"] = float(projected.double().sum())
        if len(projected) <= MOST_ROWS:
            found[f"rows{axis}"] = [float(f"{x:.9g}") for x in projected.double().tolist()]
    return found


def content(value: Any) -> str:
    """Returns a short hash of the bytes of a tensor; ``""`` for something else."""
    if not isinstance(value, Tensor) or value.is_meta:
        return ""
    plain = value.detach().cpu().contiguous()
    raw = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return hashlib.blake2b(raw, digest_size=8).hexdigest()


def memory_of(tensor: Tensor) -> tuple[int, int]:
    """Returns where the numbers of this process's part of a tensor lie, and how many they are."""
    own = tensor.detach()
    own = own.to_local() if isinstance(own, DTensor) else own
    is_empty = own.is_meta or own.is_sparse or not own.numel()
    return NO_MEMORY if is_empty else (own.data_ptr(), own.numel())


def is_finite(value: Tensor) -> bool:
    """Returns whether all numbers of this process's part of a tensor are finite."""
    own = value.detach()
    return bool(torch.isfinite(own.to_local() if isinstance(own, DTensor) else own).all())


def values_of(module: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters and the floating-point buffers of a module."""
    buffers = [(name, buffer) for name, buffer in module.named_buffers() if buffer.is_floating_point()]
    return {name: value for name, value in [*module.named_parameters(), *buffers] if not value.is_meta}


def has_running_statistics(module: nn.Module) -> bool:
    """Returns whether a module is a batch norm that keeps statistics, torch's or one of the script's own."""
    kept = (getattr(module, "running_mean", None), getattr(module, "running_var", None))
    return all(isinstance(one, Tensor) for one in kept)
