"""A segment that backward computes again: its buffers and generators are those of one run."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, spectral_norm

import fleet
from fleet.errors import ConfigError
from fleet.strategies._shared import segments
from fleet.strategies._shared.segments import SegmentState


class Codebook(nn.Module):
    """Replaces each row by the nearest code, whose codes follow the rows in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(5, 4))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        nearest = torch.cdist(x.detach(), self.codes).argmin(1)
        with torch.no_grad():
            self.codes.index_add_(0, nearest, 0.1 * (x - self.codes[nearest]))
        return (x + (self.codes[nearest] - x).detach()) * self.scale


class Counted(nn.Module):
    """Divides by the number of its runs, one counter in place and one assigned anew."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("runs", torch.zeros(()))
        self.register_buffer("again", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.runs.add_(1)
        self.again = self.again + 1
        return torch.tanh(self.layer(x)) / self.runs.clone() + self.again


class Noisy(nn.Module):
    """Adds noise from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.generator = nn.Linear(4, 4), torch.Generator().manual_seed(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * torch.rand(x.shape, generator=self.generator)

    def __deepcopy__(self, memo: dict[int, Any]) -> Noisy:
        twin = Noisy()
        twin.load_state_dict(self.state_dict())
        return twin


class OwnNorm(nn.Module):
    """Batch norm by hand, whose statistics torch changes without a new version; the mean of the first batch stays."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))
        self.register_buffer("start", None)
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.start is None:
            self.start = x.detach().mean(0)
        return F.batch_norm(x, self.mean, self.var, self.weight, training=True) * (x - self.start)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(4, 4)),
    "spectral norm by hooks": lambda: nn.Sequential(spectral_norm(nn.Linear(4, 4)), nn.Tanh()),
    "weights of two norms": lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4)), nn.BatchNorm1d(4)),
    "codebook": Codebook,
    "counters": Counted,
    "generator": Noisy,
    "own norm": OwnNorm,
    "pure": lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh()),
}
RUNS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "module": fleet.recompute,
    "closure": lambda module, x: fleet.recompute(lambda value: module(value), x),
    "method": lambda module, x: fleet.recompute(module.forward, x),
    "sequence": lambda module, x: fleet.recompute_sequential({"segments": 2}, [module, nn.Identity()], x),
}


def trained(module: nn.Module, run: Callable[[nn.Module, Tensor], Tensor], optimizer: Any) -> dict[str, Tensor]:
    """Returns parameters and buffers after three steps of two forwards each, and the next random number."""
    torch.manual_seed(1)
    steps = optimizer(module.parameters(), lr=0.1)
    for _ in range(3):
        losses = [run(module, torch.randn(8, 4)).square().mean() for _ in range(2)]
        losses[0].backward()
        losses[1].backward(retain_graph=True)
        losses[1].backward()
        steps.step()
        steps.zero_grad()
    return {**copy.deepcopy(module.state_dict()), "next": torch.rand(2)}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_second_run_leaves_no_trace(kind: str, run: str) -> None:
    """Issue 36: weights, buffers and random numbers are the same bits as without it."""
    torch.manual_seed(0)
    plain = KINDS[kind]()
    twice = copy.deepcopy(plain)
    optimizer = torch.optim.Adam if run == "closure" else torch.optim.SGD
    expected = trained(plain, lambda module, x: module(x), optimizer)
    held = dict(twice.named_buffers())
    torch.testing.assert_close(trained(twice, RUNS[run], optimizer), expected, atol=0, rtol=0)
    assert all(one is held[name] for name, one in twice.named_buffers() if name in held and name != "again")
    if kind == "generator":
        assert torch.equal(plain.generator.get_state(), twice.generator.get_state())  # type: ignore[union-attr,operator]


def test_only_what_changed_is_kept() -> None:
    """Memory: a mask costs nothing between forward and backward."""
    module = Counted()
    module.register_buffer("mask", torch.ones(9))
    state = SegmentState([module])
    with state.first():
        module(torch.ones(1, 4))
    assert {name: float(value) for name, value in state._found[module].items() if value is not None} == {
        "runs": 0.0,
        "again": 0.0,
    }


class ByPython(nn.Module):
    """Scales by a number that the class of the fault takes from outside torch."""

    def __init__(self, number: Callable[[ByPython], float]) -> None:
        super().__init__()
        self.layer, self.number, self.calls = nn.Linear(4, 4), number, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x) * self.number(self)


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (lambda module: np.random.rand(), "numpy.random"),
        (lambda module: random.random(), "module random"),
        (lambda module: 1 / module.calls, "changes 'calls' of ByPython"),
    ],
)
def test_numbers_from_elsewhere_are_refused(number: Any, reason: str) -> None:
    """Issue 36: what cannot be put back is refused with the module's name and the reason, before the step."""
    strategy = fleet.DistributedStrategy()
    strategy.recompute = True
    strategy.recompute_configs = {"checkpoints": ["0"]}
    fleet.init(is_collective=True, strategy=strategy)
    model = fleet.distributed_model(nn.Sequential(ByPython(number), nn.Linear(4, 1)))
    with pytest.raises(ConfigError, match=f"'0', a ByPython, gave another output.*{reason}"):
        model(torch.randn(3, 4)).sum().backward()


def test_other_changes_are_refused() -> None:
    """An input that changes in place, and dropout without its generators."""
    layer, x = nn.Linear(4, 4), torch.randn(3, 4)
    loss = fleet.recompute(layer, x).sum()
    x.add_(1)
    with pytest.raises(ConfigError, match="its inputs were changed in place"):
        loss.backward()
    dropout = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    with pytest.raises(ConfigError, match="from outside its inputs"):
        fleet.recompute(dropout, torch.randn(9, 4), preserve_rng_state=False).sum().backward()


def test_harmless_numbers_are_not() -> None:
    """A counter that changes no output, draws that are not used, and outputs that are no finite numbers."""

    def harmless(module: ByPython) -> float:
        np.random.rand()
        return float("nan") if module.calls > 4 else 2.0

    module = ByPython(harmless)
    for _ in range(4):
        fleet.recompute(module, torch.randn(3, 4)).sum().backward()


def test_outputs_are_compared_in_the_first_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cost: a segment that has shown to be the same both times is compared no more, and stops early again."""
    monkeypatch.setattr(segments, "_COMPARED_RUNS", 2)
    compared: list[Any] = []
    monkeypatch.setattr(segments.BothRuns, "compare", lambda self, output: compared.append(output))
    layer = nn.Linear(4, 4)
    for _ in range(5):
        fleet.recompute(layer, torch.randn(3, 4)).sum().backward()
    assert len(compared) == 2
