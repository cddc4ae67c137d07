"""The journal: what was appended is read back, a torn end is cut, a damaged middle is refused (PS design 2d, 3)."""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.errors import CheckpointError, ConfigError, PSError
from fleet.ps.files.chunks import block_checksum
from fleet.ps.server.journal import Journal, Record, RecordKind, read_journal


def write(folder, bodies, level=1, last_lsn=0):
    journal = Journal(folder, level, last_lsn=last_lsn)
    journal.open()
    for index, body in enumerate(bodies):
        with journal.lock:
            journal.append(Record(RecordKind.PUSH, 0, index, 1, index + 7, 3, 2, 1, body))
    journal.close()
    return journal


def bodies_of(folder, after=0, cut=None):
    return [bytes(record.body) for record in read_journal(folder, after, cut)]


@pytest.mark.parametrize("level", [1, 2])
def test_records_come_back_in_order(tmp_path, level):
    bodies = [b"", b"a", bytes(range(256)) * 40]
    journal = write(tmp_path, bodies, level)
    records = list(read_journal(tmp_path, 0))
    assert [bytes(r.body) for r in records] == bodies
    assert [(r.lsn, r.rank, r.channel, r.seq, r.step, r.n_tables, r.flags) for r in records] == [
        (i + 1, i, 1, i + 7, 3, 2, 1) for i in range(3)
    ]
    assert journal.durable_lsn == 3
    assert bodies_of(tmp_path, after=2) == bodies[2:]


def test_level_0_counts_and_writes_nothing(tmp_path):
    journal = write(None, [b"a", b"b"], level=0)
    assert (journal.last_lsn, journal.durable_lsn) == (2, 0)
    journal.snapshot_done(2)
    assert journal.durable_lsn == 2


def test_level_2_is_durable_soon(tmp_path):
    journal = Journal(tmp_path, 2)
    journal.open()
    with journal.lock:
        journal.append(Record(RecordKind.PUSH, body=b"x"))
    for _ in range(500):
        if journal.durable_lsn == 1:
            break
        __import__("time").sleep(0.01)
    assert journal.durable_lsn == 1
    journal.close()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(max_size=6000), min_size=1, max_size=5), st.data())
def test_a_journal_cut_anywhere_keeps_exactly_its_whole_records(tmp_path_factory, bodies, data):
    folder = tmp_path_factory.mktemp("journal")
    write(folder, bodies)
    path = next(folder.glob("*.log"))
    ends = [16]
    for body in bodies:
        ends.append(ends[-1] + 64 + len(body))
    cut = data.draw(st.integers(0, ends[-1]))
    os.truncate(path, cut)
    whole = sum(end <= cut for end in ends[1:])
    lines: list[str] = []
    assert bodies_of(folder, cut=lines) == bodies[:whole]
    assert bool(lines) == (cut not in [0, *ends])
    write(folder, [b"after"], last_lsn=whole)
    assert bodies_of(folder) == [*bodies[:whole], b"after"]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_changed_byte_in_the_last_record_is_found(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("journal")
    write(folder, [b"first", bytes(9000)])
    path = next(folder.glob("*.log"))
    content = bytearray(path.read_bytes())
    position = data.draw(st.integers(16 + 64 + 5, len(content) - 1))
    content[position] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    assert bodies_of(folder) == [b"first"]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_flipped_bit_before_the_last_record_stops_the_reader(tmp_path_factory, data):
    """Issue 37, 5: it was taken for an incomplete end, and whole records behind it were dropped with a line."""
    folder = tmp_path_factory.mktemp("journal")
    bodies = [b"", b"second", bytes(5000), b"last"]
    write(folder, bodies)
    path = next(folder.glob("*.log"))
    content = bytearray(path.read_bytes())
    ends = [16, 80, 80 + 70, 80 + 70 + 5064]
    position = data.draw(st.integers(0, ends[-1] - 1))
    content[position] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    whole = max(sum(position >= end for end in ends) - 1, 0)
    with pytest.raises(CheckpointError, match=rf"record {whole + 1} is damaged, at byte .*FLEET_PS_SKIP_DAMAGE=1"):
        bodies_of(folder)
    assert path.read_bytes() == content
    lines: list[str] = []
    assert [bytes(r.body) for r in read_journal(folder, 0, lines, skips_damage=True)] == bodies[:whole]
    assert f"record {whole + 1} is damaged" in lines[0]
    assert path.with_name(f"{path.name}.lost").read_bytes() == content


def test_a_header_that_is_damaged_before_the_only_record(tmp_path):
    write(tmp_path, [b"only"])
    path = next(tmp_path.glob("*.log"))
    content = bytearray(path.read_bytes())
    content[3] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="record 1 is damaged, at byte 0"):
        bodies_of(tmp_path)


