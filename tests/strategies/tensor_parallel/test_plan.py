"""tensor_parallel_configs['plan']: what it divides, what it refuses, and plain models it cuts against one process."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fleet import fleet
from fleet.errors import ConfigError
from fleet.job.axes import Axes
from fleet.meta_parallel import ColumnParallelLinear, ParallelCrossEntropy
from fleet.options import DistributedStrategy
from fleet.strategies._shared.parameter_layout import Layout, layouts_in
from fleet.strategies.tensor_parallel.plan import resolve_plan
from tests.helpers.workers import run_workers

AXES = Axes({"mp": 2}, 1)


class Attention(nn.Module):
    """Attention with a fused weight; how it counts its heads is what a plan must know."""

    def __init__(self, hidden: int = 16, heads: int = 4, silent: bool = False) -> None:
        super().__init__()
        self.n_heads, self.width, self.silent = heads, hidden, silent
        self.qkv, self.o = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        if self.silent:  # takes any width, so a part gives numbers, too
            q, k, v = (t.view(batch, length, self.n_heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        else:
            shape = (batch, length, self.n_heads, self.width // self.n_heads)
            q, k, v = (t.view(shape).transpose(1, 2) for t in self.qkv(x).split(self.width, dim=-1))
        y = functional.scaled_dot_product_attention(q, k, v)
        return self.o(y.transpose(1, 2).reshape(batch, length, -1))


class Tower(nn.Module):
    """One of everything that a plan divides, a norm beside it, and a head tied to the embedding."""

    def __init__(self, silent: bool = False) -> None:
        super().__init__()
        self.wte = nn.Embedding(12, 16, padding_idx=7)
        self.wpe = nn.Embedding(6, 16)
        self.attn = nn.ModuleList([Attention(silent=silent)])
        self.norm = nn.LayerNorm(16)
        self.gate = nn.Linear(16, 24)  # two pieces of 12
        self.down = nn.Linear(12, 16)
        self.wide = nn.Linear(16, 24, bias=False)  # gathered
        self.back = nn.Linear(24, 16)
        self.head = nn.Linear(16, 12, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        x = x + self.attn[0](self.norm(x))
        gate, up = self.gate(self.norm(x)).chunk(2, dim=-1)
        x = x + self.down(functional.silu(gate) * up)
        x = x + self.back(functional.layer_norm(self.wide(x), (24,)))
        return self.head(self.norm(x))


PLAN = {
    "wte": "vocab",
    "wpe": "column_gather",
    "attn.*.qkv": "column:16,16,16",
    "attn.*.o": "row",
    "attn.*": "divide:n_heads,width",
    "gate": "packed_colwise",
    "down": "row",
    "wide": "column_gather:3",
    "back": "row_split:2",
}


def test_a_plan_says_the_layout_of_each_parameter() -> None:
    """Issue 12, 1: linear layers, embeddings and fused weights; a tied head is divided with its embedding."""
    model = Tower()
    resolved = resolve_plan(model, PLAN, AXES)
    found = {f"{module}.{name}": layout for module, own in resolved.layouts.items() for name, layout in own.items()}
    vocabulary = Layout("mp", 0, 2, 1, (12, 16))
    assert found == {
        "wte.weight": vocabulary,
        "head.weight": vocabulary,
        "wpe.weight": Layout("mp", 1, 2, 1, (6, 16)),
        "attn.0.qkv.weight": Layout("mp", 0, 2, 1, (48, 16), (16, 16, 16)),
        "attn.0.qkv.bias": Layout("mp", 0, 2, 1, (48,), (16, 16, 16)),
        "attn.0.o.weight": Layout("mp", 1, 2, 1, (16, 16)),
        "gate.weight": Layout("mp", 0, 2, 1, (24, 16), (12, 12)),
        "gate.bias": Layout("mp", 0, 2, 1, (24,), (12, 12)),
        "down.weight": Layout("mp", 1, 2, 1, (16, 12)),
        "wide.weight": Layout("mp", 0, 2, 1, (24, 16), (8, 8, 8)),
        "back.weight": Layout("mp", 1, 2, 1, (16, 24), (12, 12)),
    }
    assert [(name, part) for _, name, part in resolved.numbers] == [("n_heads", 2), ("width", 8)]
    assert layouts_in(model) == {}
    assert model.attn[0].n_heads == 4


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"blocks.*.up": "column"}, r"\['blocks.\*.up'\] matches no module of Tower.*Names: wte, wpe, attn, attn.\*"),
        ({"*.qkv": "column"}, "matches no module"),
        ({"gate.weight": "column"}, "matches the parameter 'gate.weight'; a pattern names modules: 'gate'"),
        ({"norm": "column"}, r"matches 'norm' \(LayerNorm\), which cannot be divided as 'column'"),
        ({"wte": "row_split"}, "an embedding takes 'vocab', 'column'"),
        ({"gate": "vocab"}, "a linear layer the other styles"),
        ({"g*": "column", "gate": "row"}, r"both 'g\*' and 'gate' match 'gate' \('column' and 'row'\)"),
        ({"gate": "column:5"}, "'gate'.*size 24 does not fall into 5 equal pieces"),
        ({"gate": "column:8"}, "piece of size 3 of 24 does not divide by mp_degree 2"),
        ({"gate": "column:8,8"}, r"the sections \(8, 8\) add up to 16, not to 24"),
        ({"attn.*": "divide:nheads", "gate": "column"}, "attribute 'nheads' is None; 'divide' takes whole numbers"),
        ({"norm": "sum"}, "divides no parameter of Tower"),
        ({"wte": "column"}, "'wte'.*is also 'head.weight', which is divided in another way"),
        ({"gate": "auto"}, r"only '\*' takes it"),
        ({"*": "auto"}, "Tower has no plan of its own"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(plan: dict[str, str], message: str) -> None:
    """Issue 12, 1: the message names pattern, module, size and degree."""
    with pytest.raises(ConfigError, match=message):
        resolve_plan(Tower(), plan, AXES)


def test_a_size_that_does_not_divide_names_all_it_needs() -> None:
    with pytest.raises(ConfigError, match=r"\['0'\] matches '0' \(Linear\): its size 5 does not divide by mp_degree 2"):
        resolve_plan(nn.Sequential(nn.Linear(4, 5)), {"0": "column"}, AXES)


def test_layers_of_unknown_form_are_refused() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    for layer, message in (
        (Scaled(4, 4), "whose forward it knows"),
        (nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), "changed by something else|whose forward it knows"),
        (nn.Embedding(4, 4, max_norm=1.0), "need all rows on one worker"),
        (nn.MultiheadAttention(4, 2).out_proj, "nn.MultiheadAttention reads its weight"),
    ):
        style = "vocab" if isinstance(layer, nn.Embedding) else "column"
        with pytest.raises(ConfigError, match=message):
            resolve_plan(nn.Sequential(layer), {"0": style}, AXES)


def test_the_option_takes_patterns_and_auto() -> None:
    strategy = DistributedStrategy()
    strategy.tensor_parallel_configs = {"plan": "auto"}
    assert strategy.tensor_parallel_configs["plan"] == {"*": "auto"}
    strategy.tensor_parallel_configs = {"plan": {"head": "column"}}
    assert strategy.tensor_parallel_configs["plan"] == {"*": "auto", "head": "column"}
    with pytest.raises(ConfigError, match="'auto' for a Hugging Face model's own"):
        strategy.tensor_parallel_configs = {"plan": "column"}


def trained(model: nn.Module, optimizer: Any, whole: Callable[..., dict[str, Tensor]]) -> dict[str, Any]:
    """Returns the first logits and gradients, and losses and weights of 3 steps."""
    tokens = torch.randint(12, (3, 6), generator=torch.Generator().manual_seed(1))
    tokens[0, 0] = 7
    result: dict[str, Any] = {"losses": []}
    for step in range(3):
        logits = model(tokens)
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        loss.backward()
        if not step:
            result["logits"] = logits.detach().clone()
            result["gradients"] = whole({name: p.grad.clone() for name, p in model.named_parameters()})
        result["losses"].append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    result["weights"] = whole({name: p.detach().clone() for name, p in model.named_parameters()})
    return result


def joined(layouts: dict[str, Layout], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns whole tensors, gathered over all workers."""
    found = {}
    for name, tensor in tensors.items():
        if (layout := layouts.get(name)) is not None:
            parts = [torch.empty_like(tensor) for _ in range(layout.parts)]
            torch.distributed.all_gather(parts, tensor.contiguous())
            tensor = layout.joined(parts)
        found[name] = tensor
    return found


