"""Datasets in reproducible jobs: the batches of a logical worker are the same wherever it is hosted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import fleet
from fleet.errors import ConfigError, UnsupportedOptionError
from fleet.job.listener import Listeners
from fleet.job.logical_workers import LogicalWorkers
from fleet.job.running import RUNNING
from fleet.job.util import UtilBase
from fleet.training.batch_loops import BatchLoops
from tests.fleet.dataset.files import SLOTS, write_files
from tests.helpers.workers import run_workers

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

V = 4
Turns = dict[int, list[Any]]  # by logical rank: what it saw in each turn


@contextmanager
def hosting(hosts: int, host: int, rounds: int = 0) -> Iterator[LogicalWorkers]:
    """Makes this process number ``host`` of a reproducible job that has trained some rounds."""
    torch.manual_seed(5)
    logical = LogicalWorkers(V, hosts, host)
    logical.load({"seed": 5, "round": rounds})
    # One process for exchanges: where others are done first is seen by the test of two processes.
    job: Any = SimpleNamespace(logical=logical, collective=True, world_size=1, data_rank=host, data_replicas=hosts)
    job.listeners = Listeners()
    job.listeners.add(BatchLoops(job))
    role = SimpleNamespace(is_worker=lambda: True)
    session = SimpleNamespace(job=job, server_job=None, role_maker=role)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RUNNING, "session", session)
        yield logical


def values(batch: Any) -> list[Any]:
    """Returns what tells a batch from others."""
    tensor = batch if isinstance(batch, torch.Tensor) else batch["id" if "id" in batch else "label"]
    return [*tensor.flatten().tolist()]


def seen(dataset: Any, logical: LogicalWorkers, rounds: int | None = None) -> Turns:
    """Returns the batches of each logical worker, and what it draws; leaves the loop after some rounds."""
    found: Turns = {rank: [] for rank in logical.ranks}
    begun = logical.round
    if rounds == 0:
        return found
    for batch in dataset:
        found[logical.rank].append((values(batch), float(torch.rand(()))))
        if logical.is_last and logical.round + 1 - begun == rounds:
            break
    return found


def parquet_files(folder: Path) -> Path:
    for file in range(3):
        ids = np.arange(file * 37, file * 37 + 37)
        pq.write_table(pa.table({"id": ids}), folder / f"{file}.parquet", row_group_size=7)
    return folder


def parquet_data(folder: Path, **options: Any) -> fleet.ParquetDataset:
    return fleet.ParquetDataset(folder, columns=["id"], batch_size=3, shuffle_seed=2, **options)


def events(partition: int, start: int) -> Iterator[tuple[int, float]]:
    return ((offset, 100.0 * partition + offset) for offset in range(start, 20 + 3 * partition))


def stream_data(folder: Path) -> fleet.StreamDataset:
    def parse(record: float) -> float | None:
        return None if record % 5 == 1 else record + float(torch.rand(()))

    return fleet.StreamDataset(events, parse, batch_size=3, partitions=V + 2)


def queue_data(folder: Path) -> fleet.QueueDataset:
    dataset = fleet.QueueDataset()
    dataset.init(use_var=SLOTS, batch_size=3)
    dataset.set_filelist(text_files(folder))
    return dataset


def memory_data(folder: Path) -> fleet.InMemoryDataset:
    dataset = fleet.InMemoryDataset()
    dataset.init(use_var=SLOTS, batch_size=3, thread_num=2)
    dataset.set_filelist(text_files(folder))
    dataset.load_into_memory(is_shuffle=True)
    return dataset


def text_files(folder: Path) -> list[str]:
    return write_files(folder, [11, 9, 8, 12, 14, 11])


MADE: list[Callable[[Path], Any]] = [
    parquet_data,
    lambda folder: parquet_data(folder, rest="drop", drop_last=True),
    stream_data,
    queue_data,
    memory_data,
]
ROUNDS = [10, 9, 7, 4, 4]  # of 111 rows: 28 a worker, or 27; the others: the shortest logical worker decides
NAMES = ["parquet", "parquet-drop", "stream", "queue", "memory"]


@pytest.mark.parametrize(("make", "rounds"), [*zip(MADE, ROUNDS, strict=True)], ids=NAMES)
def test_batches_of_a_logical_worker_are_the_same_on_any_number_of_processes(
    make: Callable[[Path], Any], rounds: int, tmp_path: Path
) -> None:
    parquet_files(tmp_path)
    with hosting(1, 0) as logical:
        whole = seen(make(tmp_path), logical)
        assert logical.round == rounds
        between = float(torch.rand(()))
    assert [len(turns) for turns in whole.values()] == [rounds] * V
    given = [value for turns in whole.values() for batch, _ in turns for value in batch]
    assert len({draw for turns in whole.values() for _, draw in turns}) == rounds * V
    if make is not parquet_data:
        assert len(set(given)) == len(given)
    if make is stream_data:
        assert len({value % 1 for value in given}) == len(given)  # no two batches have the same noise
    for hosts in (2, 3, 4):
        found: Turns = {}
        for host in range(hosts):
            with hosting(hosts, host) as logical:
                found |= seen(make(tmp_path), logical, rounds)
                assert list(logical.ranks) == [rank for rank in found if rank in logical.ranks]
        assert found == whole
    with hosting(4, 0) as logical:
        seen(make(tmp_path), logical)
        if logical.round == rounds:  # logical worker 0 is not the only one that ends there
            assert float(torch.rand(())) == between


@pytest.mark.parametrize("make", MADE[:3], ids=NAMES[:3])
@pytest.mark.parametrize("stops", [(0, 3, 5), (4, 1, 9), (2, 7, 9)])
def test_another_number_of_processes_goes_on(
    make: Callable[[Path], Any], stops: tuple[int, ...], tmp_path: Path
) -> None:
    """On 2, 3, 1 and 4 processes, each for some rounds; the rounds are those of one process that was never stopped."""
    parquet_files(tmp_path)
    with hosting(1, 0) as logical:
        whole = seen(make(tmp_path), logical)
    total = len(whole[0])
    found: Turns = {rank: [] for rank in range(V)}
    state: Any = None
    done = 0
    for hosts, stop in zip((2, 3, 1, 4), (*(min(stop, total) for stop in stops), total), strict=True):
        states = []
        for host in range(hosts):
            with hosting(hosts, host, rounds=done) as logical:
                dataset = make(tmp_path)
                if state is not None:
                    dataset.load_state_dict(state)
                for rank, turns in seen(dataset, logical, max(stop - done, 0)).items():
                    found[rank] += turns
                states.append(dataset.state_dict())
        state = type(dataset).joined_states(states)
        done = max(stop, done)
    assert found == whole
    with hosting(1, 0, rounds=done) as logical:
        dataset = make(tmp_path)
        dataset.load_state_dict(state)
        assert not any(seen(dataset, logical).values())


def test_a_state_before_the_first_batch_keeps_the_position(tmp_path: Path) -> None:
    parquet_files(tmp_path)
    for make in MADE[:3]:
        with hosting(2, 0) as logical:
            dataset = make(tmp_path)
            seen(dataset, logical, 2)
            state = dataset.state_dict()
            again = make(tmp_path)
            again.load_state_dict(state)
            assert again.state_dict() == state


def test_the_next_epoch_and_a_loop_that_was_left_go_on(tmp_path: Path) -> None:
    parquet_files(tmp_path)
    with hosting(2, 1) as logical:
        dataset = parquet_data(tmp_path)
        first = seen(dataset, logical)
        dataset.set_epoch(1)
        second = seen(dataset, logical)
        assert [batch for batch, _ in second[2]] != [batch for batch, _ in first[2]]
    with hosting(2, 1) as logical:
        dataset = parquet_data(tmp_path)
        parts = [seen(dataset, logical, 4), seen(dataset, logical)]
        assert {rank: parts[0][rank] + parts[1][rank] for rank in first} == first
        state = dataset.state_dict()
    with hosting(1, 0) as logical:  # another number of logical workers, or none, takes what is left of the rows
        finished = parquet_data(tmp_path)
        finished.load_state_dict({**state, "logical": {**state["logical"], "workers": V + 1}})
        assert not any(seen(finished, logical).values())


def test_shuffles_follow_from_seed_round_and_rank(tmp_path: Path) -> None:
    def order(hosts: int, host: int, rounds: int, shuffles: int = 1, seed: int = 5) -> list[Any]:
        with hosting(hosts, host, rounds) as logical:
            torch.manual_seed(seed)
            dataset = memory_data(tmp_path)
            for _ in range(shuffles):
                dataset.local_shuffle()
            return [batch for batch, _ in seen(dataset, logical)[2]]

    expected = order(1, 0, rounds=8)
    assert order(3, 1, rounds=8, shuffles=3)[: len(expected)] == expected
    assert order(1, 0, rounds=4) != expected
    assert order(1, 0, rounds=8, seed=6) != expected


def test_evaluation_between_two_updates_of_a_loop(tmp_path: Path) -> None:
    parquet_files(tmp_path)
    with hosting(2, 0) as logical:
        dataset = parquet_data(tmp_path)
        held_out = parquet_data(tmp_path, rest="drop")
        ranks = []
        for batch in dataset:
            ranks.append((logical.rank, values(batch)))
            if logical.is_last and len(ranks) in (4, 8):
                assert all(len(turns) for turns in seen(held_out, logical).values())
    with hosting(2, 0) as logical:
        alone = [(logical.rank, values(batch)) for batch in parquet_data(tmp_path)]
    assert ranks == alone


def test_a_loop_that_was_left_in_the_middle_of_an_update_is_named(tmp_path: Path) -> None:
    parquet_files(tmp_path)
    with hosting(2, 0):
        dataset = parquet_data(tmp_path)
        next(iter(dataset))
        with pytest.raises(ConfigError, match="was left after 1 of 2 batches of an update"):
            next(iter(dataset))


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda folder: parquet_data(folder, rest="uneven"), ConfigError, "rest='uneven'.*rest='repeat' or"),
        (lambda folder: fleet.StreamDataset(events, float, batch_size=3), ConfigError, "1 partitions and the job 4 l"),
        (lambda folder: fleet.StreamDataset(events, float, batch_size=3, partitions=4, max_wait_s=1.0), ConfigError,
         r"max_wait_s=1.0\) with 'reproducible'.*when events come. Leave it out"),
        (lambda folder: fleet.StreamDataset(events, float, batch_size=3, partitions=4, ahead=1), ConfigError,
         r"ahead=1\) with 'reproducible'"),
        (lambda folder: _with_threads(queue_data(folder)), ConfigError, "thread_num=2.*Set thread_num=1"),
        (lambda folder: memory_data(folder).global_shuffle(), UnsupportedOptionError, "global_shuffle.*local_shuffle"),
        (lambda folder: memory_data(folder).slots_shuffle([]), UnsupportedOptionError, "slots_shuffle.*'reproducible'"),
    ],
)  # fmt: skip
def test_what_depends_on_the_processes_is_refused_before_the_first_batch(
    make: Any, error: type[Exception], words: str, tmp_path: Path
) -> None:
    parquet_files(tmp_path)
    with hosting(2, 0) as logical, pytest.raises(error, match=words):
        seen(make(tmp_path), logical)
    assert not logical.is_open


def _with_threads(dataset: fleet.QueueDataset) -> fleet.QueueDataset:
    dataset.set_thread(2)
    return dataset


def test_samples_that_were_loaded_before_the_option_are_refused(tmp_path: Path) -> None:
    dataset = memory_data(tmp_path)
    with hosting(2, 0) as logical:
        with pytest.raises(ConfigError, match="loaded before 'reproducible' was on"):
            seen(dataset, logical)
        with pytest.raises(ConfigError, match="Call load_into_memory"):
            dataset.local_shuffle()


def test_a_file_shard_is_that_of_the_logical_worker_whose_turn_it_is() -> None:
    files = ["a", "b", "c", "d", "e"]
    with hosting(2, 1) as logical:
        job: Any = SimpleNamespace(logical=logical, record=SimpleNamespace(kind=None))
        util = UtilBase(job)
        with pytest.raises(ConfigError, match="no logical worker has its turn.*set_filelist"):
            util.get_file_shard(files)
        shards = []
        for _ in logical.ranks:
            logical.begin_turn(None)
            shards.append(util.get_file_shard(files))
            logical.end_turn()
    assert shards == [["d"], ["e"]]


# ---- whole jobs ------------------------------------------------------------------------------------------------------


def _train(rank: int, size: int, folder: str, kind: str, stop: int) -> tuple[str, int, list[list[Any]]]:
    """Trains up to update ``stop``; returns bits of the weights, the updates, and the batches of this process."""
    strategy = fleet.DistributedStrategy()
    strategy.reproducible = True
    strategy.reproducible_configs = {"logical_workers": V}
    torch.manual_seed(3)
    fleet.init(is_collective=True, strategy=strategy)
    model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), 0.01))
    model = fleet.distributed_model(model)
    dataset = MADE[NAMES.index(kind)](Path(folder))
    has_position = hasattr(dataset, "state_dict")
    saves = f"{folder}/saves-{size if stop > 50 else 'shared'}"
    checkpoint = fleet.elastic.Checkpoint(
        saves, model, optimizer, data=dataset if has_position else None, every=int(has_position)
    )
    if has_position:
        checkpoint.resume()
    batches = []
    for batch in dataset:
        batches.append(values(batch))
        x = torch.tensor(batches[-1], dtype=torch.float32)[:, None] / 100
        loss = (model(x) - torch.randn_like(x)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if fleet.update_loss(loss) is not None and checkpoint.step == stop:
            break
    if has_position:
        checkpoint.close()
    # A loop that has ended leaves all processes with the same random numbers.
    tensors = [*model.state_dict().values(), torch.rand(2)]
    bits = "".join(tensor.numpy().tobytes().hex() for tensor in tensors)
    return bits, checkpoint.step, batches


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["parquet", "stream", "queue", "memory"])
def test_jobs_of_one_and_two_processes_have_the_same_bits(kind: str, tmp_path: Path) -> None:
    """Uneven shards: the loop ends on both processes with the shortest logical worker."""
    parquet_files(tmp_path)
    text_files(tmp_path)
    [(bits, updates, batches)] = run_workers(_train, 1, str(tmp_path), kind, 100, backend=None)
    assert updates == ROUNDS[NAMES.index(kind)]
    pair = run_workers(_train, 2, str(tmp_path), kind, 100, backend=None)
    assert [(found, at) for found, at, _ in pair] == [(bits, updates)] * 2
    own = [batches[at : at + 2] for at in range(0, len(batches), 2)]
    assert [pair[0][2], pair[1][2]] == [[b for two in own[host::2] for b in two] for host in (0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["parquet", "stream"])
def test_a_job_goes_on_with_other_numbers_of_processes(kind: str, tmp_path: Path) -> None:
    parquet_files(tmp_path)
    [(bits, updates, _)] = run_workers(_train, 1, str(tmp_path), kind, 100, backend=None)
    for size, stop in ((2, 2), (3, 3), (1, 50)):
        found = run_workers(_train, size, str(tmp_path), kind, stop, backend=None)
    assert found[0][:2] == (bits, updates)


def _other_files(rank: int, size: int, folder: str) -> str:
    strategy = fleet.DistributedStrategy()
    strategy.reproducible = True
    fleet.init(is_collective=True, strategy=strategy)
    dataset = queue_data(Path(folder))
    dataset.set_filelist(dataset.filelist[rank:])
    try:
        next(iter(dataset))
    except ConfigError as error:
        return f"{error}"
    return ""


@pytest.mark.slow
def test_files_of_one_process_alone_are_refused(tmp_path: Path) -> None:
    text_files(tmp_path)
    for said in run_workers(_other_files, 2, str(tmp_path), backend=None):
        assert "workers [1] have other files than worker 0" in said
        assert "set_filelist(files)" in said
