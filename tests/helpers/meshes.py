"""A small transformer written with Fleet's layers, the same in plain torch, and their training on any mesh.

The plain one is an ``nn.Sequential`` whose names are those of the PipelineLayer, so a weight has one name everywhere.
Gradients are made whole here by the layouts of the parameters, not by the library's gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fleet import fleet
from fleet.moe.moe_layer import MoELayer
from fleet.strategies._shared.parameter_layout import Layout, layouts_in

VOCAB, HIDDEN, HEADS, INNER, TOKENS = 32, 16, 4, 32, 8
BLOCKS, EXPERTS = 4, 4
TIED = "shared_layers.embed.weight"
NORMS: dict[str, type[nn.Module]] = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}


@dataclass(frozen=True)
class Mesh:
    """Degrees of a job, its model, its batch and what else is on.

    ``norm`` and ``experts`` (a mixture in place of each mlp, its experts on every worker or over ep) are of the model;
    ``recompute`` so many layers in a row; ``merge`` so many parts of a batch by gradient_merge.
    """

    degrees: dict[str, int]
    micro_batches: int = 4
    rows: int = 8  # of all replicas together
    tied: bool = False
    clip: float | None = None
    options: dict[str, Any] = field(default_factory=dict)
    virtual: int = 1
    plain_loop: bool = False
    rule: str = "sgd"
    steps: int = 8
    norm: str = "layer"
    experts: bool = False
    recompute: int = 0
    merge: int = 1
    schedule: str = "1F1B"

    @property
    def world_size(self) -> int:
        """Number of workers; experts lie on those of other axes."""
        return self.replicas * prod(self.degrees.get(axis, 1) for axis in ("mp", "pp", "sep", "cp"))

    @property
    def replicas(self) -> int:
        """Number of workers, or groups of them, that train on different rows."""
        with_experts = self.degrees.get("ep", 1) > 1  # cp then divides the sharding axis
        rows = self.degrees.get("dp", 1) * self.degrees.get("sharding", 1)
        return rows // self.degrees.get("cp", 1) if with_experts else rows

    def __str__(self) -> str:
        axes = "_".join(f"{axis}{degree}" for axis, degree in self.degrees.items() if degree > 1) or "one"
        extra = [
            name
            for name, on in (
                ("tied", self.tied),
                ("clip", self.clip is not None),
                ("loop", self.plain_loop),
                (f"v{self.virtual}", self.virtual > 1),
                (f"n{self.micro_batches}", self.micro_batches != 4),
                ("rms", self.norm == "rms"),
                ("experts", self.experts),
                (f"again{self.recompute}", self.recompute > 0),
                (f"merge{self.merge}", self.merge > 1),
                (self.schedule, self.schedule != "1F1B"),
                (self.rule, self.rule != "sgd"),
                *((option, True) for option in self.options),
            )
            if on
        ]
        return "-".join([axes, *extra])


class Attention(nn.Module):
    """Causal attention; each worker of the mp axis has some of the heads, of sep and cp some of the tokens."""

    def __init__(self, mesh: Mesh, plain: bool) -> None:
        super().__init__()
        self.exchange: Any = None if plain else exchange_of(mesh)
        from fleet import meta_parallel as mpu

        def column() -> nn.Module:
            if plain:
                return nn.Linear(HIDDEN, HIDDEN)
            made: nn.Module = mpu.ColumnParallelLinear(HIDDEN, HIDDEN, has_bias=True, gather_output=False)
            return made

        self.q, self.k, self.v = column(), column(), column()
        self.o: nn.Module = (
            nn.Linear(HIDDEN, HIDDEN) if plain else mpu.RowParallelLinear(HIDDEN, HIDDEN, input_is_parallel=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Takes and returns [rows, tokens, hidden]."""
        q, k, v = (layer(x).unflatten(-1, (-1, HIDDEN // HEADS)) for layer in (self.q, self.k, self.v))
        if self.exchange is not None:
            mixed = self.exchange(q, k, v, is_causal=True)
        else:
            heads = (t.transpose(1, 2) for t in (q, k, v))
            mixed = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)
        out: Tensor = self.o(mixed.flatten(2))
        return out


def exchange_of(mesh: Mesh) -> Any:
    """Returns the attention of a mesh that divides the tokens, or ``None``."""
    from fleet import meta_parallel as mpu

    if mesh.degrees.get("cp", 1) > 1:
        return mpu.ring_attention
    return mpu.sep_attention if mesh.degrees.get("sep", 1) > 1 else None


class Expert(nn.Module):
    """A small mlp."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        """Takes and returns [tokens, hidden]."""
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out


class Mixture(nn.Module):
    """The two experts with the highest scores for each token, times the scores: all experts run on all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.gate = nn.ModuleDict({"gate": nn.Linear(HIDDEN, EXPERTS)})

    def forward(self, x: Tensor) -> Tensor:
        """Takes and returns [rows, tokens, hidden]."""
        scores = self.gate["gate"](x)
        kept = torch.zeros_like(scores).scatter(-1, scores.topk(2, -1).indices, 1.0)
        answers = torch.stack([expert(x) for expert in self.experts], -1)
        return (answers * (scores * kept).unsqueeze(-2)).sum(-1)


def divided_mixture(mesh: Mesh) -> nn.Module:
    """Returns the same made of Fleet's layer."""
    ep, mp = mesh.degrees.get("ep", 1), mesh.degrees.get("mp", 1)
    group = fleet.get_hybrid_communicate_group().get_model_parallel_group() if mp > 1 and ep > 1 else None
    own = [Expert() for _ in range(EXPERTS // ep)]
    return MoELayer(HIDDEN, own, gate={"type": "naive", "top_k": 2}, mp_group=group)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, mesh: Mesh, plain: bool = False) -> None:
        super().__init__()
        from fleet import meta_parallel as mpu

        self.norm1, self.norm2 = NORMS[mesh.norm](HIDDEN), NORMS[mesh.norm](HIDDEN)
        self.attention = Attention(mesh, plain)
        self.mixture = None
        if mesh.experts:
            self.mixture = Mixture() if plain else divided_mixture(mesh)
        elif plain:
            self.up: nn.Module = nn.Linear(HIDDEN, INNER)
            self.down: nn.Module = nn.Linear(INNER, HIDDEN)
        else:
            self.up = mpu.ColumnParallelLinear(HIDDEN, INNER, has_bias=True, gather_output=False)
            self.down = mpu.RowParallelLinear(INNER, HIDDEN, input_is_parallel=True)

    def forward(self, x: Tensor) -> Tensor:
        """Takes and returns [rows, tokens, hidden]."""
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        out: Tensor = x + (self.down(F.gelu(self.up(y))) if self.mixture is None else self.mixture(y))
        return out


class Tied(nn.Module):
    """The whole plain model with one weight for the embedding and the head."""

    def __init__(self, weight: Tensor, inner: nn.Sequential) -> None:
        super().__init__()
        self.weight, self.inner = nn.Parameter(weight.clone()), inner

    def forward(self, x: Tensor) -> Tensor:
        """Takes [rows, tokens], returns logits."""
        return self.inner(F.embedding(x, self.weight)) @ self.weight.T


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy over rows and tokens; whole logits."""
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


def loss_of_tokens(logits: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    """The same where each worker has some of the tokens: the sum over them, and their number."""
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum"), labels.numel()


def plain_model(mesh: Mesh) -> nn.Module:
    """Returns the model in plain torch, always from the same numbers; its names are those of :func:`names_of`."""
    torch.manual_seed(7)
    embed = nn.Embedding(VOCAB, HIDDEN)
    inner = nn.Sequential(*[Block(mesh, plain=True) for _ in range(BLOCKS)], NORMS[mesh.norm](HIDDEN))
    head = nn.Linear(HIDDEN, VOCAB, bias=False)
    for parameter in [*inner.parameters(), *embed.parameters(), *head.parameters()]:
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 0.5, 0.2)  # no bias begins at 0, no norm at 1
    return Tied(embed.weight.data * 0.3, inner) if mesh.tied else nn.Sequential(embed, *inner, head)


def renamed(state: dict[str, Tensor], tied: bool) -> dict[str, Tensor]:
    """Returns a state of the plain model under the names of the PipelineLayer."""
    if not tied:
        return dict(state)

    def name(old: str) -> str:
        place, _, rest = old.removeprefix("inner.").partition(".")
        return TIED if old == "weight" else f"{int(place) + 1}.{rest}"

    return {name(old): value for old, value in state.items()}


def batches(mesh: Mesh) -> list[tuple[Tensor, Tensor]]:
    """Returns inputs and labels of every step, [rows, tokens] each."""
    generator = torch.Generator().manual_seed(11)

    def drawn() -> Tensor:
        return torch.randint(VOCAB, (mesh.rows, TOKENS), generator=generator)

    return [(drawn(), drawn()) for _ in range(mesh.steps)]


def make_rule(mesh: Mesh, parameters: Any) -> torch.optim.Optimizer:
    """Returns the optimizer; SGD shows an error that Adam's division hides."""
    if mesh.rule == "adamw":  # with an eps that keeps the noise of a gradient that is 0 from becoming a step
        return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.05, eps=1e-2)
    if mesh.rule == "plain_sgd":
        return torch.optim.SGD(parameters, lr=0.2)
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9)


def train_alone(mesh: Mesh) -> dict[str, Any]:
    """Trains the plain model on all rows in this process."""
    model = plain_model(mesh)
    optimizer = make_rule(mesh, model.parameters())
    losses, norms, gradients = [], [], {}
    for step, (x, y) in enumerate(batches(mesh)):
        loss = loss_fn(model(x), y)
        loss.backward()
        if step == 0:
            found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            gradients = renamed(found, mesh.tied)
        norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])))
        if mesh.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), mesh.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    weights = renamed({n: p.detach() for n, p in model.named_parameters()}, mesh.tied)
    return {"losses": losses, "norms": norms, "gradients": gradients, "weights": weights}


