"""Sequences divided over sep (surface 11): splits, exchanges, the loss rule, and whole trainings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fleet
from fleet.errors import ConfigError, OptionWarning
from fleet.meta_parallel.context_parallel import ring_attention, sequence_positions
from fleet.meta_parallel.segment_parallel import (
    ReshardLayer,
    check_attention,
    sep_attention,
    split_inputs_sequence_dim,
)
from tests.helpers import sequence_training as training
from tests.helpers.workers import run_workers


def started(**degrees: int) -> None:
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {f"{axis}_degree": degree for axis, degree in degrees.items()}
    fleet.init(is_collective=True, strategy=strategy)


def test_splits() -> None:
    """Surface 11: tensors or dictionaries of them, cut along the last dimension."""
    whole = torch.arange(12).view(2, 6)
    parts = [split_inputs_sequence_dim({"x": whole}, rank, 3)["x"] for rank in range(3)]
    assert torch.equal(torch.cat(parts, 1), whole)
    assert parts[1].tolist() == [[2, 3], [8, 9]]
    with pytest.raises(ConfigError, match="does not divide into 4 parts.*Choose a multiple of 4, or another sep_deg"):
        split_inputs_sequence_dim(whole, 0, 4)
    with pytest.raises(ConfigError, match="places are 0 to 2"):
        split_inputs_sequence_dim(whole, 3, 3)


def test_wrong_shapes_are_refused() -> None:
    """Heads that do not belong together are refused before anything is exchanged."""
    q, k = torch.zeros(2, 4, 6, 8), torch.zeros(2, 4, 4, 8)
    with pytest.raises(ConfigError, match="the heads of q are a multiple"):
        check_attention(q, k, k, "sep_attention()")
    with pytest.raises(ConfigError, match="give them one type"):
        check_attention(q, q, q.double(), "sep_attention()")


def test_one_process() -> None:
    """With degree 1 all of it is what plain torch does."""
    fleet.init(is_collective=True)
    q = torch.randn(2, 6, 4, 8)
    expected = F.scaled_dot_product_attention(*[q.transpose(1, 2)] * 3, is_causal=True).transpose(1, 2)
    assert torch.equal(sep_attention(q, q, q, is_causal=True), expected)
    assert torch.equal(ReshardLayer()(q), q)
    assert fleet.mean(torch.tensor(6.0), 3).item() == 2.0
    assert fleet.mean(torch.tensor(0.0), torch.tensor(0)).item() == 0.0
    assert sequence_positions(6).tolist() == list(range(6))


def exchanged(rank: int, world_size: int) -> dict[str, Any]:
    """Uses the exchange both ways, and what sep refuses."""
    started(sep=2)
    whole = torch.arange(2.0 * 4 * 2 * 3).view(2, 4, 2, 3)
    own = whole.chunk(2, 1)[rank].clone().requires_grad_()
    heads = ReshardLayer(fleet.get_hybrid_communicate_group().get_sep_parallel_group())(own, 2, 1)
    back = ReshardLayer()(heads)
    (back * whole.chunk(2, 1)[rank]).sum().backward()
    alike = torch.equal(heads, whole.chunk(2, 2)[rank]) and torch.equal(back, own)
    texts = []
    for call in (lambda: sep_attention(own[:, :, :1], own[:, :, :1], own[:, :, :1]), lambda: ReshardLayer()(own, 3, 1)):
        with pytest.raises(ConfigError) as error:
            call()
        texts.append(str(error.value))
    loss = fleet.mean(own.sum(), rank + 1)  # 1 token here, 2 there
    model = fleet.distributed_model(nn.Linear(2, 2))
    assert own.grad is not None
    texts += unequal(model, rank)
    return {
        "alike": alike and torch.equal(own.grad, own),
        "texts": texts,
        "loss": loss.item(),
        "expected": whole.sum().item() / 3,
        "positions": sequence_positions(8).tolist(),
    }


def unequal(model: nn.Module, rank: int) -> list[str]:
    """Gives the workers of a sequence other rows, and then the same tokens; returns what is said."""
    rows = torch.arange(24.0).view(2, 6, 2)
    split_inputs_sequence_dim({"x": rows, "y": rows + 1}, dim=1)
    if rank:
        split_inputs_sequence_dim(rows + 2, dim=1)  # for itself
    model(rows)
    split_inputs_sequence_dim({"x": rows + 5 * rank, "y": rows + 9}, dim=1)
    with pytest.raises(ConfigError) as error:
        model(rows)
    heads = rows.view(2, 6, 2, 1)
    with pytest.warns(OptionWarning, match="same queries on all workers") as caught:
        _ = [sep_attention(heads, heads, heads) for _ in range(2)]  # said once
    return [str(error.value), str(caught[0].message), str(len(caught))]


def test_the_exchange_of_segments_for_heads() -> None:
    """Surface 11: the two directions undo each other, forward and in backward; other heads are refused."""
    for rank, found in enumerate(run_workers(exchanged, 2, backend=None)):
        assert found["alike"]
        assert found["loss"] == pytest.approx(found["expected"])
        assert "does not divide into 2 parts" in found["texts"][0]
        assert "another sep_degree" in found["texts"][1]
        assert "different rows" in found["texts"][2]
        assert "num_replicas=fleet.data_replicas()" in found["texts"][2]
        assert "split_inputs_sequence_dim_load_balance" in found["texts"][3]
        assert found["texts"][4] == "1"
        assert found["positions"] == list(range(4 * rank, 4 * rank + 4))


def uneven(rank: int, world_size: int) -> list[str]:
    """Gives the workers other numbers of tokens from the first call on, and in a later one where one alone changes."""
    found = []
    for axis, attention in (("cp", ring_attention), ("sep", sep_attention)):
        for lengths in ((4, (2, 6)[rank]), (6, (4, 6)[rank])):
            started(**{axis: 2})
            tensors = [torch.randn(2, lengths[0], 2, 4)] * 3
            for _ in range(2 if lengths[0] == 4 else 0):
                attention(*tensors, is_causal=True)
            tensors = [torch.randn(2, lengths[1], 2, 4)] * 3
            if axis == "cp" or lengths[0] == 4:
                with pytest.raises(ConfigError) as error:
                    attention(*tensors, is_causal=True)
            else:
                attention(*[torch.randn(2, 6, 2, 4)] * 3)
                try:
                    attention(*tensors)
                except (ConfigError, RuntimeError) as error_:  # the other waits, and hears that this one has ended
                    return [*found, str(error_)]
            found.append(str(error.value))
    return found


def test_other_numbers_of_tokens_are_refused() -> None:
    """Issue 36: both aborted with gloo's text. Where the shapes change on all, they are compared and right."""
    both = run_workers(uneven, 2, backend=None, environment={"FLEET_WAIT_LIMIT": "1"})
    for found in both:
        for text, call in zip(found, ("ring_attention()", "ring_attention()", "sep_attention()"), strict=False):
            assert f"{call} got tensors of different shapes on the workers" in text
            assert "pad sequences to a multiple" in text
    assert "on some workers along the sequence the shapes did not change" in both[0][-1]


@pytest.mark.parametrize(
    "degrees",
    [{"sep": 2}, pytest.param({"sep": 2, "dp": 2}, marks=pytest.mark.slow), {"sep": 2, "mp": 2}],
    ids=str,
)
def test_trains_as_one_process(degrees: dict[str, int]) -> None:
    """Surface 11: losses 1e-5 over 8 steps, every whole gradient 1e-5, against plain torch on all the data."""
    expected = training.alone()
    world_size = 4 if len(degrees) > 1 else 2
    for found in run_workers(training.on_mesh, world_size, degrees, "sep", backend=None):
        apart = training.differences(found, expected)
        assert max(apart.values()) < 1e-5, apart
