"""A state with every type, layout and name that a checkpoint may meet, and what it means to be equal to it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fleet.checkpoint.index import DTYPES


def of_dtype(name: str, *shape: int) -> Tensor:
    """Returns random numbers of any bits that are no NaN."""
    dtype = getattr(torch, name)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape).bool()
    if dtype.is_complex:
        return torch.randn(*shape, dtype=dtype)
    if dtype.is_floating_point:
        return torch.randn(*shape).to(dtype)
    return torch.randint(0, 100, shape).to(dtype)


def many_tensors() -> dict[str, Tensor]:
    """Returns tensors of every type; some without elements or dimensions, not contiguous, tied, with odd names."""
    torch.manual_seed(0)
    state = {f"of_type.{name}": of_dtype(name, 3, 5) for name in DTYPES}
    tied = torch.randn(4, 2)
    large = torch.randn(6, 8)
    return {
        **state,
        "scalar": torch.tensor(2.5),
        "scalar.half": torch.tensor(-1.5, dtype=torch.bfloat16),
        "empty": torch.empty(0),
        "empty.rows": torch.empty(3, 0, 2, dtype=torch.int8),
        "transposed": large.t(),
        "strided": large[::2, 1::3],
        "tied.first": tied,
        "tied.second": tied,
        "with/slashes/and spaces": torch.ones(2),
        "gewicht.\u00fc.\u6743\u91cd": torch.full((3,), 7.0),
    }


def many_entries() -> dict[str, Any]:
    """Returns what a training script saves: a model, an optimizer with states, a scheduler, numbers."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.BatchNorm2d(2))
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(3):
        model(torch.randn(2, 1, 5, 5)).square().mean().backward()
        optimizer.step()
        scheduler.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "epoch": 3,
        "text": "caf\u00e9",
        "rng": torch.arange(5, dtype=torch.uint8),
    }


def bits(tensor: Tensor) -> tuple[str, tuple[int, ...], bytes]:
    """Returns type, shape and bytes of ``tensor``; equal ones are bit-equal tensors."""
    flat = tensor.detach().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return f"{tensor.dtype}", tuple(tensor.shape), data


def comparable(value: Any) -> Any:
    """Returns ``value`` with its tensors as their bits, so that two states can be compared."""
    if isinstance(value, Tensor):
        return bits(value)
    if isinstance(value, dict):
        return {name: comparable(one) for name, one in value.items()}
    return [comparable(one) for one in value] if isinstance(value, list) else value
