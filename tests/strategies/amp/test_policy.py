"""amp: in which type each module computes: the three lists, pure 16 bit, masters, the guard (A.2)."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fleet
from fleet.errors import ConfigError
from tests.strategies.amp.amp_steps import batches, flat, net_of, sgd, small_loss, start, wrapped

X = next(batches(1))
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


class Echo(nn.Module):
    """Notes the types it meets: of its input, of a matrix product, of ``prod``, of its own parameter.

    Autocast on the CPU keeps ``prod`` in float32.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(6))
        self.met: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight
        self.met = [x.dtype, y.dtype, y.prod(-1).dtype, self.weight.dtype]
        return y


class Box(nn.Module):
    """Two echoes one after the other; the second lies in a box of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Echo()
        self.inner = nn.Sequential(Echo())

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.first(x))


def met(net: nn.Module, configs: dict[str, Any]) -> tuple[Any, nn.Module]:
    """Runs ``net`` once with amp and returns the model."""
    start(configs)
    model, _ = wrapped(net, sgd(net))
    model(X).sum().backward()
    return model, net


@pytest.mark.parametrize("entry", ["Echo", "first"])
def test_black_list(entry: str) -> None:
    """A.2 custom_black_list: by class or qualified name, the module computes in float32."""
    _, net = met(Box(), {"custom_black_list": [entry]})
    assert net.first.met == [FP32] * 4
    _, net = met(Box(), {})
    assert net.first.met[1] == BF16


@pytest.mark.parametrize("entry", ["Echo", "first"])
def test_white_list(entry: str) -> None:
    """A.2 custom_white_list: everything in the module computes in 16 bit, what autocast keeps in float32 too."""
    _, net = met(Box(), {"custom_white_list": [entry]})
    assert net.first.met == [BF16] * 4
    assert net.first.weight.grad.dtype == FP32
    _, net = met(Box(), {})
    assert net.first.met == [FP32, BF16, FP32, FP32]


def test_lists_inside_each_other() -> None:
    """A.2: a list holds for the parts of a module; a part's own entry and a qualified name stand above it."""
    _, net = met(Box(), {"custom_black_list": ["inner"]})
    assert net.inner[0].met == [FP32] * 4
    assert net.first.met[1] == BF16
    _, net = met(Box(), {"custom_black_list": ["inner"], "custom_white_list": ["inner.0"]})
    assert net.inner[0].met == [BF16] * 4
    _, net = met(Box(), {"custom_white_list": ["inner"], "custom_black_list": ["inner.0"]})
    assert net.inner[0].met == [FP32] * 4
    _, net = met(Box(), {"custom_white_list": ["Echo"], "custom_black_list": ["first"]})
    assert net.first.met == [FP32] * 4
    assert net.inner[0].met == [BF16] * 4
    _, net = met(Echo(), {"custom_black_list": ["Echo"]})  # the model itself
    assert net.met == [FP32] * 4


def test_black_varnames() -> None:
    """A.2 custom_black_varnames: the module that owns the parameter computes in float32, its parts do not."""
    _, net = met(Box(), {"custom_black_varnames": ["first.weight"]})
    assert net.first.met == [FP32] * 4
    assert net.inner[0].met[1] == BF16

    class Owner(Echo):
        def __init__(self) -> None:
            super().__init__()
            self.part = Echo()

        def forward(self, x: Tensor) -> Tensor:
            return self.part(super().forward(x))

    _, net = met(nn.Sequential(Owner()), {"custom_black_varnames": ["0.weight"]})
    assert net[0].met == [FP32] * 4
    assert net[0].part.met[1] == BF16
    _, net = met(Owner(), {"custom_black_varnames": ["weight"], "use_pure_bf16": True})
    assert net.met[3] == FP32
    assert net.part.met == [BF16, BF16, FP32, BF16]


@pytest.mark.parametrize(
    ("configs", "said"),
    [
        ({"custom_white_list": ["Linaer"]}, r"'custom_white_list'\] has 'Linaer'.*Did you mean 'Linear'"),
        ({"custom_black_list": ["laier"]}, r"'custom_black_list'\] has 'laier'.*Classes: "),
        ({"custom_black_varnames": ["0.wight"]}, r"'0.wight', which is no parameter.*Did you mean '0.weight'"),
        ({"custom_black_varnames": ["nothing"]}, r"Parameters: 0.weight"),
        ({"custom_white_list": ["Linear"], "custom_black_list": ["Linear"]}, r"both name 'Linear'"),
    ],
)
def test_unknown_names(configs: dict[str, Any], said: str) -> None:
    """A.2: a name that is nothing in the model is refused with the nearest one, before anything changed."""
    start(configs)
    net = net_of()
    with pytest.raises(ConfigError, match=said):
        fleet.distributed_model(net)
    assert all("forward" not in module.__dict__ for module in net.modules())