def head_of(layer: Any, x: Tensor) -> Tensor:
    """Returns whole logits of a shared, vocabulary-parallel embedding (the idiom of section 3)."""
    from fleet.layers.mpu import mp_ops

    group = fleet.get_hybrid_communicate_group().get_model_parallel_group()
    logits: Tensor = mp_ops._c_concat(mp_ops._c_identity(x, group) @ layer.weight.T, group)
    return logits


def fleet_model(mesh: Mesh) -> nn.Module:
    """Returns the PipelineLayer of this worker, with the numbers of :func:`plain_model`."""
    from fleet import meta_parallel as mpu

    descriptions: list[Any] = [mpu.LayerDesc(Block, mesh) for _ in range(BLOCKS)]
    descriptions.append(mpu.LayerDesc(NORMS[mesh.norm], HIDDEN))
    if mesh.tied:
        ends = [
            mpu.SharedLayerDesc("embed", mpu.VocabParallelEmbedding, None, "weight", VOCAB, HIDDEN),
            mpu.SharedLayerDesc("embed", mpu.VocabParallelEmbedding, head_of, "weight", VOCAB, HIDDEN),
        ]
    else:
        ends = [
            mpu.LayerDesc(mpu.VocabParallelEmbedding, VOCAB, HIDDEN),
            mpu.LayerDesc(mpu.ColumnParallelLinear, HIDDEN, VOCAB, has_bias=False),
        ]
    layers = [ends[0], *descriptions, ends[1]]
    kwargs: dict[str, Any] = {"loss_fn": loss_of(mesh), "recompute_interval": mesh.recompute}
    if mesh.virtual > 1:
        kwargs |= {"num_virtual_pipeline_stages": mesh.virtual, "seg_method": "layer:Block"}
    topology = fleet.get_hybrid_communicate_group().topology()
    model: nn.Module = mpu.PipelineLayer(layers, topology=topology, **kwargs)
    whole = renamed(dict(plain_model(mesh).state_dict()), mesh.tied)
    layouts = layouts_in(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            layout = layouts.get(name)
            parameter.copy_(whole[name] if layout is None else layout.part(whole[name]))
    return model


def loss_of(mesh: Mesh) -> Any:
    """Returns the loss function that a pipeline of the mesh is given."""
    return loss_fn if exchange_of(mesh) is None else loss_of_tokens


def loss_in_loop(mesh: Mesh, logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the loss on which a loop of the mesh calls backward."""
    found = loss_of(mesh)(logits, labels)
    return fleet.mean(*found) if isinstance(found, tuple) else found


def parts_of(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Returns each tensor with the index of its part and its layout, for :func:`joined`; a shard is made whole."""
    layouts = layouts_in(model)

    def local(t: Any) -> Tensor:
        found: Tensor = (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone()
        return found

    return {name: (local(t), asdict(layouts[name]) if name in layouts else None) for name, t in tensors.items()}


def joined(found: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Returns the whole tensors made of what each worker holds; copies must be equal bit for bit."""
    whole: dict[str, Tensor] = {}
    for name in dict.fromkeys(name for worker in found for name in worker):
        held = [worker[name] for worker in found if name in worker]
        layout = None if held[0][1] is None else Layout(**held[0][1])
        by_index: dict[int, Tensor] = {}
        for tensor, own in held:
            index = 0 if own is None else own["index"]
            assert torch.equal(by_index.setdefault(index, tensor), tensor), f"copies of {name!r} differ"
        whole[name] = by_index[0] if layout is None else layout.joined([by_index[i] for i in range(layout.parts)])
    return whole


def start(mesh: Mesh) -> Any:
    """Calls ``fleet.init`` with the mesh and returns the strategy."""
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {f"{axis}_degree": degree for axis, degree in mesh.degrees.items()}
    size = -(-mesh.rows // mesh.replicas // mesh.merge // mesh.micro_batches)
    strategy.pipeline_configs = {
        "accumulate_steps": mesh.micro_batches,
        "micro_batch_size": size,
        "schedule_mode": mesh.schedule,
    }
    if mesh.merge > 1:
        strategy.gradient_merge = True
        strategy.gradient_merge_configs = {"k_steps": mesh.merge}
    for name, value in mesh.options.items():
        setattr(strategy, name, value)
    fleet.init(is_collective=True, strategy=strategy)
    return strategy


def train_on(rank: int, world_size: int, mesh: Mesh) -> dict[str, Any]:
    """Trains on the mesh; a worker function. Losses are those of this worker's rows."""
    start(mesh)
    model = fleet_model(mesh)
    optimizer = make_rule(mesh, model.parameters())
    at: dict[str, Any] = {"gradients": {}, "norms": []}

    def look(*_: Any) -> None:
        if not at["norms"]:
            gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
            at["gradients"] = parts_of(model, gradients)
        limit = float("inf") if mesh.clip is None else mesh.clip
        at["norms"].append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), limit)))

    optimizer.register_step_pre_hook(look)
    wrapped, stepper = fleet.distributed_model(model), fleet.distributed_optimizer(optimizer)
    replica, replicas = fleet.data_rank(), fleet.data_replicas()
    losses = []
    for batch in batches(mesh):
        mine = [whole.chunk(replicas)[replica] for whole in batch]
        parts = zip(*(cut(mesh, own).chunk(mesh.merge) for own in mine), strict=True)
        losses.append(sum(one_step(mesh, wrapped, stepper, part) for part in parts) / mesh.merge)
    weights = parts_of(model, {n: p for n, p in model.named_parameters()})
    return {"losses": losses, "norms": at["norms"], "gradients": at["gradients"], "weights": weights, "row": replica}


def cut(mesh: Mesh, rows: Tensor) -> Tensor:
    """Returns this worker's tokens of ``rows``."""
    from fleet import meta_parallel as mpu

    if mesh.degrees.get("cp", 1) > 1:
        rows = mpu.split_inputs_sequence_dim_load_balance(rows)
    elif mesh.degrees.get("sep", 1) > 1:
        rows = mpu.split_inputs_sequence_dim(rows)
    return rows


def one_step(mesh: Mesh, model: Any, stepper: Any, part: tuple[Tensor, ...]) -> float:
    """Takes a step on inputs and labels; returns the loss."""
    if not mesh.plain_loop:
        return float(model.train_batch(part, stepper))
    loss = loss_in_loop(mesh, model(part[0]), part[1])
    loss.backward()
    stepper.step()
    stepper.zero_grad()
    return float(loss)
