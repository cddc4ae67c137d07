"""ParquetDataset: each row once, bags, nulls, refusals, and going on in the middle."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fleet
from fleet.dataset import parquet, workers
from fleet.errors import CheckpointError, ConfigError
from tests.helpers.workers import run_workers
from tests.launch.launcher import Launcher

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows")
    for file in range(2):
        ids = np.arange(file * 40, file * 40 + 40)
        bags = [list(range(i, i + i % 3)) for i in ids]
        pq.write_table(pa.table({"id": ids, "x": ids / 2, "bag": bags}), path / f"{file}.parquet", row_group_size=7)
    return path


def _on(monkeypatch, rank, size, server_job=None):
    loops = SimpleNamespace(over=lambda data, batches: batches)
    listeners = SimpleNamespace(get=lambda kind: loops)
    job = SimpleNamespace(listeners=listeners, data_rank=rank, data_replicas=size, logical=None)
    session = SimpleNamespace(server_job=server_job, job=job)
    for module in (parquet, workers):
        monkeypatch.setattr(module, "running_session", lambda: session)


def _ids(batches):
    return [i for batch in batches for i in batch["id"].tolist()]


@pytest.mark.parametrize("size", [3, 32])
def test_reads_columns_and_bags_in_order(folder, size):
    """Batches within a row group of 7, and over several."""
    batches = list(fleet.ParquetDataset(folder, batch_size=size))
    assert [len(batch["id"]) for batch in batches] == [size] * (80 // size) + [80 % size]
    assert _ids(batches) == list(range(80))
    for batch in batches:
        ends = [*batch["bag.offsets"].tolist(), len(batch["bag"])]
        bags = [batch["bag"][a:b].tolist() for a, b in zip(ends[:-1], ends[1:], strict=True)]
        assert bags == [list(range(i, i + i % 3)) for i in batch["id"].tolist()]
        assert torch.equal(batch["x"], batch["id"] / 2.0)
    pooled = torch.nn.EmbeddingBag(100, 2)(batches[0]["bag"], batches[0]["bag.offsets"])
    assert pooled.shape == (size, 2)


@pytest.mark.slow
def test_a_bag_goes_into_a_sparse_embedding(folder):
    embedding = fleet.SparseEmbedding(2, combiner="sum", name="parquet_bags")
    batch = next(iter(fleet.ParquetDataset(folder, columns=["bag"], batch_size=9)))
    assert set(batch) == {"bag", "bag.offsets"}
    assert embedding(batch["bag"], batch["bag.offsets"]).shape == (9, 2)


def test_epochs_shuffle_all_rows_reproducibly(folder):
    dataset = fleet.ParquetDataset(f"{folder}/*.parquet", columns=["id"], batch_size=16, shuffle_seed=3)
    first = _ids(dataset)
    assert first == _ids(dataset)
    dataset.set_epoch(1)
    second = _ids(dataset)
    assert first != second
    assert sorted(first) == sorted(second) == list(range(80))


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 7), st.integers(1, 7), st.integers(0, 4), st.integers(1, 9), st.sampled_from(["uneven", "repeat"])
)
def test_resumes_on_another_number_of_workers(folder, before, after, steps, batch_size, rest):
    def new():
        return fleet.ParquetDataset(folder, columns=["id"], batch_size=batch_size, shuffle_seed=5, rest=rest)

    with pytest.MonkeyPatch.context() as patch:
        seen, states = [], []
        for rank in range(before):
            _on(patch, rank, before)
            dataset = new()
            seen += _ids(batch for batch, _ in zip(dataset, range(steps), strict=False)) if steps else []
            if steps:
                dataset = new()
                batches = iter(dataset)
                for _ in range(steps):
                    next(batches, None)
                states.append(dataset.state_dict())
            else:
                states.append(dataset.state_dict())
        if rest == "repeat":
            assert all(state == states[0] for state in states)
        counts = []
        longest = max(states, key=lambda state: -sum(b - a for a, b in state["remaining"]))
        for rank in range(after):
            _on(patch, rank, after)
            dataset = new()
            dataset.load_state_dict(longest)
            ids = _ids(dataset)
            counts.append(len(ids))
            seen += ids
    assert set(seen) == set(range(80))
    assert max(counts) - min(counts) <= (rest == "uneven")
    if rest == "uneven":
        assert len(seen) == 80


def test_a_finished_epoch_stays_finished_when_resumed(folder):
    dataset = fleet.ParquetDataset(folder, batch_size=32, drop_last=True)
    assert len(_ids(dataset)) == 64
    state = dataset.state_dict()
    again = fleet.ParquetDataset(folder, batch_size=32, drop_last=True)
    again.load_state_dict(state)
    assert _ids(again) == []
    again.set_epoch(1)
    assert len(_ids(again)) == 64


def test_a_state_of_other_files_is_refused(folder):
    state = fleet.ParquetDataset(folder, batch_size=4).state_dict()
    with pytest.raises(CheckpointError, match="12 row groups with 80 rows"):
        fleet.ParquetDataset(folder / "0.parquet", batch_size=4).load_state_dict(state)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"columns": ["idd"]}, r"no \['idd'\]. It has \['id', 'x', 'bag'\]"),
        ({"columns": "id"}, "a list of names"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"rest": "pad"}, "rest='pad'"),
        ({"fill": 0.5}, "fill=0.5"),
        ({"shuffle_seed": -1}, "shuffle_seed=-1"),
        ({"drop_last": 1}, "drop_last=1"),
    ],
)
def test_wrong_arguments_are_refused(folder, arguments, said):
    with pytest.raises(ConfigError, match=said):
        fleet.ParquetDataset(folder, **{"batch_size": 4, **arguments})


def _own_states(patch, folder, counts, rest):
    """Returns the ids and the state of each worker of a job with servers that has taken ``counts`` batches of 4."""
    found = []
    for rank, count in enumerate(counts):
        _on(patch, rank, len(counts), server_job=object())
        dataset = fleet.ParquetDataset(folder, columns=["id"], batch_size=4, shuffle_seed=5, rest=rest)
        found.append((_ids(batch for _, batch in zip(range(count), dataset, strict=False)), dataset.state_dict()))
    return found


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=2, max_size=5), st.integers(1, 5), st.sampled_from(["uneven", None]))
def test_workers_of_different_pace_go_on(folder, counts, after, rest):
    with pytest.MonkeyPatch.context() as patch:
        before = _own_states(patch, folder, counts, rest)
        states = [state for _, state in before]
        seen = [i for ids, _ in before for i in ids]
        if after != len(counts):
            states = [fleet.ParquetDataset.joined_states(states)] * after
        for rank, state in enumerate(states):
            _on(patch, rank, after, server_job=object())
            dataset = fleet.ParquetDataset(folder, columns=["id"], batch_size=3, shuffle_seed=5, rest=rest)
            dataset.load_state_dict(state)
            seen += _ids(dataset)
    assert sorted(seen) == list(range(80))


def test_the_state_of_another_worker_is_refused(folder, monkeypatch):
    states = [state for _, state in _own_states(monkeypatch, folder, [1, 3], None)]
    dataset = fleet.ParquetDataset(folder, columns=["id"], batch_size=4, shuffle_seed=5)
    with pytest.raises(CheckpointError, match="that of worker 0 of 2, and this is worker 1 of 2.*at their own pace"):
        dataset.load_state_dict(states[0])
    dataset.load_state_dict(states[1])
    with pytest.raises(
        CheckpointError, match=r"one state of each worker.*workers \(rank, number\) \[\(0, 2\), \(0, 2\)\]"
    ):
        fleet.ParquetDataset.joined_states([states[0], {**states[1], "worker": [0, 2]}])
    with pytest.raises(CheckpointError, match=r"epochs \[0, 1\]"):
        fleet.ParquetDataset.joined_states([states[0], {**states[1], "epoch": 1}])
    with pytest.raises(CheckpointError, match=r"got the keys \['done'\]"):
        dataset.load_state_dict({"done": 3})


def test_the_next_epoch_begins_beside_the_present_one(folder):
    dataset = fleet.ParquetDataset(folder, columns=["id"], batch_size=3, shuffle_seed=5, threads=1)
    batches = iter(dataset)
    ids = next(batches)["id"].tolist()
    dataset.set_epoch(1)
    ids += _ids(batches)
    assert sorted(ids) == list(range(80))
    whole = fleet.ParquetDataset(folder, columns=["id"], batch_size=80, shuffle_seed=5)
    assert ids == _ids(whole)


def test_a_second_loop_ends_the_first(folder):
    dataset = fleet.ParquetDataset(folder, columns=["id"], batch_size=40)
    first, second = iter(dataset), iter(dataset)
    assert _ids([next(first), next(second)]) == list(range(80))
    with pytest.raises(ConfigError, match="another loop over it has begun"):
        next(first)
    assert list(second) == []


def _train(rank, size, rows, saves, steps):
    fleet.init(is_collective=True)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    dataset = fleet.ParquetDataset(rows, columns=["id"], batch_size=5, shuffle_seed=1)
    checkpoint = fleet.elastic.Checkpoint(saves, model, optimizer, data=dataset)
    checkpoint.resume()
    batches = iter(dataset)
    ids = [i for batch, _ in zip(batches, range(steps), strict=False) for i in batch["id"].tolist()]
    return ids, dataset.state_dict()


def _train_and_save(rank, size, rows, saves):
    fleet.init(is_collective=True)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    dataset = fleet.ParquetDataset(rows, columns=["id"], batch_size=5, shuffle_seed=1)
    batches = iter(dataset)
    ids = _ids([next(batches), next(batches), next(batches)])
    fleet.elastic.Checkpoint(saves, model, optimizer, data=dataset).save()
    return ids


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 3])
def test_a_job_of_two_goes_on_with_another_number(folder, tmp_path, size):
    saves = str(tmp_path / "saves")
    before = [i for ids in run_workers(_train_and_save, 2, str(folder), saves, backend=None) for i in ids]
    after = [i for ids, _ in run_workers(_train, size, str(folder), saves, 100, backend=None) for i in ids]
    assert len(before) == 30
    assert set(before) | set(after) == set(range(80))
    assert len(before) + len(after) == 80 + (-50 % size)


def _clicks(folder, rows=50):
    """Writes text in each of its forms, with nulls, over two row groups; returns the same rows as lists."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(5)
    site = [None if i % 7 == 0 else f"s{rng.integers(9)}" for i in range(rows)]
    tags = [[f"t{tag}" for tag in rng.integers(0, 5, rng.integers(0, 4))] for _ in range(rows)]
    price = rng.exponential(9, rows).astype(np.float32)
    table = pa.table(
        {
            "site": pa.array(site),
            "kind": pa.array([f"k{i % 3}" for i in range(rows)]).dictionary_encode(),
            "tags": pa.array(tags, pa.list_(pa.large_string())),
            "price": price,
            "label": [i % 2 for i in range(rows)],
        }
    )
    pq.write_table(table, folder / "clicks.parquet", row_group_size=rows // 2 + 3)
    return {"site": [one or "" for one in site], "kind": table["kind"].to_pylist(), "tags": tags, "price": price}


@pytest.mark.parametrize("seed", [None, 3])
def test_transforms_of_text_bags_and_numbers(tmp_path, seed):
    """A batch is what the transforms make of the same rows, bit for bit; a service sends such rows."""
    from fleet.features import Cross, Hash, Log, Transforms, Vocabulary

    rows = _clicks(tmp_path)
    transforms = Transforms(
        [
            Hash("site"),
            Vocabulary("kind", ["k1", "k0"]),
            Hash("tags", num_buckets=1000),
            Cross(["site", "tags"], out="site_by_tag"),
            Log("price", out="log_price"),
        ]
    )
    columns = ["label", "price", "site"]
    data = fleet.ParquetDataset(
        tmp_path, columns=columns, batch_size=8, shuffle_seed=seed, fill=0, transforms=transforms
    )
    ends = np.cumsum([0, *map(len, rows["tags"])])
    flat = [tag for bag in rows["tags"] for tag in bag]
    whole = transforms({**rows, "tags": flat, "tags.offsets": ends[:-1]})
    found = list(data)
    assert set(found[0]) == {
        *("label", "price", "site", "kind", "tags", "tags.offsets", "site_by_tag", "site_by_tag.offsets", "log_price")
    }
    by_price = {float(price): row for row, price in enumerate(rows["price"])}
    places = [by_price[float(price)] for batch in found for price in batch["price"]]
    assert sorted(places) == list(range(50))
    for name in ("site", "kind", "log_price"):
        assert torch.cat([batch[name] for batch in found]).tolist() == whole[name][places].tolist()
    for name in ("tags", "site_by_tag"):
        bags = np.split(whole[name], ends[1:-1])
        expected = [number for place in places for number in bags[place]]
        assert torch.cat([batch[name] for batch in found]).tolist() == expected
    assert (
        found[0]["tags.offsets"].tolist()
        == np.cumsum([0, *(len(rows["tags"][place]) for place in places[:7])]).tolist()
    )


def test_transforms_that_do_not_fit_the_files(tmp_path):
    from fleet.errors import FleetError
    from fleet.features import Hash, Log, Transforms

    _clicks(tmp_path)
    for transforms, said in (
        (Transforms([Log("site")]), "reads int or float; column 'site' is text"),
        (Transforms([Hash("page")]), "has no .'page'."),
        (Transforms([Hash("kind", out="label")]), "the batch has a column 'label'"),
        ([Hash("kind")], "it is a fleet.features.Transforms"),
    ):
        with pytest.raises(ConfigError, match=said):
            fleet.ParquetDataset(tmp_path, columns=["label"], batch_size=2, transforms=transforms)
    with pytest.raises(ConfigError, match="make ids of text with transforms="):
        fleet.ParquetDataset(tmp_path, columns=["site"], batch_size=2)
    with pytest.raises(FleetError, match="column 'site' of .* holds nulls"):
        list(fleet.ParquetDataset(tmp_path, columns=["label"], batch_size=2, transforms=Transforms([Hash("site")])))


TRAIN = """
import os, signal, sys
import torch
from fleet import fleet

fleet.init()


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = fleet.SparseEmbedding(1, initializer=fleet.ps.Initializer("constant", 0.0))

    def forward(self, ids):
        return self.rows(ids)


strategy = fleet.DistributedStrategy()
strategy.a_sync = True
model = Model()
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), strategy)
model = fleet.distributed_model(model)
if fleet.is_server():
    fleet.init_server()
    fleet.run_server()
else:
    dataset = fleet.ParquetDataset(sys.argv[1], columns=["id"], batch_size=2, shuffle_seed=0)
    checkpoint = fleet.elastic.Checkpoint("saves", model, optimizer, data=dataset, every=4)
    checkpoint.resume()
    fleet.init_worker()
    for batch in dataset:
        (-model(batch["id"])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if fleet.worker_index() == 1 and checkpoint.step == 10 and not os.path.exists("killed"):
            open("killed", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
    fleet.barrier_worker()
    if fleet.is_first_worker():
        torch.save(model.rows.lookup_rows(torch.arange(80)).detach().reshape(80), "after.pt")
    fleet.stop_worker()
"""


@pytest.mark.slow
def test_a_job_with_servers_trains_each_row_once_although_a_worker_is_killed(folder, tmp_path):
    """Issue 14.2: worker 0 ends at its next save with the restarted one; both resume from the checkpoint of step 8."""
    options = ["--server_num=1", "--worker_num=2", "--max_restart=4"]
    with Launcher(tmp_path, TRAIN, *options, args=[str(folder)]) as job:
        assert job.wait(120.0) == 0, job.stderr
    assert (tmp_path / "killed").exists()
    assert torch.load(tmp_path / "after.pt").tolist() == [1.0] * 80