@pytest.mark.parametrize(("key", "dtype"), [("use_pure_fp16", FP16), ("use_pure_bf16", BF16)])
def test_pure_computes_everything_but_norms_in_16_bit(key: str, dtype: torch.dtype) -> None:
    """A.2: parameters and inputs in 16 bit, norms in float32 around 16-bit activations, results in float32."""
    net = nn.Sequential(Echo(), nn.LayerNorm(6), Echo(), nn.BatchNorm1d(6), Echo())
    inside: list[Any] = []
    net[1].register_forward_hook(lambda m, args, out: inside.append((args[0].dtype, m.weight.dtype, out.dtype)))
    model, _ = met(net, {key: True})
    assert [net[place].met[1] for place in (0, 2, 4)] == [dtype] * 3
    assert net[0].met[0] == net[2].met[0] == net[2].met[3] == dtype
    assert inside == [(dtype, FP32, dtype)]
    assert model(X).dtype == FP32
    assert all(p.grad.dtype == FP32 for p in net.parameters())


def test_pure_equals_copies_of_masters_by_hand() -> None:
    """A.2: float32 masters, 16-bit copies: the same weights as a hand-written loop with two sets of parameters."""
    start({"use_pure_fp16": True, "custom_white_list": []})
    net, master = net_of(), net_of()
    model, optimizer = wrapped(net, torch.optim.Adam(net.parameters(), lr=0.01))
    update = torch.optim.Adam(master.parameters(), lr=0.01)
    for x in batches(5):
        small_loss(model(x)).backward()
        optimizer.step()
        optimizer.zero_grad()
        narrow = copy.deepcopy(master)
        narrow[0].half(), narrow[3].half()
        hidden = torch.tanh(narrow[1](narrow[0](x.half()).float()).half())
        (small_loss(narrow[3](hidden).float()) * 32768.0).backward()
        for p, q in zip(master.parameters(), narrow.parameters(), strict=True):
            p.grad = q.grad.float() / 32768.0
        update.step()
        update.zero_grad()
    torch.testing.assert_close(flat(net), flat(master), atol=0, rtol=0)
    assert {p.dtype for p in net.parameters()} == {FP32}  # what the optimizer, clipping and checkpoints see
    assert list(model.state_dict()) == list(net_of().state_dict())


@pytest.mark.parametrize("optimizer_first", [True, False])
def test_without_masters(optimizer_first: bool) -> None:
    """A.2 use_optimizer_fp16: the parameters, and so the optimizer's state, are of 16 bit; norms are not."""
    start({"use_pure_bf16": True, "use_optimizer_fp16": True})
    net = net_of()
    model, optimizer = wrapped(net, torch.optim.Adam(net.parameters(), lr=0.01), optimizer_first)
    assert [p.dtype for p in net.parameters()] == [BF16, BF16, FP32, FP32, BF16, BF16]
    first = None
    for _ in range(20):
        loss = model(X).square().mean()
        loss.backward()
        first = first or loss.item()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.5 * first
    assert optimizer.state[net[0].weight]["exp_avg"].dtype == BF16
    start({"use_pure_fp16": True, "use_optimizer_fp16": True})
    with pytest.raises(ConfigError, match=r"eps 1e-08 is 0"):
        fleet.distributed_optimizer(torch.optim.Adam(net_of().parameters()))
    net = net_of()
    model, optimizer = wrapped(net, sgd(net), optimizer_first)
    model(X).mean().backward()
    optimizer.step()
    assert [p.dtype for p in net.parameters()] == [FP16, FP16, FP32, FP32, FP16, FP16]


class Guarded(nn.Module):
    """Computes one part inside the guard."""

    def __init__(self) -> None:
        super().__init__()
        self.outer, self.body, self.head = Echo(), Echo(), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.outer(x)
        with fleet.fp16_guard():
            x = self.body(x)
        return self.head(x.float())


def test_fp16_guard() -> None:
    """A.2 use_fp16_guard: in pure 16 bit, only what is inside the guard, in a model that has one."""
    _, net = met(Guarded(), {"use_pure_fp16": True})
    assert net.outer.met == [FP32] * 4
    assert net.body.met == [FP16, FP16, FP32, FP16]
    _, net = met(Guarded(), {"use_pure_fp16": True, "use_fp16_guard": False})
    assert net.outer.met == [FP16, FP16, FP32, FP16]
    _, net = met(Guarded(), {"use_pure_bf16": True, "use_optimizer_fp16": True})
    assert net.outer.met == [FP32] * 4
    assert net.body.met[3] == BF16
    _, net = met(Guarded(), {})  # no effect unless pure
    assert net.outer.met[1] == BF16


