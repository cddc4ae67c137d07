"""StreamDataset: batches, waits, states, refusals; with servers each event is trained once, whatever is killed."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import fleet
from fleet.errors import CheckpointError, ConfigError, FleetError
from tests.helpers.hand_started import HandStarted
from tests.helpers.workers import run_workers
from tests.launch.launcher import Launcher


def numbers(partition: int, start: int):
    return ((offset, 10 * offset + partition) for offset in range(start, 5))


def stream(source=numbers, parse=int, batch_size=2, **settings):
    return fleet.StreamDataset(source, parse, batch_size=batch_size, **settings)


def lists(dataset) -> list[list[int]]:
    return [batch.tolist() for batch in dataset]


def test_batches_follow_the_stream_and_the_last_is_short() -> None:
    assert lists(stream()) == [[0, 10], [20, 30], [40]]
    assert lists(DataLoader(stream(), batch_size=None)) == [[0, 10], [20, 30], [40]]


def test_a_second_loop_goes_on_where_the_first_was_left() -> None:
    dataset = stream()
    assert next(iter(dataset)).tolist() == [0, 10]
    assert lists(dataset) == [[20, 30], [40]]


def test_records_that_parse_leaves_out_are_passed_over_and_count() -> None:
    dataset = stream(parse=lambda record: None if record % 20 else record)
    assert lists(dataset) == [[0, 20], [40]]
    assert dataset.state_dict() == {"name": "stream", "positions": {"0": 5}}


def test_a_state_goes_on_after_the_batches_that_were_given() -> None:
    dataset = stream(name="n")
    next(iter(dataset))
    again = stream(name="n")
    again.load_state_dict(dataset.state_dict())
    assert lists(again) == [[20, 30], [40]]
    with pytest.raises(ConfigError, match="comes before the first batch"):
        again.load_state_dict(dataset.state_dict())
    with pytest.raises(CheckpointError, match="state is of stream 'n', this is 'stream'"):
        stream().load_state_dict(dataset.state_dict())


def test_with_ahead_the_batches_that_the_loop_holds_do_not_count() -> None:
    dataset = stream(ahead=1)
    batches = iter(dataset)
    next(batches)
    assert dataset.state_dict()["positions"] == {}
    next(batches)
    assert dataset.state_dict()["positions"] == {"0": 2}


def test_states_of_all_workers_join() -> None:
    states = [{"name": "n", "positions": {"0": 4}}, {"name": "n", "positions": {"1": 7}}]
    assert fleet.StreamDataset.joined_states(states) == {"name": "n", "positions": {"0": 4, "1": 7}}


def endless(partition: int, start: int):
    yield from ((offset, offset) for offset in range(start, 3))
    while True:
        yield None


def test_a_batch_that_has_begun_waits_for_max_wait_s_and_the_stream_for_timeout_s() -> None:
    dataset = stream(endless, max_wait_s=0.2, timeout_s=0.4)
    began = time.monotonic()
    assert lists(dataset) == [[0, 1], [2]]
    assert time.monotonic() - began < 20


def test_offsets_must_ascend() -> None:
    with pytest.raises(ConfigError, match="partition 0: the source gave offset 3 where 4 or a higher one is due"):
        lists(stream(lambda partition, start: iter([(3, 1), (3, 2)])))
    with pytest.raises(ConfigError, match="gave offset 'a'"):
        lists(stream(lambda partition, start: iter([("a", 1)])))


def test_a_record_that_cannot_be_parsed_is_named() -> None:
    with pytest.raises(FleetError, match="stream 'stream', partition 0, offset 0: parse raised ZeroDivisionError"):
        lists(stream(parse=lambda record: 1 // record))


def test_loader_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleet.dataset.stream.get_worker_info", lambda: "of a process of DataLoader(num_workers=1)")
    with pytest.raises(ConfigError, match="num_workers=0"):
        next(iter(stream()))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": True}, "batch_size=True"),
        ({"ahead": -1}, "ahead=-1"),
        ({"max_wait_s": 0}, "max_wait_s=0"),
        ({"timeout_s": "1"}, "timeout_s='1'"),
        ({"parse": 3}, "parse=3"),
        ({"collate": None}, "collate=None"),
        ({"source": [1, 2]}, "a source is"),
        ({"partitions": 0}, "partitions=0"),
    ],
)
def test_wrong_arguments_are_refused(settings, words) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        stream(**settings)


def gappy(partition: int, start: int):
    return ((offset, offset) for offset in (0, 1, 4, 5, 8, 9) if offset >= start)


def test_a_batch_that_some_servers_have_is_formed_from_its_events_again() -> None:
    """The log has lost offsets, the last one of the batch among them; later events stay for the next batch."""
    dataset = stream(gappy, batch_size=4)
    dataset._begin()
    dataset._again.append({0: 8})
    assert lists(dataset) == [[0, 1, 4, 5], [8, 9]]


def test_a_stream_that_ends_before_such_a_batch_is_another_one() -> None:
    dataset = stream(gappy)
    dataset._begin()
    dataset._again.append({0: 80})
    with pytest.raises(CheckpointError, match="ends before the offsets {0: 80} that the servers have"):
        lists(dataset)


def test_waiting_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("fleet.dataset.stream._SAY_EVERY_S", 0.0)
    with caplog.at_level("INFO", logger="FLEET"):
        assert lists(stream(endless, batch_size=3, timeout_s=0.3)) == [[0, 1, 2]]
    assert "stream 'stream': no event for 0 s in partitions [0]; still waiting" in caplog.text


EVENTS = 40


def many(partition: int, start: int):
    return ((offset, 100 * partition + offset) for offset in range(start, EVENTS))


def read_some(rank: int, world_size: int, folder: str, batches: int) -> list[int]:
    """Resumes, trains on some batches, saves; returns the events."""
    fleet.fleet.init(is_collective=True)
    net = torch.nn.Linear(1, 1)
    optimizer = fleet.fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.0))
    model = fleet.fleet.distributed_model(net)
    dataset = stream(many, batch_size=4, partitions=6, name="events")
    checkpoint = fleet.elastic.Checkpoint(folder, model, optimizer, data=dataset)
    checkpoint.resume()
    seen: list[int] = []
    for batch in itertools.islice(dataset, batches):
        model(batch[:, None].float()).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen += batch.tolist()
    checkpoint.save()
    checkpoint.close()
    return seen


def test_any_number_of_workers_resumes_a_checkpoint(tmp_path: Path) -> None:
    """Issue 14.2: partitions are divided anew, each goes on behind its last event."""
    seen = [
        event
        for workers, batches in ((2, 5), (3, 4), (1, 38))
        for found in run_workers(read_some, workers, str(tmp_path), batches)
        for event in found
    ]
    assert sorted(seen) == sorted(100 * partition + offset for partition in range(6) for offset in range(EVENTS))


TRAIN = """
import os, pathlib, random, signal, sys, threading, time
import torch
from fleet import fleet

