"""A tiny model with experts trained on a mesh, and by one process with all experts and all the data."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fleet
from fleet.job.running import running_session
from fleet.strategies._shared.experts import is_expert
from tests.helpers.sequence_training import whole_of

HIDDEN, EXPERTS, TOKENS, ROWS, STEPS, CLASSES = 16, 4, 6, 8, 8, 5


class Expert(nn.Module):
    """A small mlp."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 8), nn.Linear(8, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the expert's answer."""
        answer: Tensor = self.down(F.gelu(self.up(x)))
        return answer


class ExpertNet(nn.Module):
    """Two blocks of experts with norms and a head; the last expert of each layer gets no token."""

    def __init__(self, num_experts: int, gate: dict[str, Any], **groups: Any) -> None:
        super().__init__()
        self.inlet = fleet.meta_parallel.ColumnParallelLinear(HIDDEN, HIDDEN, has_bias=True)
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(2))
        self.layers = nn.ModuleList(
            fleet.moe.MoELayer(HIDDEN, [Expert() for _ in range(num_experts)], gate=gate, **groups) for _ in range(2)
        )
        for layer in self.layers:
            layer.gate.random_routing, layer.gate.switch_eps = False, 0.0
            if gate["type"] == "switch":
                layer.gate.capacity = (0.3, 0.3)  # so low that tokens are dropped, whose order then matters
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the classes' scores of every token."""
        x = self.inlet(x)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        scores: Tensor = self.head(x)
        return scores

    def gate_loss(self) -> Tensor | float:
        """Returns the loss of all gates."""
        found = [loss for layer in self.layers if (loss := layer.gate.get_loss()) is not None]
        return sum(found, torch.zeros(()))


def start_weights(gate: dict[str, Any]) -> dict[str, Tensor]:
    """Returns the weights of all experts, made without a job that divides them; the last expert gets no token."""
    torch.manual_seed(5)
    net = ExpertNet(EXPERTS, gate)
    state = {name: value.clone() for name, value in net.state_dict().items()}
    for name, value in state.items():
        if name.endswith("gate.gate.bias"):
            value[-1] -= 100.0
    return state


def rows() -> tuple[Tensor, Tensor]:
    """Returns inputs and labels of all steps."""
    torch.manual_seed(6)
    return torch.randn(STEPS, ROWS, TOKENS, HIDDEN), torch.randint(CLASSES, (STEPS, ROWS, TOKENS))


def train(model: Any, net: ExpertNet, optimizer: Any, own: slice) -> dict[str, Any]:
    """Returns losses, first gradients, norms and last weights of the parameters that this worker has."""
    found, norms, gradients = [], [], {}
    for x, y in zip(*rows(), strict=True):
        loss = F.cross_entropy(model(x[own]).flatten(0, 1), y[own].flatten()) + 0.1 * net.gate_loss()
        optimizer.zero_grad()
        loss.backward()
        if not gradients:
            gradients = {name: whole_of(p.grad, name, net) for name, p in net.named_parameters()}
        norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), 0.5)))
        optimizer.step()
        mean = loss.detach().clone()
        if dist.is_initialized():
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        found.append(mean.item())
    weights = {name: whole_of(p, name, net) for name, p in net.named_parameters()}
    return {"losses": found, "norms": norms, "gradients": gradients, "weights": weights}


def alone(gate: dict[str, Any], start: dict[str, Tensor]) -> dict[str, Any]:
    """Trains in this process, with all experts and all rows."""
    net = ExpertNet(EXPERTS, gate)
    net.load_state_dict(start)
    optimizer = torch.optim.AdamW(net.parameters(), 0.01, eps=1e-3)
    return {**train(net, net, optimizer, slice(None)), "state": optimizer.state_dict()["state"]}


def on_mesh(rank: int, world_size: int, jobs: list[tuple[dict[str, int], dict[str, Any]]], start: Any) -> list[Any]:
    """Trains once for each mesh and gate."""
    found = []
    for degrees, gate in jobs:
        strategy = fleet.DistributedStrategy()
        strategy.hybrid_configs = {f"{axis}_degree": degree for axis, degree in degrees.items()}
        fleet.init(is_collective=True, strategy=strategy)
        session = running_session()
        assert session is not None
        groups: dict[str, Any] = {}
        if degrees.get("mp", 1) > 1:
            groups = {"mp_group": fleet.get_hybrid_communicate_group().get_model_parallel_group()}
        net = ExpertNet(EXPERTS // degrees.get("ep", 1), gate, **groups)
        model = fleet.distributed_model(net)
        model.load_full_state_dict(start if rank == 0 else {})
        optimizer = fleet.distributed_optimizer(torch.optim.AdamW(net.parameters(), 0.01, eps=1e-3))
        own = slice(session.job.axes.data_rank * ROWS // session.job.axes.data_replicas, None)
        own = slice(own.start, own.start + ROWS // session.job.axes.data_replicas)
        result = train(model, net, optimizer, own)
        result["whole"], whole = model.full_state_dict(), optimizer.full_state_dict()
        result["state"] = whole["state"]
        before = {p: entry["exp_avg"].clone() for p, entry in optimizer.state.items() if entry}
        optimizer.load_state_dict(whole)
        after = {p: entry["exp_avg"] for p, entry in optimizer.state.items() if entry}
        result["reloaded"] = before.keys() == after.keys() and all(torch.equal(before[p], after[p]) for p in before)
        result["held"] = len(before)
        result["experts"] = sum(map(is_expert, net.parameters()))
        found.append(result)
    return found


def differences(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """Returns the largest differences of what one worker has; gradients relative to their largest entry."""
    apart = {
        key: max(abs(a - b) for a, b in zip(found[key], expected[key], strict=True)) for key in ("losses", "norms")
    }
    for name, gradient in found["gradients"].items():
        known = expected["gradients"][name]
        apart[name] = float((gradient - known).abs().max()) / max(float(known.abs().max()), 1e-4)
    assert list(found["whole"]) == list(expected["weights"])
    assert found["state"].keys() == expected["state"].keys()
    averages = [(found["state"][at]["exp_avg"], entry["exp_avg"]) for at, entry in expected["state"].items()]
    apart["state"] = max(float((mine - known).abs().max()) for mine, known in averages)
    apart["whole"] = max(float((v - expected["weights"][n]).abs().max()) for n, v in found["whole"].items())
    apart["weights"] = max(float((v - expected["weights"][n]).abs().max()) for n, v in found["weights"].items())
    return apart
