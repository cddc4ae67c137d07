"""The exchanges between whole and divided activations, and the layers around them, on a plain process group."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fleet.errors import ConfigError
from fleet.strategies._shared.parameter_layout import layout_of
from fleet.strategies.tensor_parallel import regions
from fleet.strategies.tensor_parallel.cross_entropy import ParallelCrossEntropy
from fleet.strategies.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from tests.helpers.workers import run_workers


def test_a_group_of_one_changes_nothing() -> None:
    x = torch.randn(2, 4, requires_grad=True)
    assert regions.copy_to(x, None) is x
    assert regions.reduce_from(x, None) is x
    assert regions.scatter_to(x, None, 0) is x
    assert regions.gather_from(x, None, 0) is x
    assert regions.gather_reduce(x, None, 0) is x
    assert regions.reduce_scatter(x, None, 0) is x
    assert regions.all_to_all(x, None, 0, 1) is x
    assert regions.group_of(None) is None


def test_every_exchange_and_layer_on_two_workers() -> None:
    run_workers(_on_two, 2, timeout_s=60)


def _on_two(rank: int, world_size: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    for dtype in (torch.float32, torch.bfloat16):
        _regions(rank, group, dtype)
    _twice(rank, group)
    _layers(group)
    _cross_entropy(rank, group)


def _regions(rank: int, group: dist.ProcessGroup, dtype: torch.dtype) -> None:
    """Surface sections 3 and 5: forward and backward of every primitive, against the tensors of both workers."""
    torch.manual_seed(0)
    xs, gs = torch.randn(2, 4, 6, 8).to(dtype), torch.randn(2, 4, 6, 8).to(dtype)
    x, g = xs[rank], gs[rank]

    def check(call: Callable[[Tensor], Tensor], expected: Tensor, upstream: Tensor, gradient: Tensor) -> None:
        leaf = x.clone().requires_grad_()
        y = call(leaf)
        y.backward(upstream)
        assert leaf.grad is not None
        torch.testing.assert_close(y.detach(), expected)
        torch.testing.assert_close(leaf.grad, gradient)

    check(lambda t: regions.copy_to(t, group), x, g, gs[0] + gs[1])
    check(lambda t: regions.reduce_from(t, group), xs[0] + xs[1], g, g)
    check(lambda t: regions.reduce_from(t * 1, group, in_place=True), xs[0] + xs[1], g, g)
    check(lambda t: regions.reduce_from((t * 1).transpose(0, 1), group, in_place=True).transpose(0, 1),
          xs[0] + xs[1], g, g)  # fmt: skip
    for dim in (0, 1, 2, -1, -2, -3):
        parts = [t.chunk(2, dim) for t in gs]
        joined, sums = torch.cat(list(xs), dim), (xs[0] + xs[1]).chunk(2, dim)[rank]
        wide = torch.cat([gs[0], gs[1]], dim)
        other = torch.cat([gs[1], gs[0]], dim)
        check(lambda t, d=dim: regions.scatter_to(t, group, d), x.chunk(2, dim)[rank], parts[rank][rank],
              torch.cat([parts[0][0], parts[1][1]], dim))  # fmt: skip
        check(lambda t, d=dim: regions.gather_from(t, group, d), joined, wide, gs[rank])
        both = (wide, other)
        check(lambda t, d=dim: regions.gather_reduce(t, group, d), joined, both[rank], gs[0] + gs[1])
        check(lambda t, d=dim: regions.reduce_scatter(t, group, d), sums, parts[rank][rank],
              torch.cat([parts[0][0], parts[1][1]], dim))  # fmt: skip
    for split, concat in ((0, 1), (1, 2), (2, 0), (-1, -2), (1, 1)):
        pieces = torch.cat([t.chunk(2, split)[rank] for t in xs], concat)
        upstream = torch.cat([t.chunk(2, split)[rank] for t in gs], concat)
        check(lambda t, s=split, c=concat: regions.all_to_all(t, group, s, c), pieces, upstream, g)
    with pytest.raises(ConfigError, match="size 6.*multiple of 2|size 5.*multiple of 2"):
        regions.scatter_to(x[:, :5], group, 1)


def _twice(rank: int, group: dist.ProcessGroup) -> None:
    """A gradient of a gradient crosses the workers too: L = (3 x)^3 is summed over workers with weights 1 and 2."""
    x = torch.tensor([0.5, -1.0], requires_grad=True)
    weight = float(rank + 1)
    loss = regions.reduce_from(regions.copy_to(x, group) * weight, group).pow(3).sum()
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    torch.testing.assert_close(first.detach(), 81 * x.detach() ** 2)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, 162 * x.detach())


def _layers(group: dist.ProcessGroup) -> None:
    """Surface section 3: both layers in every mode equal the plain layer of the whole weight."""
    torch.manual_seed(1)
    whole = {"in": torch.randn(6, 8), "out": torch.randn(8, 6), "b": torch.randn(6), "c": torch.randn(8)}
    x, g = torch.randn(3, 8), torch.randn(3, 6)
    for gather in (True, False):
        layer = ColumnParallelLinear(8, 6, has_bias=True, gather_output=gather, mp_group=group)
        _take(layer, whole["in"], whole["b"])
        own = g if gather else g.chunk(2, -1)[group.rank()]
        expected = F.linear(x, whole["in"], whole["b"])
        _check(layer, x, own, expected if gather else expected.chunk(2, -1)[group.rank()], g @ whole["in"], g, x)
    for parallel, fuse in ((True, False), (True, True), (False, False), (False, True)):
        row = RowParallelLinear(6, 8, input_is_parallel=parallel, fuse_matmul_bias=fuse, mp_group=group)
        _take(row, whole["out"], whole["c"])
        part = g.chunk(2, -1)[group.rank()].contiguous()
        up = x @ whole["out"]
        _check(row, part if parallel else g, x, F.linear(g, whole["out"], whole["c"]),
               up.chunk(2, -1)[group.rank()] if parallel else up, x, g)  # fmt: skip
    layer = ColumnParallelLinear(8, 6, mp_group=group)
    assert layer.bias is None  # P5: no bias unless asked for
    assert layer.weight.is_distributed
    assert layer.weight.split_axis == 0
    assert RowParallelLinear(6, 8, mp_group=group).weight.split_axis == 1
    assert "is_distributed" in RowParallelLinear(6, 8, mp_group=group).bias.__dict__
    assert not RowParallelLinear(6, 8, mp_group=group).bias.is_distributed
    with pytest.raises(ConfigError, match=r"ColumnParallelLinear\(out_features=5\).*mp_degree 2.*multiple of 2"):
        ColumnParallelLinear(8, 5, mp_group=group)
    with pytest.raises(ConfigError, match=r"RowParallelLinear\(in_features=5\)"):
        RowParallelLinear(5, 8, mp_group=group)
    with pytest.raises(ConfigError, match=r"VocabParallelEmbedding\(num_embeddings=5\)"):
        VocabParallelEmbedding(5, 8, mp_group=group)
    embedding = VocabParallelEmbedding(6, 8, mp_group=group)
    with pytest.raises(ConfigError, match="id 6 is outside 0 to 5"):
        embedding(torch.tensor([0, 6]))


def _take(layer: torch.nn.Module, weight: Tensor, bias: Tensor) -> None:
    with torch.no_grad():
        for parameter, whole in zip(layer.parameters(), (weight, bias), strict=True):
            layout = layout_of(parameter)
            parameter.copy_(whole if layout is None else layout.part(whole))


def _check(
    layer: torch.nn.Module, x: Tensor, upstream: Tensor, y: Tensor, dx: Tensor, out: Tensor, whole_x: Tensor
) -> None:
    leaf = x.clone().requires_grad_()
    found = layer(leaf)
    found.backward(upstream)
    expected = {"weight": out.T @ whole_x, "bias": out.sum(0)}
    torch.testing.assert_close(found.detach(), y)
    torch.testing.assert_close(leaf.grad, dx)
    for name, parameter in layer.named_parameters():
        layout = layout_of(parameter)
        torch.testing.assert_close(parameter.grad, expected[name] if layout is None else layout.part(expected[name]))


def _cross_entropy(rank: int, group: dist.ProcessGroup) -> None:
    """Surface section 3: loss of shape [..., 1], ignored rows 0; P8: labels of both shapes."""
    torch.manual_seed(2)
    logits, labels = torch.randn(3, 4, 6) * 20, torch.randint(0, 6, (3, 4))
    labels[0, 0] = labels[2, 1] = -100
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
        whole = logits.to(dtype).clone().requires_grad_()
        part = whole.detach().chunk(2, -1)[rank].clone().requires_grad_()
        reference = F.cross_entropy(whole.view(-1, 6).float(), labels.view(-1), reduction="none").view(3, 4)
        weights = torch.rand(3, 4)
        (reference * weights).sum().backward()
        for shaped in (labels, labels.unsqueeze(-1)):
            part.grad = None
            loss = ParallelCrossEntropy(mp_group=group)(part, shaped)
            assert loss.shape == (3, 4, 1)
            assert loss.dtype == dtype
            assert loss[0, 0, 0] == 0
            (loss.squeeze(-1) * weights.to(dtype)).sum().backward()
            torch.testing.assert_close(loss.squeeze(-1).float(), reference, atol=tolerance, rtol=tolerance)
            torch.testing.assert_close(part.grad, whole.grad.chunk(2, -1)[rank], atol=tolerance, rtol=tolerance)
    with pytest.raises(ConfigError, match="label 6 is outside 0 to 5"):
        ParallelCrossEntropy(mp_group=group)(part, torch.full((3, 4), 6))
