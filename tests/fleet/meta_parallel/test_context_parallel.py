"""Ring attention over cp (surface 11) against F.scaled_dot_product_attention on the whole sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import fleet
from fleet.errors import ConfigError, UnsupportedOptionError
from fleet.meta_parallel import attention_ring
from fleet.meta_parallel.context_parallel import ring_attention, split_inputs_sequence_dim_load_balance
from tests.helpers import sequence_training as training
from tests.helpers.workers import run_workers


def test_the_balanced_split() -> None:
    """Surface 11: worker r holds parts r and 2 cp - 1 - r."""
    whole = torch.arange(12).view(1, 12)
    assert split_inputs_sequence_dim_load_balance(whole, 0, 3).tolist() == [[0, 1, 10, 11]]
    assert split_inputs_sequence_dim_load_balance({"x": whole}, 2, 3)["x"].tolist() == [[4, 5, 6, 7]]
    assert torch.equal(split_inputs_sequence_dim_load_balance(whole, 0, 1), whole)
    with pytest.raises(ConfigError, match="does not divide into 8 parts"):
        split_inputs_sequence_dim_load_balance(whole, 0, 4)


@pytest.mark.parametrize("is_causal", [True, False])
def test_the_kernels_agree_with_plain_arithmetic(is_causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch's kernel and plain arithmetic return, forward and in backward."""
    torch.manual_seed(0)
    q, k, v, above = (torch.randn(2, 3, 5, 8) for _ in range(4))
    found = []
    for kind in ("cpu", "plain"):
        monkeypatch.setattr(attention_ring, "_kernel", lambda q, kind=kind: kind)
        out, lse = attention_ring.attend(q, k, v, is_causal, 0.3)
        found.append((out, lse, *attention_ring.attend_backward(above, q, k, v, out, lse, is_causal, 0.3)))
    for mine, plain in zip(*found, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-5, atol=1e-5)


def attended(rank: int, world_size: int) -> list[Any]:
    """Returns the largest errors of result and gradients for several shapes, relative to the largest entry."""
    group: Any = dist.group.WORLD
    found: list[Any] = []
    for is_causal, kv_heads, dtype in [
        (True, 4, torch.float32),
        (True, 2, torch.float32),
        (False, 1, torch.float32),
        (True, 2, torch.float64),
        (True, 2, torch.bfloat16),
    ]:
        torch.manual_seed(1)
        tokens = 6 * world_size
        whole = [torch.randn(2, tokens, heads, 16).to(dtype) for heads in (4, kv_heads, kv_heads, 4)]
        exact = [x.double().clone().requires_grad_() for x in whole[:3]]
        heads = [x.transpose(1, 2) for x in exact]
        out = F.scaled_dot_product_attention(*heads, is_causal=is_causal, enable_gqa=True).transpose(1, 2)
        (out * whole[3]).sum().backward()

        def part(x: Tensor) -> Tensor:
            return split_inputs_sequence_dim_load_balance(x, rank, world_size, dim=1)  # noqa: B023

        own = [part(x).clone().requires_grad_() for x in whole[:3]]
        mine = ring_attention(*own, is_causal=is_causal, cp_group=group)
        (mine * part(whole[3])).sum().backward()
        pairs = [(mine, out), *((a.grad, b.grad) for a, b in zip(own, exact, strict=True))]
        errors = [float((a - part(b)).detach().abs().max() / b.detach().abs().max()) for a, b in pairs]
        found.append((str(dtype), mine.dtype == dtype, max(errors)))
    with pytest.raises(ConfigError, match=r"Choose sequences that divide into \d parts"):
        ring_attention(*[torch.zeros(1, 3, 2, 8)] * 3, is_causal=True, cp_group=group)
    return found


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow), 3])
def test_equals_attention_to_the_whole_sequence(world_size: int) -> None:
    """Surface 11: results and all gradients to 1e-5, with fewer heads for keys, causal or not; bfloat16 to its own."""
    for found in run_workers(attended, world_size):
        for dtype, same_type, error in found:
            assert same_type
            assert error < (3e-2 if dtype == "torch.bfloat16" else 1e-5), dtype


def test_refusals_and_one_process() -> None:
    """Dropout is refused with the reason; one worker alone has the whole sequence."""
    fleet.init(is_collective=True)
    q, k = torch.randn(2, 5, 4, 8), torch.randn(2, 5, 2, 8)
    with pytest.raises(UnsupportedOptionError, match="Set dropout=0"):
        ring_attention(q, k, k, dropout=0.1)
    heads = [x.transpose(1, 2) for x in (q, k, k)]
    expected = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True).transpose(1, 2)
    assert torch.equal(ring_attention(q, k, k, is_causal=True), expected)
    assert attention_ring.ring is not None


@pytest.mark.parametrize(
    "degrees",
    [{"cp": 2}, {"cp": 2, "mp": 2}, pytest.param({"cp": 2, "dp": 2}, marks=pytest.mark.slow)],
    ids=str,
)
def test_trains_as_one_process(degrees: dict[str, int]) -> None:
    """Surface 11: losses 1e-5 over 8 steps, every whole gradient 1e-5, against plain torch on all the data."""
    expected = training.alone()
    for found in run_workers(training.on_mesh, 4 if len(degrees) > 1 else 2, degrees, "cp", backend=None):
        apart = training.differences(found, expected)
        assert max(apart.values()) < 1e-5, apart
