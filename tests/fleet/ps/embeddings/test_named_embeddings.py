"""A plain model's embeddings on servers, by pattern: sparse_modules and unbounded_modules of a_sync_configs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import orthogonal

import fleet
from fleet.errors import CheckpointError, ConfigError
from fleet.facade import Fleet
from fleet.ps.embeddings.named_embeddings import UnboundedEmbedding, check_named, serve_named
from fleet.ps.embeddings.served_embedding import ServedEmbedding
from tests.helpers.served import strategy_of

LARGE = 10**15
Net = Callable[[], nn.Module]


class Clicks(nn.Module):
    """Embeddings as a library writes them: deep inside, in a dictionary, beside a list of their parameters."""

    def __init__(self, sparse: bool = False, **unbounded: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        user, item = nn.Embedding(8, 4, sparse=sparse), nn.Embedding(8, 4, sparse=sparse, padding_idx=0)
        self.embedding_dict = nn.ModuleDict({"user": user, "item": item})
        self.out = nn.Linear(8, 1)
        if unbounded:
            self.embedding_dict["item"] = fleet.SparseEmbedding(4, padding_idx=0)
        self.penalized = [user.weight]

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        rows = torch.cat([self.embedding_dict["user"](user), self.embedding_dict["item"](item)], -1)
        return self.out(rows).square().mean() + 0.01 * sum(p.square().sum() for p in self.penalized)


def groups_of(net: Clicks, mode: str) -> list[dict[str, Any]]:
    user, item = net.embedding_dict["user"], net.embedding_dict["item"]
    return [
        {"params": user.parameters(), "lr": 0.2, "weight_decay": 0.0 if mode == "geo" else 0.1},
        {"params": [*item.parameters()], "lr": 0.05},
        {"params": net.out.parameters()},
    ]


def trained(net: Clicks, mode: str, large: int = 0, then: Any = None, **patterns: list[str]) -> dict[str, torch.Tensor]:
    """Trains three steps as one worker and returns rows and parameters; ``then`` is called before the job ends."""
    own = Fleet()
    made = strategy_of(mode, a_sync_configs={**patterns, "k_steps": 2 if mode == "geo" else 0})
    own.init(strategy=made, log_level="ERROR")
    optimizer = own.distributed_optimizer(torch.optim.SGD(groups_of(net, mode), 0.1), made)
    model = own.distributed_model(net)
    own.init_worker()
    item = torch.tensor([0, 5, 7 + large])
    for user in ([1, 2, 2], [2, 3, 1], [7, 7, 2]):
        optimizer.zero_grad()
        model(torch.tensor(user), item).backward()
        optimizer.step()
    own.barrier_worker()
    found = {name: p.detach().clone() for name, p in model.state_dict().items()}
    with torch.no_grad():
        found["looked up"] = net.embedding_dict["item"](item)
    if then is not None:
        then(own, model)
    own.stop_worker()
    own.session.close()
    return found


@pytest.mark.parametrize("mode", ["sync", "hybrid", "geo"])
def test_named_embeddings_train_as_those_written_sparse(mode: str) -> None:
    """Same bits, with groups of their own rates and decay, a penalty over all rows, and a padding row."""
    net = Clicks()
    kept = net.embedding_dict["user"].weight
    found = trained(net, mode, sparse_modules=["embedding_dict.*"])
    written = trained(Clicks(sparse=True), mode)
    assert net.embedding_dict["user"].weight is kept is net.penalized[0]
    assert not torch.equal(found["out.weight"], Clicks().out.weight)
    torch.testing.assert_close(found, written, atol=0, rtol=0)
    assert found["looked up"][0].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("mode", ["sync", "hybrid", "geo"])
def test_unbounded_embeddings_train_as_sparse_embeddings(mode: str) -> None:
    """Any 64-bit id, with the initial rows of fleet.SparseEmbedding and not those of the module."""
    net, written = Clicks(), Clicks(unbounded=True)
    names = {"sparse_modules": ["embedding_dict.user"], "unbounded_modules": ["*.item"]}
    found = trained(net, mode, LARGE, **names)
    expected = trained(written, mode, LARGE, sparse_modules=["embedding_dict.user"])
    assert isinstance(net.embedding_dict["item"], UnboundedEmbedding)
    assert isinstance(net.embedding_dict["item"], nn.Embedding)
    assert found["embedding_dict.item.weight"].shape == (0, 4)
    torch.testing.assert_close(found, expected, atol=0, rtol=0)
    assert found["looked up"][0].tolist() == [0, 0, 0, 0]
    assert found["looked up"][2].abs().max() > 0


def test_copies_states_and_explanation() -> None:
    """What a job with named embeddings does beside training."""
    seen: dict[str, Any] = {}

    def then(own: Fleet, model: Any) -> None:
        net, ids = model.module, torch.tensor([1, 2, 3])
        twin = copy.deepcopy(net)
        assert torch.equal(twin(ids, ids + LARGE), net(ids, ids + LARGE))
        net.load_state_dict(model.state_dict())
        with pytest.raises(CheckpointError, match=r"embedding_dict.item.weight has 8 rows.*sparse_modules"):
            net.load_state_dict(Clicks().state_dict())
        seen["text"] = own.explain()

    with pytest.warns(fleet.errors.OptionWarning, match="does not change what is trained"):
        trained(
            Clicks(),
            "sync",
            LARGE,
            then,
            sparse_modules=["embedding_dict.user"],
            unbounded_modules=["embedding_dict.item"],
        )
    assert "rows with the modules' own weights: embedding_dict.user; tables of any 64-bit id" in seen["text"]
    assert "  embedding_dict.user: 8 rows of 4, from the module's own weights" in seen["text"]
    assert "  embedding_dict.item: rows of 4 for any 64-bit id, each from uniform (-0.0001, 0.0001)" in seen["text"]
    assert "Dense parameters: 9 elements" in seen["text"]


def test_a_save_goes_on_in_another_job(tmp_path: Path) -> None:
    """Saves hold named embeddings under the names of their modules."""
    names = {"sparse_modules": ["embedding_dict.user"], "unbounded_modules": ["embedding_dict.item"]}
    first = trained(Clicks(), "sync", LARGE, lambda own, model: own.save_persistables(tmp_path), **names)
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} >= {"embedding_dict.user", "embedding_dict.item"}

    def load(own: Fleet, model: Any) -> None:
        own.load_model(tmp_path)
        found = {name: p.detach().clone() for name, p in model.state_dict().items()}
        with torch.no_grad():
            found["looked up"] = model.module.embedding_dict["item"](torch.tensor([0, 5, 7 + LARGE]))
        torch.testing.assert_close(found, first, atol=0, rtol=0)

    trained(Clicks(), "sync", LARGE, load, **names)


def tied() -> nn.Module:
    net = nn.Sequential(nn.Linear(2, 4, bias=False), nn.Embedding(4, 2))
    net[1].weight = net[0].weight
    return net


def padded() -> nn.Module:
    net = nn.Embedding(4, 2, padding_idx=1)
    nn.init.ones_(net.weight)
    return net


@pytest.mark.parametrize(
    ("module", "named", "reason"),
    [
        (nn.EmbeddingBag(4, 2), "both", "EmbeddingBag"),
        (nn.Linear(4, 2), "both", "Linear"),
        (nn.Embedding(4, 2, max_norm=1.0), "both", "max_norm"),
        (nn.Embedding(4, 2, scale_grad_by_freq=True), "both", "scale_grad_by_freq"),
        (orthogonal(nn.Embedding(4, 2)), "both", "ParametrizedEmbedding"),
        (nn.Embedding(4, 2, dtype=torch.float64), "both", "float64"),
        (nn.Embedding(4, 2).requires_grad_(False), "unbounded", "frozen"),
        (padded(), "unbounded", "padding_idx 1 is not zero"),
        (tied(), "unbounded", "0.weight and 0.1.weight"),
    ],
    ids=lambda one: one if isinstance(one, str) else type(one).__name__,
)
def test_what_a_table_cannot_be_is_refused_before_anything_changes(module: nn.Module, named: str, reason: str) -> None:
    good = nn.Embedding(3, 2)
    model = nn.Sequential(module, good)
    bad = {"0.1": module[1]} if isinstance(module, nn.Sequential) else {"0": module}
    for sparse, unbounded in (({**bad, "1": good}, {}), ({}, {"1": good, **bad})):
        if named == "both" or unbounded:
            with pytest.raises(ConfigError, match=reason):
                check_named(model, sparse, unbounded)
        assert type(good) is nn.Embedding
        assert good.sparse is False


def test_patterns_that_fit_nothing_or_both() -> None:
    own, net = Fleet(), Clicks()
    for patterns, reason in (
        ({"sparse_modules": ["embeding_dict.*"]}, r"\['sparse_modules'\] has 'embeding_dict.*', which names no module"),
        ({"unbounded_modules": ["embedding_dict"]}, r"names 'embedding_dict': its class is ModuleDict"),
        (
            {"sparse_modules": ["*.user"], "unbounded_modules": ["*.u*"]},
            r"'embedding_dict.user': so does .*unbounded_modules",
        ),
    ):
        made = strategy_of("sync", a_sync_configs=patterns)
        own.init(strategy=made, log_level="ERROR")
        own.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.1), made)
        own.distributed_model(net)
        with pytest.raises(ConfigError, match=reason):
            own.init_worker()
        assert not any(isinstance(one, ServedEmbedding | UnboundedEmbedding) for one in net.modules())
        own.session.close()


def test_a_rule_that_servers_lack_is_refused_for_named_rows() -> None:
    """In a hybrid job dense parameters may use any optimizer, rows may not: nothing is trained without its decay."""
    made = strategy_of("hybrid", 1, a_sync_configs={"sparse_modules": ["embedding_dict.*"]})
    own, net = Fleet(), Clicks()
    own.init(strategy=made, log_level="ERROR")
    own.distributed_optimizer(torch.optim.AdamW(net.parameters(), 0.1, weight_decay=0.1), made)
    own.distributed_model(net)
    with pytest.raises(ConfigError, match="AdamW"):
        own.init_worker()
    own.session.close()


def test_a_model_may_be_named_twice() -> None:
    """As by a second distributed_model(): what is served stays as it is."""
    net = Clicks()
    sparse, unbounded = {"embedding_dict.user": net.embedding_dict["user"]}, {"x": net.embedding_dict["item"]}
    serve_named(sparse, unbounded)
    kept = net.embedding_dict["item"].lookup
    check_named(net, sparse, unbounded)
    serve_named(sparse, unbounded)
    assert net.embedding_dict["item"].lookup is kept
