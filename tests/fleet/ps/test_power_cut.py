"""The machine dies at any sync: level 2 has every push exactly once, level 1 a beginning of them (PS design 2d, 3)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from fleet.errors import CheckpointError, PSError
from fleet.ps.server.job_state import JobState
from fleet.ps.server.journal import Journal
from fleet.ps.server.server_state import ServerState
from fleet.ps.server.snapshot import recover, write_snapshot
from fleet.ps.table.table_spec import spec_of_config
from fleet.ps.wire.messages import Header, Op, TablePart, encode_parts
from tests.fleet.ps.service import SPARSE, gradient, make_table, rows, serving
from tests.helpers.forgetful_disk import ForgetfulDisk

KEYS = np.arange(60)


class Life:
    """One life of a server and its only worker; syncs happen when it says so."""

    def __init__(self, folder: Path, level: int, *, skips_damage: bool = False) -> None:
        journal = Journal(folder / "journal", level)
        self.folder, self.state = folder, ServerState(JobState(1, journal.lock), journal, make_table, sync=False)
        self.lines = recover(folder, self.state, skips_damage=skips_damage)
        journal.open()
        self.worker = self.state.job.workers[0]
        self.channel = self.worker.channel(1)
        self.sent = self.start = self.channel.last
        self.state.create_tables({0: spec_of_config(SPARSE)})

    def push(self, times: int = 1) -> None:
        for _ in range(times):
            self.sent += 1
            part = TablePart(0, len(KEYS), 2, KEYS, np.ones((len(KEYS), 2), np.float32))
            body = memoryview(bytearray(b"".join(bytes(item) for item in encode_parts([part]))))
            header = Header(Op.PUSH, client_id=self.worker.client_id, seq=self.sent, step=self.sent, n_tables=1)
            self.state.change(self.worker, 1, header, body, self.state.checked(header, body))

    def durable(self) -> int:
        """What the worker has been told, and so does not keep any more."""
        with self.state.journal.lock:
            return self.channel.durable_seq(self.state.journal.durable_lsn)

    def snapshot(self, patch: pytest.MonkeyPatch, pushes: tuple[int, ...] = (20, 40)) -> None:
        """Writes one; pushes come while the rows are copied."""
        table = self.state.tables[0].table
        plan = table.plan_windows

        def plan_windows(rows_per_window: int) -> Iterator[object]:
            for number, window in enumerate(plan(rows_per_window)):
                if number in pushes:
                    self.push()
                yield window

        with patch.context() as inner:
            inner.setattr(table, "plan_windows", plan_windows)
            write_snapshot(self.state, self.folder)

    def values(self) -> set[float]:
        """What stands in the rows."""
        return set(self.state.tables[0].table.pull(KEYS, create=False).reshape(-1).tolist())

    def run(self, patch: pytest.MonkeyPatch) -> None:
        """Some pushes, with syncs and snapshots between."""
        journal = self.state.journal
        self.push(2)
        journal.sync()
        self.push(2)
        self.snapshot(patch)
        self.push(2)
        journal.sync()
        self.push(1)
        self.snapshot(patch, (0, 30))
        self.push(3)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Nobody syncs the journal but the test."""
    monkeypatch.setattr(Journal, "_sync_loop", lambda self: None)
    return monkeypatch


def live(folder: Path, patch: pytest.MonkeyPatch, level: int, cut_at: int) -> tuple[Life | None, ForgetfulDisk]:
    """A life that ends in the sync ``cut_at``, or at its end."""
    folder.mkdir()
    with patch.context() as inner:
        disk, life = ForgetfulDisk(folder, inner, cut_at), None
        try:
            life = Life(folder, level)
            life.run(inner)
        except (OSError, PSError):
            assert disk.is_off
        disk.cut()
    return life, disk


ENDS = [("lost", 0), ("kept", 0), *(("random", seed) for seed in range(2))]


def test_there_are_syncs_to_cut(tmp_path: Path, alone: pytest.MonkeyPatch) -> None:
    for level, least in ((1, 14), (2, 20)):
        life, disk = live(tmp_path / f"{level}", alone, level, 0)
        assert life is not None
        assert disk.syncs >= least
        assert life.values() == {-float(life.sent)} == {-14.0}
        disk.close()


@pytest.mark.parametrize("cut_at", range(1, 22))
def test_level_2_has_every_push_once(cut_at: int, tmp_path: Path, alone: pytest.MonkeyPatch) -> None:
    """A snapshot with rows of records that were not synced brought wrong sums in 5 of 20."""
    life, disk = live(tmp_path / "disk", alone, 2, cut_at)
    told = 0 if life is None else life.durable()
    for unsynced, seed in ENDS:
        folder = disk.rebuild(tmp_path / f"{unsynced}-{seed}", unsynced, seed)
        again = Life(folder, 2)
        assert again.sent >= told
        assert again.values() <= {-float(again.sent)}
        again.push(20 - again.sent)  # what the worker still has, and more
        assert again.values() == {-20.0}
        third = Life(folder, 2)  # killed, with the machine alive
        assert (third.sent, third.values()) == (20, {-20.0})
    disk.close()


