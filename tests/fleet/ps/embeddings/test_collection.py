"""SparseEmbeddings: many features in one call, bit for bit as modules of their own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fleet
from fleet.errors import CheckpointError, ConfigError, NotInitializedError
from fleet.facade import Fleet
from tests.fleet.ps.embeddings.features import START, TABLES, Keyed, batch, both, compare, draw, is_equal, settings_of
from tests.fleet.ps.embeddings.test_feature_ids import Jagged
from tests.fleet.ps_job.test_prefetch import Sent
from tests.helpers.served import run_job, strategy_of
from tests.helpers.trainers import thread_trainers


@pytest.mark.parametrize("size", [6, 1, 0])
def test_every_feature_is_as_alone(size: int) -> None:
    made, alone = both()
    for seed in range(3):
        compare(made, alone, batch(seed, size))


def test_features_that_are_missing_are_left_out() -> None:
    made, alone = both()
    ids = batch()
    compare(made, alone, {"words": ids["words"], "user": ids["user"]})
    assert made({}) == {}


def test_results_come_in_the_order_of_the_collection() -> None:
    made, _ = both()
    ids = batch()
    assert list(made({name: ids[name] for name in reversed(list(ids))})) == list(TABLES)


def test_shows_clicks_slots_and_entries() -> None:
    tables = {
        "ads": {"dim": 4, "accessor": fleet.ps.Accessor(), "slot": 3},
        "words": {"dim": 4, "combiner": "sum", "entry": fleet.ShowClickEntry("show", "click"), "padding_idx": 0},
        "user": {"dim": 4, "entry": fleet.CountFilterEntry(2)},
    }
    ids = {"ads": draw(5), "words": draw(5, 3, seed=1), "user": draw(5, seed=2)}
    made, alone = both(tables)
    numbers = {"show": torch.tensor([3, 1, 5, 2, 2]), "click": torch.tensor([1, 0, 2, 0, 1])}
    compare(made, alone, ids, **numbers)
    found = made({"ads": ids["ads"]}, show={"ads": numbers["show"]})
    found["ads"].sum().backward()
    alone["ads"](ids["ads"], show=numbers["show"]).sum().backward()
    assert is_equal(made["ads"].lookup.take(), alone["ads"].lookup.take())
    with pytest.raises(ConfigError, match="show= and click="):
        made(ids)
    with pytest.raises(ConfigError, match="none of its features keep"):
        both()[0](batch(), show=numbers["show"])
    with pytest.raises(ConfigError, match="the features are"):
        made(ids, show={"nobody": numbers["show"]})


def test_frozen_features_have_no_gradient() -> None:
    made, alone = both()
    for modules in (made, alone):
        modules["item"].requires_grad_(False)
    assert not made(batch())["item"].requires_grad
    compare(made, alone, batch())
    made.requires_grad_(False)
    assert not any(rows.requires_grad for rows in made(batch()).values())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_forwards_without_gradients(mode: Any) -> None:
    made, alone = both()
    ids = batch()
    with mode():
        for name, rows in made(ids).items():
            assert torch.equal(rows, alone[name](ids[name]))
            rows.add_(1.0)
    assert not any(module.lookup.has_gradients() for module in made.children())


def test_backward_before_init_worker_is_refused() -> None:
    made = fleet.SparseEmbeddings({"user": 4})
    with pytest.raises(NotInitializedError, match="fleet.init_worker"):
        made({"user": torch.tensor([1])})["user"].sum().backward()


def test_a_module_that_was_replaced_or_has_hooks_is_called() -> None:
    made, alone = both()
    ids = batch()
    called = []
    handle = made["item"].register_forward_hook(lambda module, given, found: called.append(found))
    compare(made, alone, ids)
    assert len(called) == 1
    handle.remove()
    compare(made, alone, ids)
    assert len(called) == 1


def test_the_collection_has_its_modules_by_name() -> None:
    made = fleet.SparseEmbeddings({"user": 4, "words": {"dim": 8, "combiner": "sum"}}, padding_idx=3, combiner="mean")
    model = nn.ModuleDict({"fields": made})
    assert [name for name, _ in model.named_parameters()] == ["fields.user.weight", "fields.words.weight"]
    assert (list(made), len(made), "user" in made, "nobody" in made) == (["user", "words"], 2, True, False)
    assert (made["user"].dim, made["user"].combiner, made["user"].padding_idx) == (4, "mean", 3)
    assert (made["words"].dim, made["words"].combiner, made["words"].padding_idx) == (8, "sum", 3)
    with pytest.raises(KeyError, match="nobody"):
        made["nobody"]
    copied = copy.deepcopy(model)
    assert copied["fields"]["user"] is not made["user"]
    copied.load_state_dict(model.state_dict())


@pytest.mark.parametrize(
    ("arguments", "settings", "rule"),
    [
        ({}, {}, "tables by feature"),
        (["user"], {}, "tables by feature"),
        ({"user": {}}, {}, "no dim"),
        ({"user": 4.5}, {}, "integer"),
        ({"user": {"dim": 4, "pad": 0}}, {}, "'pad' for 'user'.*padding_idx"),
        ({"user": 4}, {"pad": 0}, "'pad'; it takes"),
        ({"user.id": 4}, {}, "without a dot"),
        ({7: 4}, {}, "without a dot"),
        ({"type": 4}, {}, "attribute of every"),
        ({"prefetch": 4}, {}, "attribute of every"),
    ],
)
def test_wrong_tables_are_refused(arguments: Any, settings: dict[str, Any], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        fleet.SparseEmbeddings(arguments, **settings)


class Weighted(Jagged):
    def weights_or_none(self) -> Tensor:
        return torch.ones(4)


def test_wrong_ids_are_refused() -> None:
    made = fleet.SparseEmbeddings({"user": 4, "tags": {"dim": 4, "combiner": "sum"}})
    with pytest.raises(ConfigError, match=r"\['label'\].*\['user', 'tags'\]"):
        made({"user": torch.tensor([1]), "label": torch.tensor([1])})
    with pytest.raises(ConfigError, match="by name"):
        made(torch.tensor([1]))
    with pytest.raises(ConfigError, match=r"feature 'user': SparseEmbedding: ids are torch.float32"):
        made({"user": torch.tensor([1.0])})
    with pytest.raises(ConfigError, match="with weights"):
        made(Keyed({"tags": [[1, 2], []]}, torch.ones(2)))
    with pytest.raises(ConfigError, match=r"received a Weighted with weights.*multiply them"):
        made({"tags": Weighted()})
    with pytest.raises(ConfigError, match=r"received a Weighted with weights.*multiply them"):
        made["tags"](Weighted())
    with pytest.raises(ConfigError, match=r"received SimpleNamespace. It has keys\(\), and no offset_per_key\(\)"):
        made(SimpleNamespace(**{name: getattr(Keyed({"tags": [[1]]}), name) for name in ("keys", "values", "lengths")}))
    with pytest.raises(ConfigError, match=r"\['nobody'\]"):
        made(Keyed({"nobody": [[1]]}))


class Model(nn.Module):
    """All features, by a collection or by modules of the same names."""

    def __init__(self, together: bool, tables: Mapping[str, Any] = TABLES) -> None:
        super().__init__()
        self.together = together
        self.fields: Any
        if together:
            self.fields = fleet.SparseEmbeddings(tables, initializer=START)
        else:
            self.fields = nn.ModuleDict({name: fleet.SparseEmbedding(**settings_of(t)) for name, t in tables.items()})
        self.tables = list(tables)
        with torch.no_grad():
            sample = self.rows(batch())
        self.out = nn.Linear(sample.shape[1], 1)

    def rows(self, ids: dict[str, Tensor]) -> Tensor:
        """Returns the rows of all features side by side."""
        ids = {name: ids[name] for name in self.tables}
        found = self.fields(ids) if self.together else {name: self.fields[name](own) for name, own in ids.items()}
        return torch.cat([rows.flatten(1) for rows in found.values()], 1)

    def forward(self, ids: dict[str, Tensor]) -> Tensor:
        """Returns one number."""
        return self.out(self.rows(ids)).sigmoid().mean()


STEPS = 6
Work = tuple[dict[str, Tensor], list[float], list[int]]


def train(
    mode: str,
    together: bool,
    monkeypatch: pytest.MonkeyPatch,
    workers: int,
    loader: Callable[[Fleet, Any], Iterator[Any]] = lambda own, batches: batches,
    **options: Any,
) -> list[Work]:
    """Returns, by worker, the parameters and rows after training, the losses, and the pulls of each step."""
    trainers = thread_trainers(workers)
    monkeypatch.setattr("fleet.ps_job.hybrid_job.meet_trainers", lambda job: trainers[job.global_rank])
    made = strategy_of(mode, workers, **options)
    torch.manual_seed(3)
    start = Model(together)
    start.load_state_dict(start.state_dict())
    for module in start.fields.children():
        module.lookup.source = None

    def work(own: Fleet, rank: int) -> Work:
        net = copy.deepcopy(start)
        optimizer = own.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.5), made)
        model = own.distributed_model(net)
        own.init_worker()
        sent = Sent(own)
        losses, pulls = [], []
        batches = [batch(7 * step + rank, 6 if step != 3 else 5) for step in range(STEPS)]
        for one in loader(own, batches):
            loss = model(one)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            pulls.append(sent.pulls() - sum(pulls))
        own.barrier_worker()
        found = {name: p.detach().clone() for name, p in net.named_parameters() if p.numel()}
        with torch.no_grad():
            found["rows"] = net.rows(batch(7))
        own.stop_worker()
        return found, losses, pulls

    return run_job(work, num_workers=workers, strategy=made, limit_s=100)


MODES = {
    "sync": ("sync", 2, {}),
    "hybrid": ("hybrid", 2, {}),
    "async": ("async", 1, {"a_sync_configs": {"max_staleness": 0}}),
    "half_async": ("half_async", 1, {}),
    "geo": ("geo", 1, {"k_steps": 100}),
}


@pytest.mark.parametrize("name", MODES)
def test_training_is_as_with_modules_alone_and_asks_once_a_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mode, workers, options = MODES[name]
    alone = train(mode, False, monkeypatch, workers, **options)
    together = train(mode, True, monkeypatch, workers, **options)
    for (found, losses, pulls), (expected, expected_losses, expected_pulls) in zip(together, alone, strict=True):
        assert losses == expected_losses
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        dense = mode in ("async", "half_async")  # whose parameters are pulled, too
        assert max(pulls) <= 1 + dense
        assert max(expected_pulls) >= len(TABLES)


def test_fleet_prefetch_and_the_collection_ask_for_each_row_once(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = train("sync", False, monkeypatch, 2)
    prefetched = train("sync", True, monkeypatch, 2, lambda own, batches: own.prefetch(batches))
    for (found, losses, pulls), (expected, expected_losses, _) in zip(prefetched, alone, strict=True):
        assert losses == expected_losses
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert set(pulls) == {1}


def test_prefetch_asks_once_for_all_features_and_forward_takes_the_rows() -> None:
    made = strategy_of("async", 1)

    def work(own: Fleet, rank: int) -> None:
        net = Model(True)
        for module in net.fields.children():
            module.lookup.source = None
        own.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.5), made)
        own.distributed_model(net)
        own.init_worker()
        sent = Sent(own)
        first, second = batch(0), batch(1)
        with torch.no_grad():
            expected = net.rows(second)
            assert sent.pulls() == 1
            net.fields.prefetch(second)
            assert sent.pulls() == 2
            other = {**second, "user": first["user"]}
            net.rows(other)  # the rows of user are asked for, the others are here
            assert sent.pulls() == 3
            assert sent.parts[-1] == 1
            net.fields.prefetch(second)
            assert torch.equal(net.rows(second), expected)
            assert sent.pulls() == 4
            for seed in range(5):
                net.fields.prefetch(batch(seed))
            assert len(net.fields["item"].lookup._expected) == 2
        own.stop_worker()

    run_job(work, strategy=made)


def test_prefetch_is_refused_in_sync_mode() -> None:
    made = strategy_of("sync", 1)

    def work(own: Fleet, rank: int) -> None:
        net = Model(True)
        own.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.5), made)
        own.distributed_model(net)
        own.init_worker()
        with pytest.raises(ConfigError, match="sync training"):
            net.fields.prefetch(batch())
        own.stop_worker()

    run_job(work, strategy=made)


def check_that_features_load_together(folder: str, tables: dict[str, Any]) -> None:
    ids = {name: batch()[name] for name in tables}
    whole = Model(True, tables)
    apart = Model(True, tables)
    for module in (*whole.fields.children(), *apart.fields.children()):
        module.lookup.source = None
    assert whole.fields.load(folder, "fields") == sum(
        module.load(folder, f"fields.{name}") for name, module in apart.fields.named_children()
    )
    found = whole.fields(ids)
    assert all(torch.equal(rows, found[name]) for name, rows in apart.fields(ids).items())
    with pytest.raises(CheckpointError, match="others.user"):
        whole.fields.load(folder, "others")
    assert all(torch.equal(rows, found[name]) for name, rows in whole.fields(ids).items())


def test_options_by_the_name_of_the_table_saving_and_prediction(tmp_path: Path) -> None:
    tables = {"user": 4, "words": {"dim": 4, "combiner": "sum", "padding_idx": 0}}
    made = strategy_of("sync", 1)
    made.sparse_table_configs = {"fields.user": {"sparse_accessor_class": "CtrCommonAccessor"}}

    def work(own: Fleet, rank: int) -> tuple[Tensor, Any]:
        torch.manual_seed(0)
        net = Model(True, tables)
        optimizer = own.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.5), made)
        model = own.distributed_model(net)
        own.init_worker()
        for seed in range(3):
            model(batch(seed)).backward()
            optimizer.step()
            optimizer.zero_grad()
        example = {name: batch()[name] for name in tables}
        own.save_inference_model(str(tmp_path / "served"), example_inputs=(example,))
        with torch.no_grad():
            expected = model(example)
        kept = net.fields["user"].keeps_counts, net.fields["words"].keeps_counts
        own.stop_worker()
        return expected, kept

    ((expected, kept),) = run_job(work, strategy=made)
    assert kept == (True, False)
    predictor = fleet.ps.Predictor(tmp_path / "served")
    assert torch.equal(predictor({name: batch()[name] for name in tables}), expected)
    check_that_features_load_together(str(tmp_path / "served"), tables)
    fresh = Model(True, tables)
    fresh.fields["words"].lookup.source = None
    fresh.fields["words"].load(str(tmp_path / "served"), "fields.words")
    assert fresh.fields({"words": batch()["words"]})["words"].shape == (6, 4)


@pytest.mark.parametrize("given", [-1, 0, True, (4,), torch.nn.Linear(1, 1), {"dim": "4"}, {"dim": 4, "seed": "x"}])
def test_what_makes_no_table_is_refused_with_its_feature(given: Any) -> None:
    with pytest.raises(ConfigError, match="SparseEmbeddings.*'user'"):
        fleet.SparseEmbeddings({"user": given})


def test_offsets_with_the_end_of_the_last_bag_are_refused_beside_other_features() -> None:
    fields = fleet.SparseEmbeddings({"user": 4, "words": {"dim": 4, "combiner": "sum"}})
    user, words, ends = torch.tensor([1, 2]), torch.tensor([5, 6, 7]), torch.tensor([0, 1, 3])
    assert len(fields({"user": user, "words": (words, ends[:-1])})["words"]) == 2
    assert len(fields({"user": torch.tensor([1, 2, 3]), "words": (words, ends)})["words"]) == 3
    with pytest.raises(ConfigError, match=r"'words'.*3 offsets.*2 samples.*offsets\[:-1\]"):
        fields({"user": user, "words": (words, ends)})
    with pytest.raises(ConfigError, match="'words'"):
        fields.prefetch({"user": user, "words": (words, ends)})
