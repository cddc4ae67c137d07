"""A bounded table that was killed at any point comes back bit-equal, and evicts what it would have evicted."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fleet.ps.client.client import Client
from fleet.ps.client.client_config import ClientConfig
from fleet.ps.server.journal import RecordKind, read_journal
from fleet.ps.server.measures import server_measures
from fleet.ps.table.bounds import Bounds
from fleet.ps.table.entry import CountFilterEntry
from fleet.ps.table.initializers import Initializer
from fleet.ps.table.layout import SparseTableConfig
from fleet.ps.table.rules import Rule
from fleet.ps.table.sparse_table import SparseTable
from tests.fleet.ps.service import SECRET, Gradient, gradient, serving, silent
from tests.fleet.ps.test_recovery import come_back, state_of
from tests.helpers.ps_server_process import ServerProcess

NORMAL = Initializer("normal", 0, 1)
LRU = SparseTableConfig("lru", 3, Rule("adam"), initializer=NORMAL, bounds=Bounds(max_rows=40))
LFU = SparseTableConfig("lfu", 2, initializer=NORMAL, bounds=Bounds(max_rows=25, evict="lfu"))
TTL = SparseTableConfig("ttl", 2, bounds=Bounds(evict="ttl", ttl_days=2, max_rows=60), entry=CountFilterEntry(2))
TABLES = {0: LRU, 1: LFU, 2: TTL}


def train(client, steps, seed):
    """Pulls and pushes; some pulled ids are never pushed."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        client.wait(client.pull({0: np.unique(rng.integers(0, 300, 40)), 1: np.unique(rng.integers(0, 90, 20))}))
        grads = {}
        for table, (config, most) in enumerate(((LRU, 200), (LFU, 90), (TTL, 150))):
            keys = np.unique(rng.zipf(1.3, 25) % most)
            grads[table] = Gradient(keys, rng.standard_normal((len(keys), config.dim)).astype(np.float32))
        client.wait(client.push(grads))


def check_limits(server):
    for number, config in TABLES.items():
        table = server.state.tables[number].table
        assert table.num_rows <= config.bounds.max_rows
        assert table._memory.num_entries <= 2 * config.bounds.max_rows


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_the_state_after_a_kill_is_bit_equal(tmp_path, mode):
    with serving(num_workers=2, folder=tmp_path / "s", mode=mode) as service:
        clients = [service.client(rank, tables=TABLES) for rank in range(2)]
        server = service.servers[0]
        for round_ in range(12):
            if round_ in (3, 7):
                clients[0].snapshot()
            if round_ in (5, 6, 9):
                clients[0].alter(2, "advance_day", day=str(round_))
            for rank, client in enumerate(clients):
                train(client, 1, 100 * rank + round_)
            check_limits(server)
            if round_ in (2, 4, 8, 11):
                now = state_of(server)
                assert come_back(service, tmp_path / "s" / "server-0", tmp_path) == now
        evicted = next(m.samples for m in server_measures(server.state) if m.name == "evicted_rows")
        assert all(evicted[name] > 10 for name in ("lru", "lfu"))


def test_snapshots_in_the_middle_of_evictions_are_exact(tmp_path):
    """The chunks of a snapshot carry different records, and rows come and go between them."""
    with serving(num_workers=3, folder=tmp_path / "s") as service:
        clients = [service.client(rank, tables=TABLES) for rank in range(3)]
        stop = threading.Event()

        def copy():
            while not stop.is_set():
                clients[2].snapshot()

        threads = [threading.Thread(target=train, args=(c, 25, n)) for n, c in enumerate(clients[:2])]
        copier = threading.Thread(target=copy)
        for thread in (copier, *threads):
            thread.start()
        for thread in threads:
            thread.join(60)
        stop.set()
        copier.join(30)
        now = state_of(service.servers[0])
        check_limits(service.servers[0])
        assert come_back(service, tmp_path / "s" / "server-0", tmp_path) == now


def test_a_snapshot_between_a_row_and_its_eviction(tmp_path, monkeypatch):
    """A window is copied, its rows are evicted and come back, then the next window is copied."""
    with serving(folder=tmp_path / "s") as service:
        client = service.client(tables={0: LRU})
        train_one(client, range(40))
        table = service.servers[0].state.tables[0].table
        plan = table.plan_windows

        def plan_windows(rows_per_window):
            for number, window in enumerate(plan(rows_per_window)):
                if number in (5, 20, 40):
                    train_one(client, range(100 * number, 100 * number + 30))
                    train_one(client, range(20))
                yield window

        monkeypatch.setattr(table, "plan_windows", plan_windows)
        service.servers[0].snapshot()
        monkeypatch.undo()
        now = state_of(service.servers[0])
        assert service.servers[0].state.tables[0].evicted > 60
        assert come_back(service, tmp_path / "s" / "server-0", tmp_path) == now