@pytest.mark.parametrize("cut_at", range(1, 18))
def test_level_1_has_a_beginning(cut_at: int, tmp_path: Path, alone: pytest.MonkeyPatch) -> None:
    """It refused to start where an earlier file of the journal had lost its end and a later one had not."""
    life, disk = live(tmp_path / "disk", alone, 1, cut_at)
    for unsynced, seed in ENDS:
        folder = disk.rebuild(tmp_path / f"{unsynced}-{seed}", unsynced, seed)
        again = Life(folder, 1, skips_damage=unsynced != "kept")  # records behind a hole are no write that was cut off
        assert again.values() <= {-float(again.sent)}
        if unsynced == "kept" and life is not None:
            assert again.sent == life.sent
        again.push(30 - again.sent)
        third = Life(folder, 1)
        assert (third.sent, third.values()) == (30, {-30.0})
    disk.close()


def test_level_1_says_what_is_missing(tmp_path: Path, alone: pytest.MonkeyPatch) -> None:
    life = Life(tmp_path, 1)
    life.push(5)
    first = next((tmp_path / "journal").iterdir())
    with life.state.journal.lock:
        life.state.journal.rotate()
    life.push(5)
    first.write_bytes(first.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match=r"record 6 is damaged, at byte .*FLEET_PS_SKIP_DAMAGE=1"):
        Life(tmp_path, 1)  # what follows says that it was promised
    again = Life(tmp_path, 1, skips_damage=True)
    assert again.sent == 4
    assert "the last seconds before the machine stopped are missing, records from 6 on" in again.lines[0]
    assert len(list((tmp_path / "journal").glob("*.lost"))) == 1
    last = max((tmp_path / "journal").glob("*.log"))
    again.push(3)
    last.write_bytes(last.read_bytes()[:-9])
    assert Life(tmp_path, 1).sent == 6  # nothing follows: the end of a write that was cut off


def test_the_numbers_go_on_after_the_newest_row(tmp_path: Path, alone: pytest.MonkeyPatch) -> None:
    """Of a snapshot that was published before its records: or rows would take the next records for those they hold."""
    life = Life(tmp_path, 1)
    life.push(3)
    life.snapshot(alone, (20, 40))
    for path in (tmp_path / "journal").iterdir():
        path.unlink()
    again = Life(tmp_path, 1)
    assert "the snapshot has rows up to record 6, the journal ends with 4" in again.lines[-1]
    before = again.state.tables[0].table.pull(KEYS, create=False)
    again.push(2)
    third = Life(tmp_path, 1)  # the same again: the journal goes on after the gap
    assert third.sent == again.sent
    after = third.state.tables[0].table.pull(KEYS, create=False)
    np.testing.assert_array_equal(after, before - 2)


def test_a_lost_snapshot_is_no_power_cut(tmp_path: Path, alone: pytest.MonkeyPatch) -> None:
    """It was durable at every level: with the journal alone the server would start with nothing."""
    life = Life(tmp_path, 1)
    life.push(3)
    life.snapshot(alone)
    next(tmp_path.glob("snapshot-*")).rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="Restore the whole folder"):
        Life(tmp_path, 1)


def test_level_2_refuses_a_disk_that_lost_what_it_confirmed(tmp_path: Path, alone: pytest.MonkeyPatch) -> None:
    life = Life(tmp_path, 2)
    life.push(3)
    life.snapshot(alone, (20,))
    for path in (tmp_path / "journal").iterdir():
        path.unlink()
    with pytest.raises(CheckpointError, match="FLEET_PS_SKIP_DAMAGE=1"):
        Life(tmp_path, 2)
    Life(tmp_path, 1).push()
    assert Life(tmp_path, 2).sent == 4


def copy_until(done: threading.Event, snapshot: Callable[[], None]) -> None:
    """Writes one snapshot after the other until ``done``, or until there is no power."""
    while not done.is_set():
        try:
            snapshot()
        except (OSError, PSError):
            return


def test_a_served_job_goes_through_power_cuts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers push while snapshots are written and the power ends: what they send again brings the right sums."""
    pushes, folder, clients, disks = 0, tmp_path / "0", [], []
    with serving(num_workers=2, folder=tmp_path, level=2) as service:
        for life in range(6):
            service.servers[0].stop()
            folder.mkdir(exist_ok=True)
            object.__setattr__(service.configs[0], "folder", folder)
            with monkeypatch.context() as patch:
                disk, done = ForgetfulDisk(folder, patch), threading.Event()
                disks.append(disk)
                server = service.start(0)
                clients = clients or [service.client(rank, tables={0: SPARSE}) for rank in range(2)]
                copier = threading.Thread(target=copy_until, args=(done, server.snapshot))
                copier.start()
                for _ in range(20):
                    for client in clients:
                        client.wait(client.push({0: gradient(range(60))}))
                        pushes += 1
                disk.cut()
                done.set()
                copier.join(30)
                with contextlib.suppress(OSError):  # it could not sync
                    server.stop()
                folder = disk.rebuild(tmp_path / f"{life + 1}", ("lost", "random")[life % 2], life)
        object.__setattr__(service.configs[0], "folder", folder)
        service.start(0)
        for client in clients:
            client.wait(client.push({0: gradient(range(60))}))
        assert set(rows(clients[0], range(60)).reshape(-1).tolist()) == {-float(pushes + 2)}
    for disk in disks:
        disk.close()
