"""``fleet.estimate_memory`` (issue 3): the memory of a worker, counted on tensors without memory.

The small cases are counted by hand in the comments; the comparison with real runs is in test_estimate_measured.py.
"""

from __future__ import annotations

import io
import resource
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fleet
from fleet.errors import ConfigError
from fleet.estimate import modelled_strategies
from fleet.estimate.memory import MemoryEstimate
from fleet.estimate.modelled_strategies import FREE, REPLAYED, RUN_AS_THEY_ARE


def strategy(**options: Any) -> fleet.DistributedStrategy:
    made = fleet.DistributedStrategy()
    made.update(options)
    return made


def net(width: int = 64, layers: int = 6) -> nn.Module:
    return nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())))


def test_a_linear_layer_to_the_byte() -> None:
    """Every kind, and the peak, of a layer that can be counted by hand."""
    found = fleet.estimate_memory(nn.Linear(4, 3, bias=False), (2, 4), world_size=1)
    assert found.parameters_bytes == 4 * 3 * 4
    assert found.gradients_bytes == 48
    assert found.optimizer_state_bytes == 48  # momentum
    assert found.buffers_bytes == found.communication_bytes == 0
    assert found.activations_bytes == 2 * 4 * 4 + 2 * 3 * 4 + 4  # batch, output, loss
    # In backward of the second update: parameters, momentum, batch, loss, the gradients of loss and output, gradient.
    assert found.total_bytes == 48 + 48 + 32 + 4 + 4 + 24 + 48
    assert found.peak_phase == "backward"
    assert sum(found.at_peak.values()) == found.total_bytes


@pytest.mark.parametrize(
    ("optimizer", "copies", "numbers"),
    [("sgd", 0, 0), ("momentum", 1, 0), ("adam", 2, 2), ("adamw", 2, 2), (torch.optim.Adagrad, 1, 2)],
)
def test_optimizer_state(optimizer: Any, copies: int, numbers: int) -> None:
    """State is as many copies of the parameters as the rule keeps, and a step count of 4 bytes for each of them."""
    found = fleet.estimate_memory(nn.Linear(10, 10), (2, 10), optimizer=optimizer, world_size=1)
    assert found.parameters_bytes == found.gradients_bytes == 440
    assert found.optimizer_state_bytes == copies * 440 + numbers * 4


def test_an_optimizer_object_with_frozen_parameters() -> None:
    """The user's own optimizer: its groups, its rule, and no gradient or state for what is frozen."""
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.Adam([model[1].weight], amsgrad=True)
    found = fleet.estimate_memory(model, (4, 8), optimizer=optimizer, world_size=1)
    assert found.parameters_bytes == 512
    assert found.gradients_bytes == 256
    assert found.optimizer_state_bytes == 3 * 256 + 4
    assert not optimizer.state


def test_activations_are_what_backward_keeps() -> None:
    """ReLU keeps its result, Linear its input; a result that nothing keeps is gone when the next one is made."""
    found = fleet.estimate_memory(net(width=8, layers=3), (16, 8), world_size=1)
    one = 16 * 8 * 4
    # The batch, three results of ReLU, at the same moment one result of Linear. The loss comes after that one is gone.
    assert found.activations_bytes == 5 * one


def test_data_parallel_holds_buckets() -> None:
    """With workers the gradients exist in forward too: the buckets are the gradients."""
    alone = fleet.estimate_memory(net(), (4, 64), world_size=1)
    shared = fleet.estimate_memory(net(), (4, 64), world_size=2)
    assert alone.gradients_bytes == shared.gradients_bytes == shared.at_peak["gradients"]
    assert shared.total_bytes > alone.total_bytes
    assert shared.optimizer_state_bytes == alone.optimizer_state_bytes


def test_recompute_keeps_less() -> None:
    """Recomputed modules keep their input alone; in backward one of them is whole at a time."""
    model = nn.Sequential(net(), net(), net())
    whole = fleet.estimate_memory(model, (4096, 64), world_size=1)
    again = fleet.estimate_memory(
        model, (4096, 64), strategy(recompute=True, recompute_configs={"checkpoints": ["0", "1", "2"]}), world_size=1
    )
    one = 4096 * 64 * 4
    assert whole.activations_bytes == 20 * one  # batch, 18 results of ReLU, one of Linear
    # The batch, at most three results of recomputed modules, six of ReLU, one of Linear.
    assert 8 * one < again.activations_bytes <= 11 * one
    assert again.not_modelled == ()


