"""Snapshot and journal: a server that was killed comes back exactly as it was (PS design 2d, 3)."""

from __future__ import annotations

import shutil
import threading
import time

import numpy as np
import pytest

from fleet.errors import CheckpointError, PSError
from fleet.ps.server.server import Server
from fleet.ps.server.server_config import ServerConfig
from fleet.ps.server.snapshot import write_snapshot
from fleet.ps.table.accessor import Accessor
from fleet.ps.table.dense_table import DenseTableConfig
from fleet.ps.table.entry import CountFilterEntry
from fleet.ps.table.initializers import Initializer
from fleet.ps.table.layout import SparseTableConfig
from fleet.ps.table.rules import Rule
from fleet.ps.table.table_spec import spec_of_config
from fleet.ps.wire.messages import TablePart
from tests.fleet.ps.local_transport import Fault, LocalTransport
from tests.fleet.ps.reference_store import ReferenceTable
from tests.fleet.ps.service import (
    SECRET,
    SPARSE,
    Gradient,
    Service,
    gradient,
    ids,
    make_table,
    rows,
    serving,
    silent,
)

ADAM = SparseTableConfig("adam", 3, Rule("adam", {"learning_rate": 0.1}), initializer=Initializer("normal", 0, 1))
CTR = SparseTableConfig(
    "ctr", 5, Rule("shared_adagrad"), Rule("adam"), accessor=Accessor("CtrCommonAccessor"), entry=CountFilterEntry(2)
)

DENSE_ADAM = DenseTableConfig("mlp", 7, Rule("adam"))
TABLES = {0: ADAM, 1: DENSE_ADAM, 2: CTR}


def train(client, steps, seed):
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        keys, others = np.unique(rng.integers(0, 60, 30)), np.unique(rng.integers(0, 60, 30))
        shows = np.ones(len(others), np.float32)
        client.wait(
            client.push(
                {
                    0: Gradient(keys, rng.standard_normal((len(keys), 3)).astype(np.float32)),
                    1: rng.standard_normal(7).astype(np.float32),
                    2: Gradient(others, rng.standard_normal((len(others), 3)).astype(np.float32), shows, shows / 2),
                }
            )
        )


def state_of(server):
    """Everything a server knows, bit by bit."""
    machine, state = server.state, {}
    for number, served in machine.tables.items():
        if hasattr(served.table, "read_state"):
            state[number] = [array.tobytes() for array in served.table.read_state()]
            continue
        rows_ = {}
        for block in served.table.blocks():
            for i, key in enumerate(block.keys.tolist()):
                counts = (
                    None
                    if block.statistics is None
                    else (
                        block.statistics.shows[i],
                        block.statistics.clicks[i],
                        block.statistics.delta_scores[i],
                    )
                )
                rank = None if block.ranks is None else int(block.ranks[i])
                rows_[key] = (int(block.counts[i]), bool(block.admitted[i]), block.values[i].tobytes(), counts, rank)
        state[number] = rows_
        state[number, "lr"] = served.learning_rate
    session = machine.job
    state["session"] = (
        session.applied_step,
        session.barriers,
        [(w.clock, dict(w.steps), {n: c.last for n, c in w.channels.items()}) for w in session.workers],
        {step: {rank: item.body for rank, item in ranks.items()} for step, ranks in session.held.items()},
    )
    state["lsn"] = machine.journal.last_lsn
    return state


def come_back(service: Service, folder, tmp_path):
    """Returns the state a server would have that starts from a copy of ``folder`` as it is now."""
    copy = tmp_path / f"copy-{time.monotonic_ns()}"
    shutil.copytree(folder, copy)
    other = Service(1, **{**vars_of(service), "folder": None})
    object.__setattr__(other.configs[0], "folder", copy)
    try:
        return state_of(other.start(0))
    finally:
        other.close()


def vars_of(service: Service):
    config = service.configs[0]
    return {"num_workers": config.num_workers, "mode": config.mode, "job": config.job}