KILLS, EVENTS, PARTITIONS = int(sys.argv[1]), int(sys.argv[2]), 4

def die_some_day():
    # Each process takes one of the kills, as long as there are any left.
    for number in range(KILLS):
        try:
            os.open(f"kill-{number}", os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            continue
        time.sleep(random.Random(number).uniform(0.05, 0.6))
        os.kill(os.getpid(), signal.SIGKILL)
        return

fleet.init()

def events(partition, start):
    for offset in range(start, EVENTS):
        yield offset, (offset * 7 + partition) % 50
        if offset % 64 == 0:
            time.sleep(0.002)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = fleet.SparseEmbedding(1, initializer=fleet.ps.Initializer("constant", 0.0))
        self.seen = torch.nn.Parameter(torch.zeros(3))  # counts all events: dense parameters lie on both servers
    def forward(self, ids):
        return self.rows(ids).sum() + self.seen.sum() * len(ids)
model = Model()
strategy = fleet.DistributedStrategy()
strategy.a_sync = sys.argv[3] != "sync"
if sys.argv[3] == "stale":
    strategy.a_sync_configs = {"max_staleness": 2}
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), strategy)
model = fleet.distributed_model(model)
if fleet.is_server():
    fleet.init_server()
    threading.Thread(target=die_some_day, daemon=True).start()
    fleet.run_server()
