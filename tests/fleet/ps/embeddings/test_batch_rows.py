"""Where the ids of lookups are in a batch, and the rows that are requested for the next one."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import fleet
from fleet.errors import ConfigError
from fleet.ps.client.shards import Keys, Rows
from fleet.ps.embeddings.batch_rows import BatchRows
from fleet.ps.embeddings.jagged_ids import features_of, jagged_ids
from fleet.ps.embeddings.lookup import TrainedRows
from tests.fleet.ps.embeddings.features import Keyed

DIM = 2


class Servers:
    """Rows that are their ids, and what was asked for."""

    def __init__(self) -> None:
        self.requests: list[dict[int, list[int]]] = []
        self.lookups: list[int] = []
        self.is_fresh = True

    def request(self, wanted: Mapping[int, Keys], is_next: bool) -> Coming:
        self.requests.append({table_id: keys.tolist() for table_id, keys in wanted.items()})
        return Coming(self, {table_id: keys.copy() for table_id, keys in wanted.items()})

    def connect(self, module: Any, table_id: int) -> None:
        def rows(keys: Keys) -> Rows:
            self.lookups.append(table_id)
            return rows_of(keys)

        module.lookup.source = TrainedRows(table_id, rows, self.request, lambda: True)


def rows_of(keys: Keys) -> Rows:
    return np.repeat(keys.astype(np.float32)[:, None], DIM, 1)


class Coming:
    def __init__(self, servers: Servers, keys: dict[int, Keys]) -> None:
        self.servers = servers
        self.keys = keys

    def rows(self, table_id: int, part: slice) -> Rows | None:
        return rows_of(self.keys[table_id][part]) if self.servers.is_fresh else None


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Record:
    ids: Any
    label: Any


def jagged(seed: int, layout: torch.layout = torch.jagged) -> Tensor:
    return torch.nested.nested_tensor([ids(size, seed=seed + size) for size in (2, 0, 3)], layout=layout)


def keyed(seed: int) -> Keyed:
    """Features whose lengths differ from batch to batch."""
    return Keyed({name: [ids(size, seed=seed + 50 * size).tolist() for size in (1, seed + 2)] for name in ("a", "b")})


def ids(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(1, 10**6, shape, generator=torch.Generator().manual_seed(seed))


def loop(batches: list[Any], reads: list[Any], **settings: Any) -> tuple[Servers, list[list[Tensor]]]:
    """Trains modules, each with a function that reads its ids; returns what the servers saw, and the found rows."""
    servers = Servers()
    modules = [fleet.SparseEmbedding(DIM, name=f"t{number}", **settings) for number in range(len(reads))]
    for number, module in enumerate(modules):
        servers.connect(module, number)
    rows = BatchRows(modules)
    found = []
    for batch in batches:
        rows.begin(batch)
        found.append([module(read(batch)) for module, read in zip(modules, reads, strict=True)])
    rows.end()
    return servers, found


FORMS: dict[str, tuple[Any, list[Any]]] = {
    "a tensor alone": (lambda seed: ids(4, seed=seed), [lambda x: x]),
    "columns": (lambda seed: ids(4, 3, seed=seed), [lambda x, i=i: x[:, i] for i in range(3)]),
    "columns in another order": (lambda seed: ids(4, 3, seed=seed), [lambda x, i=i: x[:, i] for i in (2, 0, 1)]),
    "neighbouring columns": (lambda seed: ids(4, 5, seed=seed), [lambda x: x[:, 1:3], lambda x: x[:, 3:]]),
    "floats that are cast": (
        lambda seed: ids(4, 3, seed=seed).float(),
        [lambda x: x[:, 1:2].long(), lambda x: x[:, 2].long()],
    ),
    "the last dimension": (lambda seed: ids(4, 3, 2, seed=seed), [lambda x, i=i: x[..., i] for i in range(2)]),
    "slots": (lambda seed: ids(4, 3, 2, seed=seed), [lambda x, i=i: x[:, i] for i in range(3)]),
    "a list": (lambda seed: [ids(4, seed=seed), ids(4, seed=seed + 50)], [lambda x: x[1], lambda x: x[0]]),
    "nested": (
        lambda seed: {"x": ({"user": ids(4, seed=seed)}, ids(4, seed=seed + 50))},
        [lambda b: b["x"][0]["user"], lambda b: b["x"][1]],
    ),
    "a named tuple": (lambda seed: Pair(ids(4, seed=seed), ids(4, 2, seed=seed + 50)), [lambda x: x.second]),
    "a dataclass": (lambda seed: Record(ids(4, seed=seed), torch.ones(4)), [lambda x: x.ids]),
    "a mapping of one's own": (lambda seed: UserDict(user=ids(4, seed=seed)), [lambda x: x["user"]]),
    "an array": (lambda seed: {"user": ids(4, seed=seed).numpy()}, [lambda x: torch.from_numpy(x["user"])]),
    "a jagged tensor": (lambda seed: {"tags": jagged(seed)}, [lambda b: b["tags"].values()]),
    "a nested tensor": (
        lambda seed: {"tags": jagged(seed, torch.strided)},
        [lambda b: torch.cat(b["tags"].unbind())],
    ),
    "flat ids and offsets": (
        lambda seed: {"tags": (ids(5, seed=seed), torch.tensor([0, 2]))},
        [lambda b: b["tags"][0]],
    ),
    "a keyed jagged tensor": (
        lambda seed: Record(keyed(seed), torch.ones(2)),
        [
            lambda b: b.ids.values()[b.ids.offset_per_key()[1] :],
            lambda b: b.ids.values()[: b.ids.offset_per_key()[1]],
        ],
    ),
    "int32": (lambda seed: ids(4, 2, seed=seed).int(), [lambda x: x[:, 1]]),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("form", FORMS)
def test_the_rows_of_every_batch_but_the_first_come_in_one_message(form: str) -> None:
    make, reads = FORMS[form]
    batches = [make(seed) for seed in range(4)]
    servers, found = loop(batches, reads)
    assert servers.lookups == list(range(len(reads)))  # of the first batch
    assert len(servers.requests) == 3
    for batch, rows in zip(batches, found, strict=True):
        for read, values in zip(reads, rows, strict=True):
            assert torch.equal(values, read(batch)[..., None].expand(*read(batch).shape, DIM).float())


def test_batches_of_other_sizes_are_read_at_the_same_places() -> None:
    reads = [lambda x: x[:, 0], lambda x: x[:, 1:]]
    servers, _ = loop([ids(size, 3, seed=size) for size in (4, 6, 1, 9)], reads)
    assert servers.lookups == [0, 1]


def test_padding_is_not_requested() -> None:
    def make(seed: int) -> Tensor:
        found = ids(4, 3, seed=seed)
        found[seed % 4, 1] = 0
        return found

    servers, found = loop([make(seed) for seed in range(4)], [lambda x: x[:, 1]], padding_idx=0)
    assert servers.lookups == [0]
    assert all(0 not in request[0] for request in servers.requests)
    assert [int((rows[0] == 0).all(1).sum()) for rows in found] == [1] * 4


def test_slots_with_rows_of_their_own_are_requested_by_their_keys() -> None:
    batches = [ids(4, 2, seed=seed) for seed in range(3)]
    servers, _ = loop(batches, [lambda x: x], num_slots=2, separate_slots=True)
    assert servers.lookups == [0]


@pytest.mark.parametrize("form", ["pair", "jagged", "keyed"])
def test_slots_of_jagged_ids_are_requested_by_their_keys(form: str) -> None:
    """The key of an id depends on the slot, and the slot on the offsets."""

    def make(seed: int) -> Any:
        bags = [ids(size, seed=seed + size) for size in (2, 0, 3, 1 + seed % 2)]
        if form == "keyed":
            return Keyed({"other": [[1]], "tags": [bag.tolist() for bag in bags]})
        if form == "jagged":
            return torch.nested.nested_tensor(bags, layout=torch.jagged)
        return torch.cat(bags), torch.tensor([0, 2, 2, 5])

    def read(batch: Any) -> tuple[Tensor, Tensor]:
        found = features_of(batch)["tags"] if form == "keyed" else jagged_ids(batch)
        return batch if found is None else (found.values, found.starts())

    servers = Servers()
    module = fleet.SparseEmbedding(DIM, name="t", num_slots=2, separate_slots=True, combiner="sum")
    servers.connect(module, 0)
    rows = BatchRows([module])
    for seed in range(4):
        batch = make(seed)
        rows.begin(batch)
        module(*read(batch))
    rows.end()
    assert servers.lookups == [0]
    assert len(servers.requests) == 3


def test_lists_of_numbers_are_not_looked_through_and_the_line_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    servers, _ = loop([[[seed, 7], [8]] for seed in range(5)], [lambda x: x], combiner="sum")
    assert not servers.requests
    assert capsys.readouterr().out.count("they are lists of Python numbers, which are not looked through") == 1


def test_a_place_that_was_right_by_chance_is_searched_anew() -> None:
    batches = [ids(4, 2, seed=seed) for seed in range(5)]
    batches[0][:, 0] = batches[0][:, 1]
    servers, found = loop(batches, [lambda x: x[:, 1]])
    assert servers.lookups == [0, 0]
    assert all(torch.equal(rows[0][:, 0], batch[:, 1].float()) for rows, batch in zip(found, batches, strict=True))
    assert servers.requests[-1] == {0: batches[-1][:, 1].tolist()}


def test_rows_that_are_too_old_are_asked_for_again() -> None:
    servers = Servers()
    servers.is_fresh = False
    module = fleet.SparseEmbedding(DIM, name="t")
    servers.connect(module, 0)
    rows = BatchRows([module])
    for seed in range(3):
        batch = ids(4, seed=seed)
        rows.begin(batch)
        assert torch.equal(module(batch)[:, 0], batch.float())
    assert servers.lookups == [0] * 3


def test_an_evaluation_in_a_training_loop_asks_the_servers() -> None:
    """Rows that are requested for a batch lack the step before it."""
    servers = Servers()
    module = fleet.SparseEmbedding(DIM, name="t")
    servers.connect(module, 0)
    rows = BatchRows([module])
    first, second, third = (ids(4, seed=seed) for seed in range(3))
    rows.begin(first, [])
    module(first)
    rows.begin(second, rows.request(second, True))
    coming = rows.request(third, True)
    with torch.no_grad():
        module(second)
        module(third)
        other = BatchRows([module])  # of a loop over other data, which has some of the same ids
        other.begin(third, [])
        module(third)
        other.end()
    assert servers.lookups == [0] * 4
    module(second)
    rows.begin(third, coming)
    module(third)
    assert servers.lookups == [0] * 4


@pytest.mark.parametrize("trained_before", [False, True])
def test_a_loop_that_only_evaluates_takes_its_rows(trained_before: bool) -> None:
    servers = Servers()
    module = fleet.SparseEmbedding(DIM, name="t")
    servers.connect(module, 0)
    rows = BatchRows([module])
    rows.begin(ids(4))
    with torch.set_grad_enabled(trained_before):
        module(ids(4))
    rows.end()
    with torch.no_grad():
        for seed in range(3):
            rows.begin(ids(4, seed=seed))
            module(ids(4, seed=seed))
    rows.end()
    assert servers.lookups == [0]
    assert len(servers.requests) == 3


def test_nothing_stays_behind_after_the_loop() -> None:
    servers = Servers()
    module = fleet.SparseEmbedding(DIM, name="t")
    servers.connect(module, 0)
    rows = BatchRows([module])
    for seed in range(5):
        batch = ids(4, seed=seed)
        rows.begin(batch)
        if seed < 2:
            module(batch)
        assert len(module.lookup._expected) <= 2
    rows.end()
    assert not module.lookup._expected
    assert module.lookup.loop is None


def test_ids_that_are_in_no_batch_are_searched_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = []
    monkeypatch.setattr("fleet.ps.embeddings.batch_rows._has", lambda *args: searched.append(1) or False)
    servers, _ = loop([ids(4, seed=seed) for seed in range(9)], [lambda x: x * 7])
    assert servers.lookups == [0] * 9
    assert len(searched) == 3


def test_a_forked_process_takes_no_rows_that_the_worker_requested() -> None:
    servers = Servers()
    module = fleet.SparseEmbedding(DIM, name="t")
    servers.connect(module, 0)
    module.prefetch(ids(4))
    module.lookup.leave()
    with pytest.raises(ConfigError, match="was forked from a worker"):
        module(ids(4))


def test_the_columns_of_a_tensor_are_copied_to_the_host_together(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = [0]
    cpu = Tensor.cpu

    def counted(tensor: Tensor) -> Tensor:
        copies[0] += 1
        return cpu(tensor)

    monkeypatch.setattr(Tensor, "cpu", counted)
    loop([ids(4, 8, seed=seed) for seed in range(6)], [lambda x, i=i: x[:, i] for i in range(8)])
    assert copies[0] == 8 + 5  # of the first batch for each lookup, whose ids are searched; of the others one
