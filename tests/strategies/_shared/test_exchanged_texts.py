"""Texts and bits between workers."""

from __future__ import annotations

import torch

from fleet.strategies._shared.exchanged_texts import broadcast_bits, gather_texts
from tests.helpers.workers import run_workers


def exchange(rank: int, world_size: int) -> list[str]:
    """Gathers texts of other lengths; broadcasts every type that gloo cannot send by itself."""
    host = torch.device("cpu")
    for dtype in (torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int16):
        tensor = torch.tensor([0, 1, 1] if rank else [1, 0, 1], dtype=torch.float32).to(dtype)
        broadcast_bits(tensor, 0, None)
        assert tensor.float().real.tolist() == [1, 0, 1], dtype
    number = torch.tensor(float(rank))
    broadcast_bits(number, 1, None)
    assert number.item() == 1
    broadcast_bits(torch.empty(0, 3), 0, None)
    return gather_texts("\u00e9" * rank, torch.distributed.group.WORLD, host)


def test_texts_and_bits() -> None:
    """An empty text and one outside ASCII; a number and an empty tensor."""
    assert run_workers(exchange, 2) == [["", "\u00e9"]] * 2