def start(plan: Any) -> None:
    strategy = DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": 1, "mp_degree": 2}
    strategy.tensor_parallel_configs = {"plan": plan}
    fleet.init(is_collective=True, strategy=strategy)


def fails(plan: dict[str, str], silent: bool = False) -> str:
    """Returns what the first forward of a model with this plan raises."""
    start(plan)
    model = fleet.distributed_model(Tower(silent))
    try:
        model(torch.zeros(2, 6, dtype=torch.long))
    except ConfigError as error:
        return str(error)
    return ""


class Cache:
    """What a caller hands to each forward."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []


class Cached(nn.Module):
    """Appends its keys to a list of the caller, as generation does."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        cache.keys.append(self.up(x))
        return self.down(torch.cat(cache.keys))


class Encoder(nn.Module):
    """Torch's own encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True), 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x)


class Chunked(nn.Module):
    """Computes its loss inside, chunk by chunk, from logits that a plan or a layer of Fleet divides."""

    def __init__(self, divided: bool) -> None:
        super().__init__()
        self.words, self.middle = nn.Embedding(8, 6), nn.Linear(6, 6)
        self.head = ColumnParallelLinear(6, 8, has_bias=True, gather_output=False) if divided else nn.Linear(6, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.tanh(self.middle(self.words(x)))
        chunks = zip(hidden.split(2, 1), y.split(2, 1), strict=True)
        loss: Tensor = sum((ParallelCrossEntropy()(self.head(h), t).sum() for h, t in chunks), torch.zeros(()))
        return loss / y.numel()


def losses_inside(plan: dict[str, str], divided: bool) -> list[float]:
    """Returns the losses of three steps of ``Chunked`` with ``plan``."""
    start(plan)
    torch.manual_seed(3)
    net = Chunked(divided)
    for parameter in (net.head.weight, net.head.bias):
        nn.init.constant_(parameter, 0.1)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.5))
    model = fleet.distributed_model(net)
    found = []
    for step in range(3):
        torch.manual_seed(step)
        loss = model(*torch.randint(0, 8, (2, 4, 6)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


UP_DOWN = {"up": "column", "down": "row"}
ENCODER = {"inside.layers.*.linear1": "column", "inside.layers.*.linear2": "row"}


def optimizer_first(option: str, **settings: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Returns what the biases become with an option that merges two batches, and what they should become."""
    strategy = DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": 1, "mp_degree": 2}
    strategy.tensor_parallel_configs = {"plan": {"0": "column", "1": "row"}}
    setattr(strategy, option, True)
    setattr(strategy, f"{option}_configs", settings)
    fleet.init(is_collective=True, strategy=strategy)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    plain = copy.deepcopy(model)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), 0.1))
    divided = fleet.distributed_model(model)
    whole = torch.optim.SGD(plain.parameters(), 0.1)
    for batch in range(4):
        x = torch.full((2, 4), 0.5 * batch)
        divided(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        (plain(x).square().mean() / 2).backward()
        if batch % 2:
            whole.step()
            whole.zero_grad()
    return list(divided.full_state_dict().values()), list(plain.state_dict().values())


def of_torch() -> dict[str, Any]:
    """Returns what divided models of torch's own modules compute, and what an optimizer of whole matrices raises."""
    start(ENCODER)
    encoder = Encoder().eval()
    x = torch.linspace(-1, 1, 24).view(2, 3, 4)
    with torch.no_grad():
        torch.manual_seed(5)
        for parameter in encoder.parameters():
            parameter.copy_(torch.randn_like(parameter))
        expected = copy.deepcopy(encoder)(x)
        wrapped = fleet.distributed_model(encoder)
        evaluated = [wrapped(x) for _ in range(2)]
    start(UP_DOWN)
    cached, cache, model = Cached(), Cache(), fleet.distributed_model(Cached())
    model(torch.ones(1, 4), cache)
    optimizer = fleet.distributed_optimizer(torch.optim.Muon([cached.up.weight]))
    try:
        fleet.distributed_model(cached)
        refused = ""
    except ConfigError as error:
        refused = str(error)
    del optimizer
    return {
        "evaluated": [float((found - expected).abs().max()) for found in evaluated],
        "cached": [tuple(keys.shape) for keys in cache.keys],
        "refused": refused,
        "merged": [
            optimizer_first("gradient_merge", k_steps=2),
            optimizer_first("sharding", sharding_degree=1, stage=1, gradient_merge_acc_step=2),
        ],
    }


def work(rank: int, world_size: int) -> dict[str, Any]:
    start(PLAN)
    torch.manual_seed(3 + rank)  # the first worker's weights count
    model = Tower()
    before = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    wrapped, optimizer = fleet.distributed_model(model), fleet.distributed_optimizer(optimizer)
    result: dict[str, Any] = {"objects": all(p is before[name] for name, p in wrapped.named_parameters())}
    layouts = layouts_in(model)
    result |= trained(wrapped, optimizer, lambda tensors: joined(layouts, tensors))
    result["tied"] = model.head.weight is model.wte.weight
    result["heads"] = model.attn[0].n_heads
    result["state"] = wrapped.full_state_dict()
    tokens = torch.arange(6)[None]
    result["copy"] = bool(torch.equal(copy.deepcopy(model)(tokens), model(tokens)))
    result["failed"] = [
        fails({name: style for name, style in PLAN.items() if name != "attn.*"}),
        fails({name: style for name, style in PLAN.items() if name != "attn.*"}, silent=True),
        fails({**PLAN, "attn.*.qkv": "column"}),
        fails({**PLAN, "wide": "column", "back": "row"}),
        fails({**PLAN, "attn.*": "divide:n_heads"}, silent=True),
    ]
    result["inside"] = [
        losses_inside({"head": "column"}, divided=False),
        losses_inside({"middle": "column_gather"}, divided=True),
    ]
    result["torch"] = of_torch()
    return result


def check_of_torch(found: dict[str, Any]) -> None:
    assert max(found["evaluated"]) < 1e-5  # torch's short way in evaluation reads the weights
    assert found["cached"] == [(1, 4)]  # the check of the plan has left the cache alone
    assert "torch.optim.Muon needs whole parameters" in found["refused"]
    for weights, expected in found["merged"]:
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


def test_a_cut_model_trains_as_one_process() -> None:
    """Issue 12, 1 and 2: every style at once; losses, logits, every gradient and the weights after 3 steps.

    A plan that is wrong is found at the first forward, also where the shapes fit.
    """
    results = run_workers(work, 2, backend=None)
    torch.manual_seed(3)
    model = Tower()
    expected = trained(model, torch.optim.SGD(model.parameters(), 0.1), lambda tensors: tensors)
    assert expected["gradients"]["wte.weight"][7].any()  # through the head; the embedding's padding row has none
    for result in results:
        assert result["objects"]
        assert result["tied"]
        assert result["copy"]
        assert result["heads"] == 2
        assert result["losses"] == pytest.approx(expected["losses"], abs=1e-6)
        torch.testing.assert_close(result["logits"], expected["logits"], rtol=1e-5, atol=1e-6)
        for kind in ("gradients", "weights"):
            for name, value in expected[kind].items():
                torch.testing.assert_close(result[kind][name], value, rtol=1e-5, atol=1e-6, msg=f"{kind} {name}")
        for name, value in model.state_dict().items():
            torch.testing.assert_close(result["state"][name], value, rtol=1e-5, atol=1e-6)
        counted, silent, fused, normed, right = result["failed"]
        assert "the forward of 'attn.0' (Attention) fails" in counted
        assert "n_heads=4, width=16): add {'attn.*': 'divide:ATTRIBUTE'}" in counted
        assert "the forward of the model (Tower) fails" in normed
        for message in (silent, fused):
            assert "returns something else than with whole layers" in message
        assert "'attn.0' (Attention), which holds the whole numbers n_heads=4, width=16" in silent
        assert right == ""
        by_plan, by_layer = result["inside"]
        assert by_plan == pytest.approx(by_layer, abs=1e-6)
        check_of_torch(result["torch"])
    buffer = io.BytesIO()
    torch.save(results[0]["state"], buffer)
    Tower().load_state_dict(torch.load(io.BytesIO(buffer.getvalue()), weights_only=True))


class Residual(nn.Module):
    """Attention beside a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(16), Attention()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(self.norm(x))


def staged() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(12, 16), Residual(), Residual(), nn.Linear(16, 12))


STAGED = {
    "0": "vocab",
    "*.attn.qkv": "column:3",
    "*.attn.o": "row",
    "*.attn": "divide:n_heads,width",
    "3": "column_gather",
}


def logits_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def work_in_stages(rank: int, world_size: int) -> dict[str, Any]:
    from fleet.meta_parallel import PipelineLayer

    def begin(plan: dict[str, str]) -> tuple[Any, Any]:
        strategy = DistributedStrategy()
        strategy.hybrid_configs = {"dp_degree": 1, "mp_degree": 2, "pp_degree": 2}
        strategy.pipeline_configs = {"accumulate_steps": 2, "micro_batch_size": 2}
        strategy.tensor_parallel_configs = {"plan": plan}
        fleet.init(is_collective=True, strategy=strategy)
        torch.manual_seed(3)
        model = PipelineLayer(staged(), loss_fn=logits_loss)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        return fleet.distributed_model(model), fleet.distributed_optimizer(optimizer)

    model, optimizer = begin(STAGED)
    tokens = torch.randint(12, (4, 6), generator=torch.Generator().manual_seed(1))
    result: dict[str, Any] = {"losses": [model.train_batch([tokens, tokens], optimizer).item() for _ in range(3)]}
    result["state"] = model.full_state_dict()
    try:
        begin({**STAGED, "blocks.*": "column"})
    except ConfigError as error:
        result["unmatched"] = str(error)
    return result


def test_stages_of_plain_layers_are_cut_too() -> None:
    """Issue 12, 2: a plan on the layers of a PipelineLayer; a pattern may match on one stage only."""
    results = run_workers(work_in_stages, 4, backend=None)
    torch.manual_seed(3)
    model = staged()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    tokens = torch.randint(12, (4, 6), generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(3):
        loss = logits_loss(model(tokens), tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    for result in results:
        assert result["losses"] == pytest.approx(losses, abs=1e-6)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(result["state"][name], value, rtol=1e-5, atol=1e-6, msg=name)
        assert "['blocks.*'] matches no module" in result["unmatched"]