def test_amp_halves_activations() -> None:
    """Convolutions and matrix products keep 16-bit tensors; parameters, gradients and state stay as they are."""
    options = strategy(amp=True)
    plain, amp = (fleet.estimate_memory(net(), (4096, 64), s, world_size=1) for s in (None, options))
    assert amp.parameters_bytes == plain.parameters_bytes
    assert amp.gradients_bytes == plain.gradients_bytes
    assert 0.45 < amp.activations_bytes / plain.activations_bytes < 0.75


def test_gradient_merge_keeps_sums() -> None:
    """Sums beside the buckets with workers, in place of gradients without; the length of the window changes nothing."""
    merged = [
        fleet.estimate_memory(
            net(), (4, 64), strategy(gradient_merge=True, gradient_merge_configs={"k_steps": k}), world_size=workers
        )
        for k, workers in ((4, 1), (4, 2), (100, 2))
    ]
    size = merged[0].parameters_bytes
    assert merged[0].gradients_bytes >= size
    assert merged[1].gradients_bytes >= 2 * size
    assert merged[1] == merged[2]


def test_logical_workers_add_sums() -> None:
    """What is kept between turns grows with the logarithm of the turns; nothing is left out but with sharding."""
    found = [
        fleet.estimate_memory(
            net(), (4, 64), strategy(reproducible=True, reproducible_configs={"logical_workers": num}), world_size=2
        )
        for num in (2, 4, 8)
    ]
    size = found[0].parameters_bytes
    assert [one.gradients_bytes // size for one in found] == [2, 3, 4]
    assert {one.not_modelled for one in found} == {()}
    shared = strategy(reproducible=True, sharding=True, sharding_configs={"stage": 1})
    assert "reproducible with sharding" in f"{fleet.estimate_memory(net(), (4, 64), shared)}"


def test_optimizers_that_strategies_replace() -> None:
    """lars keeps momentum, lamb two moments; both run as they are, without values."""
    lars = fleet.estimate_memory(net(), (4, 64), strategy(lars=True), world_size=1)
    lamb = fleet.estimate_memory(net(), (4, 64), strategy(lamb=True), world_size=1, optimizer="adam")
    assert lars.optimizer_state_bytes == lars.parameters_bytes
    assert 2 * lamb.parameters_bytes <= lamb.optimizer_state_bytes < 2.01 * lamb.parameters_bytes
    assert lars.not_modelled == lamb.not_modelled == ()


def test_dgc_holds_two_vectors_for_large_parameters() -> None:
    """u and v in place of SGD's momentum; with a dense start the momentum stays too. Small parameters as ever."""
    model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 4, bias=False))
    large, small = 4 * 256 * 256, 4 * 256 * 4
    found = fleet.estimate_memory(model, (2, 256), strategy(dgc=True))
    assert found.optimizer_state_bytes == 2 * large + small
    late = fleet.estimate_memory(model, (2, 256), strategy(dgc=True, dgc_configs={"rampup_begin_step": 9}))
    assert late.optimizer_state_bytes == 3 * large + small


def test_wire_copies_and_averages() -> None:
    """fp16_allreduce holds half the gradients on the wire; localsgd copies the parameters flat and has no buckets."""
    size = 4 * 6 * (64 * 64 + 64)
    wire = fleet.estimate_memory(net(), (4, 64), strategy(fp16_allreduce=True))
    assert wire.communication_bytes == size // 2
    local = fleet.estimate_memory(net(), (4, 64), strategy(localsgd=True))
    assert local.communication_bytes == size
    assert local.at_peak["gradients"] < wire.at_peak["gradients"] or local.peak_phase == "step"


@pytest.mark.parametrize("workers", [2, 4])
def test_sharding_divides_state(workers: int) -> None:
    """Stage 1 divides the state, by whole parameters."""
    options = strategy(sharding=True, sharding_configs={"sharding_degree": workers, "stage": 1})
    found = fleet.estimate_memory(net(layers=8), (4, 64), options, world_size=workers)
    assert found.parameters_bytes == found.gradients_bytes == 4 * 8 * (64 * 64 + 64)
    assert found.optimizer_state_bytes == found.parameters_bytes // workers