@pytest.mark.parametrize("snapshots", [(), (5,), (0, 3, 9)])
@pytest.mark.parametrize("level", [1, 2])
def test_the_state_after_a_kill_is_bit_equal(tmp_path, snapshots, level):
    with serving(num_workers=2, folder=tmp_path / "s", level=level) as service:
        a, b = service.client(0, tables=TABLES), service.client(1, tables=TABLES)
        for round_ in range(10):
            if round_ in snapshots:
                a.snapshot()
            train(a, 1, round_)
            train(b, 1, 100 + round_)
            if round_ == 4:
                a.alter(0, "learning_rate", value=0.05)
                a.alter(2, "shrink", threshold=0.5)
        threading.Thread(target=b.barrier, args=("x",), daemon=True).start()
        a.barrier("x")
        now = state_of(service.servers[0])
        assert len(now[0]) > 20
        assert come_back(service, tmp_path / "s" / "server-0", tmp_path) == now


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "int8"])
def test_steps_that_were_held_as_decoded_are_replayed_from_their_bytes_with_the_same_bits(tmp_path, wire):
    with serving(mode="sync", num_workers=2, folder=tmp_path / "s") as service:
        a, b = (service.client(rank, tables=TABLES, wire=wire) for rank in (0, 1))
        for round_ in range(5):
            train(a, 1, round_)
            train(b, 1, 100 + round_)
        train(b, 1, 200)  # is still held
        now = state_of(service.servers[0])
        assert now["session"][0] == 5
        assert list(now["session"][3]) == [6]
        assert come_back(service, tmp_path / "s" / "server-0", tmp_path) == now


def test_rows_admitted_by_their_score_are_drawn_alike_after_a_kill(tmp_path):
    """The journal after a snapshot does not begin with the first push."""
    accessor = Accessor("SparseAccessor", create_by_score=True, zero_init=False)
    config = SparseTableConfig("scored", 3, Rule("adam"), create_on="push", accessor=accessor)
    rng = np.random.default_rng(0)
    with serving(folder=tmp_path / "s") as service:
        client = service.client(tables={0: config})
        for round_ in range(2):
            if round_:
                client.snapshot()
            for _ in range(5):
                keys = np.unique(rng.integers(0, 4000, 60))
                shows = np.full(len(keys), 0.5, np.float32)
                gradients = rng.standard_normal((len(keys), 3)).astype(np.float32)
                client.wait(client.push({0: Gradient(keys, gradients, shows, shows / 2)}))
        now = state_of(service.servers[0])
        assert 0 < len(now[0]) < 500
        assert come_back(service, tmp_path / "s" / "server-0", tmp_path) == now


def test_pulls_of_new_ids_are_not_among_what_comes_back(tmp_path):
    """A server that was killed has the rows that it had: pulls, which no journal holds, made none."""
    with serving(folder=tmp_path / "s") as service:
        client = service.client(tables=TABLES)
        for round_ in range(4):
            train(client, 1, round_)
            client.wait(client.pull({0: np.arange(40, 90), 2: np.arange(40, 90)}))
            if round_ == 2:
                client.snapshot()
        now = state_of(service.servers[0])
        assert len(now[0]) < 60
        assert come_back(service, tmp_path / "s" / "server-0", tmp_path) == now


def test_sync_gradients_that_wait_for_others_survive(tmp_path):
    with serving(mode="sync", num_workers=2, folder=tmp_path / "s") as service:
        a, b = service.client(0, tables=TABLES), service.client(1, tables=TABLES)
        train(a, 2, 0)
        a.snapshot()
        train(b, 1, 1)
        train(a, 1, 2)
        now = state_of(service.servers[0])
        assert sorted(now["session"][3]) == [2, 3]
        assert come_back(service, tmp_path / "s" / "server-0", tmp_path) == now


def test_snapshots_while_training_are_exact(tmp_path):
    """Rows are copied at different records; each gets exactly the records it lacks."""
    with serving(num_workers=3, folder=tmp_path / "s") as service:
        clients = [service.client(rank, tables=TABLES) for rank in range(3)]
        folder = tmp_path / "s" / "server-0"
        stop = threading.Event()

        def copy():
            while not stop.is_set():
                clients[2].snapshot()

        copier = threading.Thread(target=copy)
        copier.start()
        workers = [threading.Thread(target=train, args=(c, 40, n)) for n, c in enumerate(clients[:2])]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(40)
        stop.set()
        copier.join(20)
        now = state_of(service.servers[0])
        assert come_back(service, folder, tmp_path) == now
        assert len(list(folder.glob("snapshot-*"))) == 1
        assert len(list((folder / "journal").iterdir())) == 1


def test_a_row_known_to_a_later_record_is_not_updated_twice(tmp_path, monkeypatch):
    """A push between the snapshot of the session and the copy of a chunk is in both; it is applied once."""
    with serving(folder=tmp_path / "s") as service:
        client = service.client(tables={0: SPARSE})
        client.wait(client.push({0: gradient([1, 2, 3])}))
        table = service.servers[0].state.tables[0].table
        plan, pushed = table.plan_windows, []

        def plan_windows(rows_per_window):
            for number, window in enumerate(plan(rows_per_window)):
                if number in (1, 20, 40):
                    client.wait(client.push({0: gradient(range(number))}))
                    pushed.append(number)
                yield window

        monkeypatch.setattr(table, "plan_windows", plan_windows)
        service.servers[0].snapshot()
        monkeypatch.undo()
        assert pushed == [1, 20, 40]
        now = state_of(service.servers[0])
        assert come_back(service, tmp_path / "s" / "server-0", tmp_path) == now
        newest = next((tmp_path / "s" / "server-0").glob("snapshot-*"))
        from fleet.ps.server.served_table import ServedSparse

        stamps = ServedSparse(ReferenceTable(SPARSE)).read(newest / "table-0.rows")
        assert len(set(np.concatenate(stamps._stamps).tolist())) > 1  # or this test shows nothing


