"""What would part an embedding from its rows on the servers is refused before it changes anything."""

from __future__ import annotations

import copy
import io
import operator
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune

import fleet
from fleet.errors import ConfigError, OptionWarning
from tests.helpers.served import ServedJob

MODES = ("sync", "half_async", "async", "geo", "hybrid")
ROWS = 10


class Net(nn.Module):
    """A table of each kind and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(ROWS, 4, sparse=True)
        self.ads = fleet.SparseEmbedding(4)
        self.out = nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.emb(ids) + self.ads(ids))


class Job(ServedJob):
    """Trains :class:`Net`, and waits for the servers in each step."""

    def __init__(self, mode: str) -> None:
        super().__init__(mode, Net, 0.1, k_steps=100)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.arange(3)).sum().backward()
        self.optimizer.step()
        self.trainer.connection.flush()

    def rows(self) -> torch.Tensor:
        return self.net.emb.weight.detach().clone()


@pytest.fixture(params=MODES)
def job(request: pytest.FixtureRequest) -> Iterator[Job]:
    made = Job(request.param)
    yield made
    made.own.stop_worker()
    made.own.session.close()


@pytest.fixture
def async_job() -> Iterator[Job]:
    made = Job("async")
    yield made
    made.own.stop_worker()
    made.own.session.close()


def trains_as_before(job: Job, weight: torch.Tensor) -> bool:
    before = job.rows()
    job.step()
    return job.net.emb.weight is weight and weight.dtype is torch.float32 and not torch.equal(job.rows(), before)


def test_a_weight_that_is_replaced_is_refused_in_every_mode(job: Job) -> None:
    emb, ads = job.net.emb, job.net.ads
    weight, before = emb.weight, job.rows()
    for replace in (
        lambda: setattr(emb, "weight", nn.Parameter(torch.zeros(ROWS, 4))),
        lambda: setattr(emb, "weight", None),
        lambda: emb.register_parameter("weight", nn.Parameter(torch.zeros(ROWS, 4))),
        lambda: delattr(emb, "weight"),
        lambda: setattr(ads, "weight", nn.Parameter(torch.zeros(0, 4))),
        lambda: setattr(emb.weight, "data", torch.zeros(ROWS, 4)),
    ):
        with pytest.raises(ConfigError, match=r"Set weights before fleet.init_worker\(\), or load a save"):
            replace()
    assert torch.equal(job.rows(), before)
    assert trains_as_before(job, weight)


@pytest.mark.parametrize(
    "convert",
    [
        lambda m: m.emb.to(torch.bfloat16),
        lambda m: m.double(),
        lambda m: m.half(),
        lambda m: m.ads.bfloat16(),
        lambda m: m.to("cpu", torch.float16),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_another_dtype_of_rows_is_refused(async_job: Job, convert: Any, wrapped: bool) -> None:
    weight = async_job.net.emb.weight
    with pytest.raises(ConfigError, match=r"weight would become torch\.\w+, but .* tables hold float32"):
        convert(async_job.model if wrapped else async_job.net)
    assert async_job.net.emb.weight.dtype is async_job.net.out.weight.dtype is torch.float32
    async_job.net.float().to("cpu")  # changes nothing
    assert trains_as_before(async_job, weight)


def test_an_attribute_that_made_the_table_is_fixed(async_job: Job) -> None:
    emb, ads = async_job.net.emb, async_job.net.ads
    for module, name, value in (
        (emb, "num_embeddings", 20), (emb, "padding_idx", 1), (emb, "max_norm", 1.0), (emb, "scale_grad_by_freq", True),
        (emb, "sparse", False), (ads, "dim", 8), (ads, "rule", fleet.ps.Rule("adam")), (ads, "name", "clicks"),
    ):  # fmt: skip
        before = getattr(module, name)
        with pytest.raises(ConfigError, match=f"{name} = ... would not change its table.*Set {name} when"):
            setattr(module, name, value)
        assert getattr(module, name) == before
    emb.note = "the script's"


class _Twice(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


@pytest.mark.parametrize(
    "change",
    [
        lambda emb: parametrize.register_parametrization(emb, "weight", _Twice()),
        parametrizations.orthogonal,
        lambda emb: prune.l1_unstructured(emb, "weight", amount=0.3),
        nn.utils.spectral_norm,
        nn.utils.weight_norm,
    ],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_a_weight_that_is_computed_from_another_is_refused(async_job: Job, change: Any) -> None:
    weight, before = async_job.net.emb.weight, async_job.rows()
    with pytest.raises(ConfigError, match="the rows are on the parameter servers"):
        change(async_job.net.emb)
    assert torch.equal(async_job.rows(), before)
    assert trains_as_before(async_job, weight)


def test_a_state_that_is_loaded_into_rows_says_that_it_changes_none(job: Job) -> None:
    """Also through the script's own module, and for the rows of a hybrid job."""
    net, before = job.net, job.rows()
    state = {name: torch.ones_like(value) for name, value in net.state_dict().items()}
    for load in (net.load_state_dict, job.model.load_state_dict):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            load(state)
        said = [str(one.message) for one in found]
        assert any("does not change what is trained of nn.Embedding 'emb'" in text for text in said)
        assert any("servers hold the parameters" in text for text in said) == (job.mode != "hybrid")
    with pytest.warns(OptionWarning, match="does not change what is trained"):
        net.emb.load_state_dict({"weight": state["emb.weight"]})
    with pytest.raises(ConfigError, match=r"assign=True\) would replace"):
        net.load_state_dict(state, assign=True)
    assert torch.equal(job.rows(), before)