def test_sharding_stages_2_and_3() -> None:
    """Stage 2: whole parameters, and rows of the rest. Stage 3: parts and the units that are in use."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512, bias=False), nn.ReLU()) for _ in range(8)))
    size = 4 * 8 * 512 * 512
    found: dict[int, MemoryEstimate] = {}
    for stage in (2, 3):
        units = {"sharding_segment_strategy": "segment_anchors", "segment_anchors": [str(i) for i in range(8)]}
        options = strategy(sharding=True, sharding_configs={"sharding_degree": 4, "stage": stage, **units})
        found[stage] = fleet.estimate_memory(model, (4, 512), options, world_size=4, device="cuda")
    assert found[2].optimizer_state_bytes == found[3].optimizer_state_bytes == size // 4
    assert found[2].parameters_bytes == size
    assert found[2].gradients_bytes <= size // 4 + size // 8
    assert found[3].parameters_bytes == size // 4 + size // 8
    # The parts of all gradients, and one unit's whole ones.
    assert found[3].gradients_bytes <= size // 4 + size // 8
    assert found[3].communication_bytes <= 3 * size // 8
    assert found[3].total_bytes < found[2].total_bytes


def test_parts_are_padded() -> None:
    """A dim of 5 among 4 workers makes parts of 2, one of them all padding."""
    options = strategy(sharding=True, sharding_configs={"sharding_degree": 4, "stage": 3})
    found = fleet.estimate_memory(nn.Linear(3, 5, bias=False), (2, 3), options, world_size=4, optimizer="sgd")
    assert found.parameters_bytes == 4 * (2 * 3 + 8 * 3)


def test_a_sharded_scalar_is_refused() -> None:
    """What sharding refuses when it runs, it refuses here."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.0))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    options = strategy(sharding=True, sharding_configs={"sharding_degree": 2, "stage": 3})
    with pytest.raises(ConfigError, match="'scale' is a scalar"):
        fleet.estimate_memory(Scaled(), (2, 3), options)


def huge() -> nn.Module:
    return nn.Sequential(*(nn.Linear(32768, 32768, bias=False) for _ in range(25)))


@pytest.mark.parametrize("place", ["factory", "meta"])
def test_nothing_is_allocated(place: str) -> None:
    """100 GiB of parameters, from a factory or on the meta device, in seconds and without memory."""
    with torch.device("meta"):
        model: Any = huge() if place == "meta" else huge
    started, before_kib = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = fleet.estimate_memory(model, (8, 32768), optimizer="adam", world_size=8)
    assert time.perf_counter() - started < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 300 * 1024
    assert found.parameters_bytes == 100 * 1024**3
    assert found.total_bytes > 400 * 1024**3


def test_the_users_objects_are_left_alone() -> None:
    """Parameters, gradients, hooks, mode, optimizer and random numbers are as before."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout()).eval()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    before, numbers = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    options = strategy(recompute=True, recompute_configs={"checkpoints": ["0"]}, amp=True)
    fleet.estimate_memory(model, (2, 4), options, optimizer=optimizer)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert torch.equal(numbers, torch.get_rng_state())
    assert not model.training
    assert "forward" not in vars(model[0])
    assert all(p.grad is None and not p._post_accumulate_grad_hooks for p in model.parameters())
    assert not optimizer.state
    assert type(model(torch.ones(2, 4))) is Tensor


class TwoInputs(nn.Module):
    """Takes token numbers and a scale; returns a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.table2 = nn.Embedding(10, 4), nn.Embedding(10, 4)
        self.table2.weight = self.table.weight

    def forward(self, tokens: Tensor, scale: Tensor) -> dict[str, Tensor]:
        return {"a": self.table(tokens) * scale, "b": self.table2(tokens), "tokens": tokens}


@pytest.mark.parametrize(
    "batch",
    [
        [((2, 3), torch.int64), (2, 3, 4)],
        {"tokens": torch.zeros(2, 3, dtype=torch.int64), "scale": ((2, 3, 4), torch.float32)},
        (torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3, 4)),
    ],
)
def test_batches(batch: Any) -> None:
    """Shapes with and without types, and tensors, by place or by name; a shared parameter counts once."""
    found = fleet.estimate_memory(TwoInputs(), batch, world_size=1)
    assert found.parameters_bytes == 10 * 4 * 4
    assert found.activations_bytes >= 2 * 3 * 8 + 2 * 3 * 4 * 4


