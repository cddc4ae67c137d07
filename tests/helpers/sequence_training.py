"""A tiny causal transformer trained on a mesh, and by plain torch in one process on all the data."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fleet
from fleet.job.running import running_session

HIDDEN, HEADS, KV_HEADS, TOKENS, VOCABULARY, ROWS, STEPS = 32, 8, 4, 16, 24, 4, 8


def whole_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Returns causal attention in one process; ``[b, s, heads, d]``."""
    heads = [x.transpose(1, 2) for x in (q, k, v)]
    return F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True).transpose(1, 2)


class TinyBlock(nn.Module):
    """Attention with fewer heads for keys, then an mlp; over mp when ``divided``."""

    def __init__(self, attention: Any, divided: bool) -> None:
        super().__init__()
        self.attention, self.size = attention, HIDDEN // HEADS
        self.norm, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        wide = KV_HEADS * self.size
        if divided:
            layers = fleet.meta_parallel
            column = {"has_bias": True, "gather_output": False}
            self.q, self.k, self.v = (layers.ColumnParallelLinear(HIDDEN, n, **column) for n in (HIDDEN, wide, wide))
            self.out = layers.RowParallelLinear(HIDDEN, HIDDEN, input_is_parallel=True)
            self.up = layers.ColumnParallelLinear(HIDDEN, 2 * HIDDEN, **column)
            self.down = layers.RowParallelLinear(2 * HIDDEN, HIDDEN, input_is_parallel=True)
        else:
            self.q, self.k, self.v = (nn.Linear(HIDDEN, n) for n in (HIDDEN, wide, wide))
            self.out, self.up = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 2 * HIDDEN)
            self.down = nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the block's output, ``[b, s, h]``."""
        y = self.norm(x)
        q, k, v = (layer(y).unflatten(-1, (-1, self.size)) for layer in (self.q, self.k, self.v))
        x = x + self.out(self.attention(q, k, v).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class TinyGpt(nn.Module):
    """Two blocks, with learned positions."""

    def __init__(self, attention: Any = whole_attention, divided: bool = False) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(TOKENS, HIDDEN)
        self.blocks = nn.Sequential(*(TinyBlock(attention, divided) for _ in range(2)))
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Returns the logits of every token."""
        logits: Tensor = self.head(self.blocks(self.words(tokens) + self.places(positions)))
        return logits


def start_weights() -> dict[str, Tensor]:
    """Returns the weights that every run starts from."""
    torch.manual_seed(3)
    return {name: value.clone() for name, value in TinyGpt().state_dict().items()}


def rows() -> tuple[Tensor, Tensor]:
    """Returns tokens and labels of all steps; some labels are ignored, and unequally many in each segment."""
    torch.manual_seed(4)
    tokens, labels = (torch.randint(VOCABULARY, (STEPS, ROWS, TOKENS)) for _ in range(2))
    labels[:, :, :3] = -100
    return tokens, labels


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the sum of the losses of the labels that are not ignored."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


def alone() -> dict[str, Any]:
    """Returns losses, the first gradients and the last weights of plain torch."""
    model, found = TinyGpt(), []
    model.load_state_dict(start_weights())
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    gradients: dict[str, Tensor] = {}
    for tokens, labels in zip(*rows(), strict=True):
        loss = summed_loss(model(tokens, torch.arange(TOKENS)), labels) / (labels != -100).sum()
        optimizer.zero_grad()
        loss.backward()
        gradients = gradients or {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        found.append(loss.item())
    return {"losses": found, "gradients": gradients, "weights": dict(model.state_dict())}


def whole_of(tensor: Tensor, name: str, model: nn.Module) -> Tensor:
    """Returns the whole tensor of a divided parameter or its gradient."""
    from fleet.strategies._shared.parameter_layout import layouts_in

    session, layout = running_session(), layouts_in(model).get(name)
    if layout is None:
        return tensor.detach().clone()
    assert session is not None
    group: Any = session.job.axes.group(layout.axis)
    parts = [torch.empty_like(tensor) for _ in range(layout.parts)]
    torch.distributed.all_gather(parts, tensor.detach().contiguous(), group=group)
    return layout.joined(parts)


def on_mesh(rank: int, world_size: int, degrees: dict[str, int], kind: str) -> dict[str, Any]:
    """Trains with the mesh's attention; the results as :func:`alone` returns them."""
    from fleet.strategies._shared.parameter_layout import layouts_in

    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {f"{axis}_degree": degree for axis, degree in degrees.items()}
    fleet.init(is_collective=True, strategy=strategy)
    session, parallel = running_session(), fleet.meta_parallel
    assert session is not None
    exchange = parallel.ring_attention if kind == "cp" else parallel.sep_attention
    model = TinyGpt(lambda q, k, v: exchange(q, k, v, is_causal=True), divided=degrees.get("mp", 1) > 1)
    layouts = layouts_in(model)
    whole = start_weights()
    model.load_state_dict({n: layouts[n].part(v) if n in layouts else v for n, v in whole.items()})
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    wrapped, optimizer = fleet.distributed_model(model), fleet.distributed_optimizer(optimizer)
    split = parallel.split_inputs_sequence_dim_load_balance if kind == "cp" else parallel.split_inputs_sequence_dim
    own = slice(session.job.axes.data_rank, None, session.job.axes.data_replicas)
    found, gradients = [], {}
    for tokens, labels in zip(*rows(), strict=True):
        part = split({"tokens": tokens[own], "labels": labels[own]})
        logits = wrapped(part["tokens"], parallel.sequence_positions(TOKENS))
        loss = fleet.mean(summed_loss(logits, part["labels"]), (part["labels"] != -100).sum())
        wrapped.zero_grad()
        loss.backward()
        if not gradients:
            gradients = {n: whole_of(p.grad, n, model) for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean)
        found.append(mean.item() / world_size)
    return {
        "losses": found,
        "gradients": gradients,
        "weights": {name: whole_of(p, name, model) for name, p in model.named_parameters()},
    }


def differences(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """Returns the largest differences: of losses, of gradients relative to their largest entry, of weights."""
    apart = {"losses": max(abs(a - b) for a, b in zip(found["losses"], expected["losses"], strict=True))}
    assert set(found["gradients"]) == set(expected["gradients"])
    largest = max(float(g.abs().max()) for g in expected["gradients"].values())
    for name, gradient in expected["gradients"].items():
        scale = max(float(gradient.abs().max()), 1e-3 * largest)  # a key's bias has no gradient but noise
        apart[name] = float((found["gradients"][name] - gradient).abs().max()) / scale
    apart["weights"] = max(float((found["weights"][n] - v).abs().max()) for n, v in expected["weights"].items())
    return apart