@pytest.mark.parametrize("level", [1, 2])
def test_what_was_not_promised_yet_is_cut_off(tmp_path, monkeypatch, level):
    """A machine that dies may leave pages behind a hole; at level 2 nobody was told that the hole had been written."""
    monkeypatch.setattr(Journal, "_sync_loop", lambda self: None)
    journal = Journal(tmp_path, level)
    journal.open()
    for body in (b"first", b"second", b"third", b"fourth"):
        with journal.lock:
            journal.append(Record(RecordKind.PUSH, body=body))
        if body == b"first":
            journal.sync()
    path = next(tmp_path.glob("*.log"))
    content = path.read_bytes()
    for damaged, whole in ((b"second", [b"first"]), (b"first", None)):
        path.write_bytes(content.replace(damaged, bytes(len(damaged))))
        if level == 1 or whole is None:
            with pytest.raises(CheckpointError, match="is damaged, at byte"):
                bodies_of(tmp_path)
        else:
            assert bodies_of(tmp_path) == whole
    journal.close()


def test_exchanged_blocks_change_the_checksum():
    data = bytearray(np.random.default_rng(0).bytes(3 * 4096 + 5))
    before = block_checksum(data)
    assert block_checksum(bytes(data[4096:8192] + data[:4096] + data[8192:])) != before
    assert block_checksum(data[:-1]) != before
    assert block_checksum(data) == before


def test_a_snapshot_removes_what_it_holds_and_no_more(tmp_path):
    journal = Journal(tmp_path, 1)
    journal.open()
    for index in range(6):
        with journal.lock:
            journal.append(Record(RecordKind.PUSH, body=bytes([index])))
            if index in (1, 3):
                journal.rotate()
    assert len(list(tmp_path.iterdir())) == 3
    journal.snapshot_done(3)  # the second segment still holds record 4
    assert bodies_of(tmp_path, after=3) == [b"\3", b"\4", b"\5"]
    assert len(list(tmp_path.iterdir())) == 2
    journal.snapshot_done(4)
    assert len(list(tmp_path.iterdir())) == 1
    journal.close()
    with pytest.raises(CheckpointError, match="starts with record 5"):
        bodies_of(tmp_path, after=2)


def test_damage_before_the_last_segment_is_an_error(tmp_path):
    write(tmp_path, [b"aaaa", b"bbbb"])
    write(tmp_path, [b"cccc"], last_lsn=2)
    first = sorted(tmp_path.iterdir())[0]
    content = first.read_bytes()
    first.write_bytes(content[:-1] + b"X")
    with pytest.raises(CheckpointError, match="damaged"):
        bodies_of(tmp_path)
    first.unlink()
    with pytest.raises(CheckpointError, match="starts with record 3"):
        bodies_of(tmp_path)


def test_a_full_disk_leaves_the_journal_as_it_was(tmp_path, monkeypatch):
    journal = Journal(tmp_path, 1)
    journal.open()
    record = Record(RecordKind.PUSH, body=b"x" * 100)
    with journal.lock:
        journal.append(record)
    real, calls = os.writev, []

    def writev(fd, views):
        calls.append(1)
        if len(calls) == 1:
            return real(fd, [views[0][:30]])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "writev", writev)
    with journal.lock, pytest.raises(PSError, match="No space"):
        journal.append(record)
    monkeypatch.undo()
    with journal.lock:
        assert journal.append(record) == 2
    journal.close()
    assert bodies_of(tmp_path) == [record.body] * 2


def test_wrong_levels_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="journal level 3"):
        Journal(tmp_path, 3)
    with pytest.raises(ConfigError, match="folder"):
        Journal(None, 1)


@pytest.mark.parametrize("call", ["open", "writev"])
@pytest.mark.parametrize("level", [1, 2])
def test_a_segment_that_cannot_be_started_leaves_the_one_before(tmp_path, monkeypatch, call, level):
    """PS design 3: no acknowledged record goes to a file without a head, or to whatever has the descriptor now."""
    journal = Journal(tmp_path, level)
    journal.open()
    with journal.lock:
        journal.append(Record(RecordKind.PUSH, body=b"before"))

        def refuse(*_args):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, call, refuse)
        with pytest.raises(OSError, match="No space"):
            journal.rotate()
        monkeypatch.undo()
        journal.append(Record(RecordKind.PUSH, body=b"after"))
    journal.close()
    assert bodies_of(tmp_path) == [b"before", b"after"]
    assert len(list(tmp_path.iterdir())) == 1


def test_records_are_refused_once_the_disk_has_lost_some(tmp_path, monkeypatch):
    """PS design 3: after a failed fdatasync the next one may succeed although the records are gone."""
    refused = threading.Event()

    def fdatasync(fd):
        refused.set()
        raise OSError(5, "Input/output error")

    journal = Journal(tmp_path, 2, sync_interval_s=0.001)
    journal.open()
    monkeypatch.setattr(os, "fdatasync", fdatasync)
    with journal.lock:
        lsn = journal.append(Record(RecordKind.PUSH, body=b"lost"))
    assert refused.wait(30)
    deadline = time.monotonic() + 30
    with pytest.raises(PSError, match="Input/output error.*restart the server"):  # noqa: PT012
        while time.monotonic() < deadline:
            with journal.lock:
                journal.append(Record(RecordKind.PUSH, body=b"x"))
            time.sleep(0.001)
    monkeypatch.undo()
    journal.close()
    assert journal.durable_lsn < lsn