def test_a_worker_goes_on_through_a_restart(tmp_path):
    with serving(2, folder=tmp_path / "s", num_workers=1) as service:
        client = service.client(tables={0: SPARSE})
        keys = range(50)
        for step in range(9):
            if step in (3, 6):
                service.servers[1].stop()
                if step == 6:
                    threading.Timer(0.3, service.start, (1,)).start()
                else:
                    service.start(1)
            client.wait(client.push({0: gradient(keys)}))
            client.wait(client.pull({0: ids(*keys)}))
        assert (rows(client, keys) == -9).all()


def test_level_0_with_snapshots_loses_nothing_that_workers_still_keep(tmp_path):
    """The replay store: what was acknowledged after the snapshot is sent again."""
    with serving(folder=tmp_path / "s", level=0) as service:
        client = service.client(tables={0: SPARSE})
        client.wait(client.push({0: gradient([1])}))
        client.snapshot()
        for _ in range(5):
            client.wait(client.push({0: gradient([1])}))
        assert len(client._links[0]._replay) == 5
        service.servers[0].stop()
        service.start(0)
        client.wait(client.push({0: gradient([1])}))
        assert rows(client, [1])[0, 0] == -7
        client.snapshot()
        client.wait(client.push({0: gradient([1])}))
        assert len(client._links[0]._replay) == 1


def test_level_2_trims_the_replay_store_when_the_disk_has_it(tmp_path):
    with serving(folder=tmp_path / "s", level=2) as service:
        client = service.client(tables={0: SPARSE})
        for _ in range(5):
            client.wait(client.push({0: gradient([1])}))
        client.flush()
        assert not client._links[0]._replay
        assert client.stat()[0]["durable"] == client.stat()[0]["records"]


@pytest.mark.parametrize("level", [1, 2])
def test_a_flush_does_not_wait_for_what_the_server_refused(tmp_path, level):
    """Its number never becomes durable: flush() ended after the whole deadline with "Look at its disk"."""
    with serving(folder=tmp_path / "s", level=level) as service:
        client = service.client(tables={0: SPARSE}, deadline_s=5.0)
        client.wait(client.push({0: gradient([1])}))
        client.tables[0].dim = client.tables[0].push_dim = 3
        with pytest.raises(PSError, match="dim 2"):
            client.wait(client.push({0: gradient([1], dim=3)}))
        client.tables[0].dim = client.tables[0].push_dim = 2
        client.flush()
        client.wait(client.push({0: gradient([1])}))
        client.flush()
        assert rows(client, [1])[0, 0] == -2


def test_the_replay_store_is_bounded(tmp_path):
    with serving(folder=tmp_path / "s", level=0) as service:
        client = service.client(tables={0: SPARSE}, replay_bytes=5000)
        for _ in range(50):
            client.wait(client.push({0: gradient(range(20))}))
        link = client._links[0]
        assert link._replay_bytes == sum(r.body_bytes for r in link._replay) <= 5000 + 400


def test_duplicates_are_known_after_a_restart(tmp_path):
    with serving(folder=tmp_path / "s") as service:
        client = service.client(tables={0: SPARSE})
        service.transport.faults.append(Fault("server", service.transport.sent["server"] + 1, "drop"))
        ticket = client.push({0: gradient([1])})  # applied, and its acknowledgement is lost
        time.sleep(0.2)
        service.servers[0].stop()
        service.start(0)
        client.wait(ticket)
        assert rows(client, [1])[0, 0] == -1
        assert client.stat()[0]["duplicates"] == 1


def test_geo_changes_are_remembered(tmp_path):
    with serving(num_workers=2, folder=tmp_path / "s") as service:
        a, b = service.client(0, tables={0: SPARSE}), service.client(1, tables={0: SPARSE})
        a.wait(a.add({0: gradient([4, 5], 2.0)}))
        a.snapshot()
        a.wait(a.add({0: gradient([9], 3.0)}))
        service.servers[0].stop()
        service.start(0)
        keys, values = b.pull_changes([0])[0]
        assert keys.tolist() == [4, 5, 9]
        assert values[:, 0].tolist() == [2, 2, 3]