WRITES: dict[str, Callable[[Any], Any]] = {
    "data.clamp_": lambda w: w.data.clamp_(-1, 1),
    "data[0] = 0": lambda w: w.data.__setitem__(0, 0.0),
    "data[0].zero_": lambda w: w.data[0].zero_(),
    "data.view(-1)[2:].fill_": lambda w: w.data.view(-1)[2:].fill_(1.0),
    "data.normal_": lambda w: w.data.normal_(),
    "init of data": lambda w: nn.init.uniform_(w.data),
    "detach.mul_": lambda w: w.detach().mul_(2),
    "detach += 1": lambda w: operator.iadd(w.detach(), 1),
    "data **= 2": lambda w: operator.ipow(w.data, 2),
    "weight -= 1": lambda w: torch.no_grad()(operator.isub)(w, 1),
    "out=": lambda w: torch.add(torch.ones(4), 1, out=w.data[1]),
    "_foreach_mul_": lambda w: torch._foreach_mul_([w.data], 2.0),
    "row.data": lambda w: w[0].data.zero_(),
    "unbind": lambda w: w.detach().unbind()[0].zero_(),
    "iteration": lambda w: next(iter(w.data)).zero_(),
    "T": lambda w: w.data.T.zero_(),
    "data.data": lambda w: w.data.data.zero_(),
    "view without gradients": lambda w: torch.no_grad()(w.__getitem__)(0).zero_(),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_through_what_shares_the_weights_memory_is_refused(async_job: Job, write: Callable[[Any], Any]) -> None:
    before = async_job.rows()
    with pytest.raises(ConfigError, match="would change its weight here, but the rows are on the parameter servers"):
        write(async_job.net.emb.weight)
    assert torch.equal(async_job.rows(), before)
    assert trains_as_before(async_job, async_job.net.emb.weight)


def test_no_write_reaches_rows_in_any_mode(job: Job) -> None:
    for parameter in (job.net.emb.weight, job.net.ads.weight, job.model.state_dict()["emb.weight"]):
        with pytest.raises(ConfigError, match="would change its weight here"):
            parameter.data.clamp_(-1, 1)
    for array in (job.net.emb.weight.detach().numpy(), np.asarray(job.net.emb.weight.data)):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0.0
    frozen = job.net.emb.weight.requires_grad_(False)
    with pytest.raises(ValueError, match="read-only"):
        frozen.numpy()[...] = 0.0
    with pytest.raises(ConfigError, match="zero_ would change"):
        frozen[1:3].zero_()


def test_values_that_are_read_are_those_of_plain_torch(async_job: Job) -> None:
    weight, rows = async_job.net.emb.weight, async_job.rows()
    data = weight.data
    assert isinstance(data, torch.Tensor)
    assert repr(data) == repr(rows)
    assert type(rows) is type(data * 1) is type(data.clone()) is type(data[torch.tensor([1])]) is torch.Tensor
    ones = torch.ones(1, 4)
    assert torch.equal(torch.nn.functional.linear(ones, data), torch.nn.functional.linear(ones, rows))
    into = torch.zeros(ROWS, 4)
    into.copy_(data).add_(data).sub_(weight.detach())
    assert torch.equal(into, rows)
    for free in (copy.deepcopy(data), copy.deepcopy(async_job.model.state_dict())["emb.weight"], data.double()):
        free.zero_()
    file = io.BytesIO()
    torch.save({"state": async_job.net.state_dict(), "row": data[2]}, file)
    file.seek(0)
    read = torch.load(file, weights_only=True)
    assert type(read["state"]["emb.weight"]) is torch.Tensor
    assert torch.equal(read["row"], rows[2])
    weight[2:4].square().sum().backward()
    assert torch.equal(weight.grad[2:4], 2 * rows[2:4])


def test_what_was_read_while_the_servers_had_the_rows_is_free_afterwards() -> None:
    made = Job("geo")
    data = made.net.emb.weight.data
    made.own.stop_worker()
    data.zero_()
    made.net.emb.weight.data[0] = 1.0
    assert made.net.emb.weight.detach().numpy().sum() == 4.0
    made.own.session.close()


def test_copies_and_modules_after_the_job_are_free_again() -> None:
    made = Job("async")
    twin = copy.deepcopy(made.net.emb)
    twin.weight = nn.Parameter(torch.zeros(ROWS, 4))
    twin.double()
    made.own.stop_worker()
    made.net.emb.weight = nn.Parameter(torch.zeros(ROWS, 4))
    made.net.half()
    made.own.session.close()


def test_a_forward_with_given_weights_uses_them(job: Job) -> None:
    """torch.func.functional_call: zeros, a copy that takes a gradient, the parameters themselves."""
    ids, net = torch.tensor([1, 2, 2]), job.net.emb
    for owner, prefix in ((net, ""), (nn.Sequential(net), "0.")):
        given = {f"{prefix}weight": torch.full((ROWS, 4), 2.0, requires_grad=True)}
        found = torch.func.functional_call(owner, given, (ids,))
        assert torch.equal(found, torch.full((3, 4), 2.0))
        found.sum().backward()
        gradient = given[f"{prefix}weight"].grad
        assert gradient is not None
        assert gradient.to_dense().sum(1).tolist() == [0, 4, 8, 0, 0, 0, 0, 0, 0, 0]
        live = dict(owner.named_parameters())
        assert torch.equal(torch.func.functional_call(owner, live, (ids,)), job.rows()[ids])
    weights = {name: value.detach() for name, value in net.named_parameters()}
    gradients = torch.func.grad(lambda given: torch.func.functional_call(net, given, (ids,)).sum())(weights)
    assert gradients["weight"].to_dense()[2].tolist() == [2, 2, 2, 2]
    assert not job.optimizer.has_new_gradients()  # of the rows themselves
    assert trains_as_before(job, net.weight)


def test_a_pickled_module_has_the_servers_rows(job: Job) -> None:
    """Of nn.Embedding; it trains like plain torch where it is loaded. Rows of unbounded ids are refused."""
    job.step()
    ids = torch.arange(ROWS)
    for write in (pickle.dumps, _saved):
        read = pickle.loads(write(job.net.emb)) if write is pickle.dumps else write(job.net.emb)
        assert torch.equal(read(ids), job.rows())
        torch.optim.SGD(read.parameters(), 1.0).zero_grad()
        read(ids[:1]).sum().backward()
        torch.optim.SGD(read.parameters(), 1.0).step()
        assert torch.equal(read.weight[1:], job.rows()[1:])
        assert torch.equal(read.weight[0], job.rows()[0] - 1)
        with pytest.raises(ConfigError, match=r"'ads': pickle and torch.save.*fleet.save_persistables"):
            write(job.net)
    assert trains_as_before(job, job.net.emb.weight)


def _saved(module: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_rows_that_a_lookup_would_renormalize_are_refused(async_job: Job) -> None:
    weight, ids = async_job.net.emb.weight, torch.tensor([1, 2])
    before = async_job.rows()
    for lookup in (
        lambda: F.embedding(ids, weight, max_norm=0.1),
        lambda: F.embedding_bag(ids, weight, torch.tensor([0]), max_norm=0.1),
        lambda: F.embedding(ids, weight.detach(), max_norm=0.1),
    ):
        with pytest.raises(ConfigError, match=r"embedding\w* would change its weight here"):
            lookup()
    assert torch.equal(F.embedding(ids, weight), before[ids])
    assert torch.equal(async_job.rows(), before)


def test_a_weight_with_the_contents_of_another_tensor_is_refused(job: Job) -> None:
    other = nn.Parameter(torch.zeros(ROWS, 4))
    weight = job.net.emb.weight
    torch.utils.swap_tensors(weight, other)
    with pytest.raises(ConfigError, match=r"swap_tensors\(\) has put other values into its weight"):
        job.step()
    torch.utils.swap_tensors(weight, other)
    assert trains_as_before(job, weight)