def test_a_loss_of_ones_own() -> None:
    """The loss is part of forward: what it keeps is counted."""
    model = nn.Linear(8, 1000)

    def cross_entropy(output: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, torch.zeros(64, dtype=torch.int64))

    plain = fleet.estimate_memory(model, (64, 8), world_size=1)
    found = fleet.estimate_memory(model, (64, 8), loss=cross_entropy, world_size=1)
    assert (
        found.activations_bytes == plain.activations_bytes + 64 * 1000 * 4 + 64 * 8 + 4
    )  # log-softmax, targets, weight


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sync_batch_norm": True}, "sync_batch_norm: batch norm is counted as it is without it"),
        ({"to_static": True}, "to_static: the compiler fuses"),
        ({"cudnn_exhaustive_search": True}, "workspaces"),
        ({"hybrid_configs": {"sep_degree": 2}}, "sep 2: not modelled: what attention exchanges"),
        ({"hybrid_configs": {"cp_degree": 2}}, "cp 2: not modelled: what attention exchanges"),
        (
            {"recompute": True, "recompute_configs": {"checkpoints": ["0"], "enable_offload": True}},
            "as if they stayed on the device",
        ),
    ],
)
def test_what_is_not_modelled_is_said(options: dict[str, Any], said: str) -> None:
    """Known gaps are in the result and in the table."""
    found = fleet.estimate_memory(net(), (4, 64), strategy(**options))
    assert any(said in sentence for sentence in found.not_modelled)
    assert said in str(found)


def test_an_unknown_strategy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A strategy in none of the lists is named, not taken for free."""
    assert fleet.estimate_memory(net(), (4, 64), strategy(lars=True)).not_modelled == ()
    monkeypatch.setattr(
        modelled_strategies, "RUN_AS_THEY_ARE", tuple(name for name in RUN_AS_THEY_ARE if name != "lars")
    )
    found = fleet.estimate_memory(net(), (4, 64), strategy(lars=True))
    assert found.not_modelled == ("lars: this estimate does not know what it holds, and leaves it out.",)


def test_the_lists_name_strategies() -> None:
    """Each name in the lists is a strategy, in one list only."""
    from fleet.strategies import REGISTRY

    names = [*RUN_AS_THEY_ARE, *REPLAYED, *FREE, *modelled_strategies._WHY_NOT]
    assert len(names) == len(set(names))
    assert set(names) <= set(REGISTRY)


def test_sparse_gradients_are_said() -> None:
    """A sparse embedding's gradients have no storage that could be counted."""
    model = nn.Sequential(nn.Embedding(1000, 16, sparse=True), nn.Linear(16, 1))
    found = fleet.estimate_memory(model, ((4, 3), torch.int64), optimizer="sgd", world_size=1)
    assert any("Sparse" in sentence for sentence in found.not_modelled)


def test_cuda_rounds_to_its_blocks() -> None:
    """Each tensor takes multiples of 512 bytes there; a step count lies on the host."""
    found = fleet.estimate_memory(nn.Linear(4, 3), (2, 4), optimizer="adam", world_size=1, device="cuda")
    assert found.parameters_bytes == found.gradients_bytes == 2 * 512
    assert found.optimizer_state_bytes == 4 * 512
    assert any("CUDA context" in sentence for sentence in found.not_modelled)


def test_the_table() -> None:
    """One row a kind in MiB, the peak, and where it is; printed where asked."""
    out = io.StringIO()
    factory: Callable[[], nn.Module] = lambda: nn.Linear(1024, 1024, bias=False)  # noqa: E731
    found = fleet.estimate_memory(factory, (8, 1024), world_size=4, file=out)
    text = str(found)
    assert out.getvalue() == text + "\n"
    assert text.startswith("Memory of one of 4 workers (cpu), in MiB\n")
    assert "parameters               4.0           4.0\n" in text
    assert text.splitlines()[-1].endswith(f"in {found.peak_phase}")
    with pytest.raises(AttributeError):
        found.total_bytes = 3  # type: ignore[misc]