def test_a_clean_end_removes_the_state_and_a_kill_does_not(tmp_path):
    with serving(folder=tmp_path / "s") as service:
        client = service.client(tables={0: SPARSE})
        client.snapshot()
        folder = tmp_path / "s" / "server-0"
        assert list(folder.glob("snapshot-*"))
        service.servers[0].stop()
        assert list(folder.glob("snapshot-*"))
        service.servers[0].forget()
        assert not list(folder.iterdir())


def test_the_state_of_another_job_or_size_is_refused(tmp_path):
    folder = tmp_path / "s"
    with serving(folder=folder, job="one") as service:
        service.client(tables={0: SPARSE}, job="one").snapshot()
    with pytest.raises(CheckpointError, match="job 'one', this is job 'two'"), serving(folder=folder, job="two"):
        pass
    with pytest.raises(CheckpointError, match="1 workers"), serving(folder=folder, job="one", num_workers=2):
        pass


def test_a_damaged_snapshot_is_refused(tmp_path):
    folder = tmp_path / "s"
    with serving(folder=folder) as service:
        client = service.client(tables={0: SPARSE})
        client.wait(client.push({0: gradient(range(100))}))
        client.snapshot()
    path = next(folder.glob("server-0/snapshot-*/table-0.rows"))
    content = bytearray(path.read_bytes())
    found = 0
    for position in range(0, len(content), 97):
        damaged = bytearray(content)
        damaged[position] ^= 1
        path.write_bytes(damaged)
        try:
            with serving(folder=folder) as service:  # a bit that means nothing
                assert (rows(service.client(tables={0: SPARSE}), range(100)) == -1).all()
        except CheckpointError:
            found += 1
    assert found > len(content) / 97 * 0.8
    path.write_bytes(content[:-20])
    with pytest.raises(CheckpointError), serving(folder=folder):
        pass


def test_a_change_that_cannot_be_applied_stops_the_server(tmp_path, monkeypatch):
    with serving(folder=tmp_path / "s") as service:
        client = service.client(tables={0: SPARSE}, deadline_s=1.0)
        table = service.servers[0].state.tables[0].table
        monkeypatch.setattr(table, "push", lambda *_, **__: (_ for _ in ()).throw(MemoryError("no room")))
        with pytest.raises(PSError, match="no room"):
            client.wait(client.push({0: gradient([1])}))
        with pytest.raises(PSError, match="Restart it"):
            service.servers[0].wait(5)
        service.servers[0].stop()
        service.start(0)
        assert rows(client, [1])[0, 0] == -1  # it was journaled


def test_a_snapshot_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    """PS design 3: or each attempt on a full disk would fill it further."""
    with serving(folder=tmp_path) as service:
        client = service.client(tables={0: SPARSE})
        served = service.servers[0].state.tables[0]

        def full(path, stamp):
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(served, "write", full)
            for _ in range(3):
                client.wait(client.push({0: gradient([1])}))
                with pytest.raises(PSError, match="No space"):
                    client.snapshot()
        assert not list((tmp_path / "server-0").glob("*snapshot-*"))
        client.snapshot()
        service.servers[0].stop()
        service.start(0)
        assert rows(client, [1])[0, 0] == -3


def test_a_server_killed_while_it_prepared_prepares_again(tmp_path):
    """PS design 3: the journal knows the tables before they are filled from a save; they must not stay empty."""
    config, calls = ServerConfig(endpoint="127.0.0.1:9000", folder=tmp_path, secret=SECRET), []

    def prepare(machine):
        machine.create_tables({0: spec_of_config(SPARSE)})
        calls.append(machine)
        if len(calls) == 1:
            raise KeyboardInterrupt  # the end of the process, as far as the folder knows
        machine.tables[0].push(TablePart(0, 1, 2, ids(7), np.ones((1, 2), np.float32)))
        write_snapshot(machine, tmp_path)  # as loading does

    for expected in (1, 2, 2):
        server = Server(config, transport=LocalTransport(), notify=silent, make_table=make_table)
        try:
            server.start(prepare)
        except KeyboardInterrupt:
            assert expected == 1
        else:
            assert server.state.tables[0].table.pull(ids(7), create=False)[0, 0] == -1
        finally:
            server.stop()
        assert len(calls) == expected


def test_only_the_user_of_the_server_reads_what_it_keeps(tmp_path):
    """The snapshots were 0644 beside a journal of 0600."""
    with serving(folder=tmp_path) as service:
        service.client(tables={0: SPARSE}).snapshot()
        kept = [path for path in tmp_path.rglob("*") if path.parent.name.startswith("snapshot") or path.is_file()]
        assert len(kept) >= 4
        assert {path.stat().st_mode & 0o077 for path in kept} == {0}