def train_one(client, keys):
    client.wait(client.push({0: gradient(keys, 0.5, dim=3)}))


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_journal_that_ends_at_any_record(tmp_path_factory, data):
    """Killed after a push and before the record of what it evicts: the restart writes the same record."""
    tmp_path = tmp_path_factory.mktemp("cut")
    seed = data.draw(st.integers(0, 999))
    with serving(folder=tmp_path / "s") as service:
        client = service.client(tables=TABLES)
        train(client, 4, seed)
        if data.draw(st.booleans()):
            client.snapshot()
        train(client, 8, seed + 1000)
        folder = tmp_path / "s" / "server-0"
        path = max((folder / "journal").iterdir())
        records = list(read_journal(folder / "journal", int(path.stem.rpartition("-")[2]) - 1, []))
        content = path.read_bytes()
        ends = np.cumsum([64 + len(record.body) for record in records]) + len(content)
        ends -= ends[-1] - len(content)  # the file begins with its own header
        assert any(record.kind == RecordKind.EVICT for record in records)
        for place in data.draw(st.lists(st.integers(1, len(records) - 1), min_size=1, max_size=4)):
            after = place
            while after < len(records) and records[after].kind == RecordKind.EVICT:
                after += 1
            found = []
            for end in (place, after):
                copy = tmp_path / f"cut-{end}"
                shutil.copytree(folder, copy, dirs_exist_ok=True)
                (copy / "journal" / path.name).write_bytes(content[: int(ends[end - 1])])
                found.append(come_back(service, copy, tmp_path))
                shutil.rmtree(copy)
            assert found[0] == found[1]


def resident_bytes(pid):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


def check_rows(client, twins):
    stat = client.stat()[0]["tables"]
    for number, twin in enumerate(twins):
        keys = np.sort(twin.keys())
        assert stat[str(number)]["rows"] == twin.num_rows
        for some in np.array_split(keys, 1 + len(keys) // 20_000):
            found = client.wait(client.pull({number: some}))[number]
            np.testing.assert_array_equal(found, twin.pull(some))


def connected(endpoint, tables):
    settings = {"deadline_s": 60.0, "start_timeout_s": 60.0, "heartbeat": False, "secret": SECRET}
    client = Client(ClientConfig(endpoints=[endpoint], rank=0, num_workers=1, **settings), notify=silent)
    client.open()
    client.create_tables(tables)
    return client


@pytest.mark.slow
def test_kill_9_of_a_server_with_rows_on_disk_and_a_limit(tmp_path):
    """A table five times its memory and one that evicts, killed three times, are those of an undisturbed run."""
    memory = 64 << 20
    cold = SparseTableConfig("cold", 32, Rule("adam"), bounds=Bounds(rows="disk", memory_bytes=memory))
    lru = SparseTableConfig("lru", 4, Rule("adagrad"), initializer=NORMAL, bounds=Bounds(max_rows=5000))
    twins = [SparseTable(SparseTableConfig("cold", 32, Rule("adam"), bounds=Bounds(max_rows=10**9))), SparseTable(lru)]
    config = {"endpoint": "127.0.0.1:0", "num_workers": 1, "folder": str(tmp_path / "s"), "snapshot_bytes": 60_000_000}
    server = ServerProcess(config)
    try:
        config["endpoint"] = server.endpoint
        client = connected(server.endpoint, {0: cold, 1: lru})
        rng = np.random.default_rng(0)
        before, highest = resident_bytes(server.pid), 0
        for step in range(49):
            keys = np.unique(np.concatenate((np.arange(17_000) + 17_000 * step, rng.integers(0, 800_000, 2000))))
            others = np.unique(rng.zipf(1.1, 3000) % 20_000)
            pushed = [
                Gradient(k, rng.standard_normal((len(k), d)).astype(np.float32)) for k, d in ((keys, 32), (others, 4))
            ]
            client.wait(client.push(dict(enumerate(pushed))))
            for twin, gradients in zip(twins, pushed, strict=True):
                twin.push(gradients.ids, gradients.rows)
            if step in (11, 25, 40):
                server.kill()
                server = ServerProcess(config)
                before = 0
            elif before:
                highest = max(highest, resident_bytes(server.pid) - before)
        assert twins[0].num_rows * (4 * 98 + 8) > 4.5 * memory
        assert 0 < highest < memory + (64 << 20)  # messages, the journal's and the kernels' own
        assert client.stat()[0]["tables"]["0"]["bytes"] <= memory
        check_rows(client, twins)
        client.goodbye()
        assert server.join() == 0
    finally:
        server.kill()