class Tutorial(nn.Module):
    """The example of ``fleet.fp16_guard``, with a norm between the two parts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.norm, self.head = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        with fleet.fp16_guard():
            x = self.body(x)
        return self.head(self.norm(x))


@pytest.mark.parametrize("key", ["use_pure_fp16", "use_pure_bf16"])
@pytest.mark.parametrize("masters", [True, False])
@pytest.mark.parametrize("recomputed", [True, False])
def test_what_leaves_the_guard_is_widened(key: str, masters: bool, recomputed: bool) -> None:
    """A.2 use_fp16_guard: the modules after it compute in float32, recomputed ones too."""
    dtype = FP16 if key == "use_pure_fp16" else BF16
    options = {"recompute": True, "recompute_configs": {"checkpoints": ["norm", "head"]}} if recomputed else {}
    start({key: True, "use_optimizer_fp16": not masters, "init_loss_scaling": 1.0}, **options)
    net = Tutorial()
    reference = copy.deepcopy(net)
    model, _ = wrapped(net, sgd(net))
    found = model(X)
    if not masters:
        for parameter in reference.parameters():
            parameter.data = parameter.data.to(dtype).float()
    inner = nn.functional.linear(X.to(dtype), reference.body.weight.to(dtype), reference.body.bias.to(dtype))
    expected = reference.head(reference.norm(inner.float()))
    torch.testing.assert_close(found, expected, atol=0, rtol=0)
    found.sum().backward()
    expected.sum().backward()
    gradients = [p.grad.float() for p in net.parameters() if p.grad is not None]
    assert len(gradients) == 6
    tolerance = 0.0 if masters else 2e-2  # kept as 16-bit numbers
    for one, other in zip(gradients, reference.parameters(), strict=True):
        torch.testing.assert_close(one, other.grad, atol=tolerance, rtol=tolerance)


def test_a_guard_that_was_not_found_is_an_error() -> None:
    """A.2: a guard that could have no effect is refused; around the call of the model it is one."""

    def hidden(run: Any, x: Tensor) -> Tensor:
        with fleet.fp16_guard():
            return run(x)

    class Sly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Echo()

        def forward(self, x: Tensor) -> Tensor:
            return hidden(self.body, x)

    start({"use_pure_fp16": True})
    net = Sly()
    model, _ = wrapped(net, sgd(net))
    with pytest.raises(ConfigError, match="do not mention it"):
        model(X)
    net2 = Guarded()
    model, _ = wrapped(net2, sgd(net2))
    with fleet.fp16_guard():
        model(X)
    assert net2.outer.met[1] == FP16


def test_recurrent_embedding_and_tied_modules_in_pure_16_bit() -> None:
    """A.2: modules that keep their parameters elsewhere, tables, and a weight that two modules share."""

    class Text(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.rnn, self.head = nn.Embedding(12, 6), nn.LSTM(6, 6, batch_first=True), nn.Linear(6, 12)
            self.head.weight = self.table.weight
            self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

        def forward(self, words: Tensor) -> Tensor:
            seen = self.rnn(self.table(words))[0]
            return self.head(self.attention(seen, seen, seen)[0])

    pure = {"use_pure_bf16": True}
    for configs in (pure, {"use_pure_fp16": True}, {**pure, "use_optimizer_fp16": True},
                    {"custom_white_list": ["LSTM", "Embedding"]}):  # fmt: skip
        start(configs)
        torch.manual_seed(0)
        net = Text()
        model, optimizer = wrapped(net, torch.optim.SGD(net.parameters(), lr=0.5))
        words = torch.arange(12).view(3, 4)
        losses = []
        for _ in range(8):
            loss = nn.functional.cross_entropy(model(words).flatten(0, 1), words.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[-1] < losses[0], configs
        assert net.head.weight is net.table.weight


def test_models_can_still_be_copied_and_stored() -> None:
    """A copy of the user's module computes with its own parameters; containers of results keep their class."""
    start({"use_pure_bf16": True, "custom_black_list": ["3"]})
    net = net_of()
    model, _ = wrapped(net, sgd(net))
    twin = copy.deepcopy(net)
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    assert torch.count_nonzero(twin(X)) == 0
    assert torch.count_nonzero(model(X)) > 0
    assert pickle.loads(pickle.dumps(net)) is not None

    class Named(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return OrderedDict(y=super().forward(x))

    start({"use_pure_bf16": True})
    net2 = Named(6, 2)
    model, _ = wrapped(net2, sgd(net2))
    out = model(X)
    assert type(out) is OrderedDict
    assert out["y"].dtype == FP32


def test_methods_that_run_the_model() -> None:
    """A method that is marked as a forward runs under amp, whatever treatment the model itself has."""

    class Scorer(Echo):
        def score(self, x: Tensor) -> Tensor:
            return self(x) * 2

    for configs, types in (({}, [FP32, BF16]), ({"custom_black_list": ["Scorer"]}, [FP32, FP32]),
                           ({"use_pure_bf16": True}, [BF16, BF16])):  # fmt: skip
        start(configs)
        net = Scorer()
        model, _ = wrapped(net, sgd(net))
        model.mark_forward_method("score")
        assert model.score(X).dtype == FP32
        assert net.met[:2] == types
        model(X)
        assert net.met[:2] == types