else:
    fleet.init_worker()
    threading.Thread(target=die_some_day, daemon=True).start()
    dataset = fleet.StreamDataset(events, int, batch_size=32, partitions=PARTITIONS, name="clicks")
    for ids in dataset:
        # The mean over the workers of sync mode divides by their number.
        loss = -model(ids) * (fleet.worker_num() if sys.argv[3] == "sync" else 1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    fleet.save_persistables("model")  # every worker's queues are empty now
    if fleet.is_first_worker():
        optimizer.state_dict()  # takes the servers' parameters
        rows = model.module.rows.lookup_rows(torch.arange(50))
        torch.save({"rows": rows.reshape(50), "seen": model.module.seen.detach()}, "after.pt")
    fleet.stop_worker()
"""


def check_counts(tmp_path: Path, events: int) -> None:
    """Compares each row with the number of its events; a lost or repeated one shows."""
    counted = torch.zeros(50)
    for partition in range(4):
        for offset in range(events):
            counted[(offset * 7 + partition) % 50] += 1
    found = torch.load(tmp_path / "after.pt")
    assert torch.equal(found["rows"], counted)
    assert found["seen"].tolist() == [counted.sum()] * 3


def trained(tmp_path: Path, mode: str, kills: int, servers: int, events: int = 3000, script: str = TRAIN) -> None:
    """Runs a job whose launcher starts again what is killed, and checks that every event counted once."""
    options = [f"--server_num={servers}", "--worker_num=2", f"--max_restart={kills + 2}"]
    with Launcher(tmp_path, script, *options, args=[str(kills), str(events), mode]) as job:
        assert job.wait(300.0) == 0, job.stderr
    assert len(list(tmp_path.glob("kill-*"))) == kills
    check_counts(tmp_path, events)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., HandStarted]]:
    """Starts a job of TRAIN in which nothing is killed."""
    made: list[HandStarted] = []

    def start(script: str, servers: int, events: int) -> HandStarted:
        made.append(HandStarted(tmp_path, script, servers, workers=2))
        for name in [*(f"server-{number}" for number in range(servers)), "worker-0", "worker-1"]:
            made[0].start(name, "0", f"{events}", "async")
        return made[0]

    yield start
    made[0].end()


def test_each_event_is_trained_once(tmp_path: Path, start: Callable[..., HandStarted]) -> None:
    job = start(TRAIN, servers=2, events=500)
    assert {name: job.wait(name) for name in job.processes} == dict.fromkeys(job.processes, 0), job.logs()
    check_counts(tmp_path, 500)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "servers"), [("sync", 2), ("stale", 2), ("async", 1)])
def test_each_event_is_trained_once_whatever_is_killed(tmp_path: Path, mode: str, servers: int) -> None:
    """Issue 14.2: 5 random kill -9 of workers and servers; a row counts its events, so each one shows."""
    trained(tmp_path, mode, kills=5, servers=servers)


def test_one_partition_is_too_few_for_two_workers(start: Callable[..., HandStarted]) -> None:
    job = start(TRAIN.replace("int(sys.argv[2]), 4", "int(sys.argv[2]), 1"), servers=1, events=9)
    assert job.wait("worker-0") == 1
    assert job.wait("worker-1") == 1
    said = [(job.folder / f"worker-{rank}.log").read_text() for rank in range(2)]
    assert all("has 1 partitions and the job 2 workers: worker 1 would have no events" in text for text in said)


def test_timeout_counts_from_the_last_event_not_from_the_begin_of_the_batch() -> None:
    def slow(partition: int, start: int):
        for offset in range(start, 4):
            due = time.monotonic() + 0.3
            while time.monotonic() < due:
                time.sleep(0.01)
                yield None
            yield offset, offset

    assert lists(stream(slow, batch_size=4, timeout_s=0.8)) == [[0, 1, 2, 3]]


def test_a_full_batch_does_not_wait_for_a_source_that_blocks(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def source(partition: int, start: int) -> Iterator[tuple[int, int]]:
        for offset in range(start, 6):
            asked.append(offset)
            time.sleep(0.3 if offset == 5 else 0)
            yield offset, offset

    monkeypatch.setattr("fleet.dataset.stream._BLOCKED_S", 0.05)
    batches = iter(fleet.StreamDataset(source, int, batch_size=4, max_wait_s=0.01, collate=list))
    assert next(batches) == [0, 1, 2, 3]
    assert asked == [0, 1, 2, 3]
    assert not caplog.records
    assert next(batches) == [4, 5]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "stream 'stream': the source blocked for 0.3 s, so neither max_wait_s nor" in caplog.text


def test_samples_that_make_no_batch_are_named_with_their_place() -> None:
    for parse, words in ((lambda n: n + (1 << 63), "Overflow.*same bits"), (lambda n: torch.zeros(n + 1), "one shape")):
        dataset = fleet.StreamDataset(
            lambda partition, start: zip(range(4), range(4), strict=True), parse, batch_size=2
        )
        with pytest.raises(FleetError, match=rf"stream 'stream', up to the offsets {{0: 2}}: 2 samples .*{words}"):
            next(iter(dataset))


def test_a_dataset_that_was_closed_is_not_read_on() -> None:
    dataset = fleet.StreamDataset(lambda partition, start: zip(range(9), range(9), strict=True), int, batch_size=2)
    batches = iter(dataset)
    assert next(batches).tolist() == [0, 1]
    dataset.close()
    assert list(batches) == []
    with pytest.raises(ConfigError, match="stream 'stream': the dataset was closed"):
        next(iter(dataset))
