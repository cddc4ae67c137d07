"""The journal: every change of a server's state, in order, in append-only files.

Each record has a log sequence number (LSN). A server that was killed loads its snapshot and applies the records that
are newer than the snapshot. Level 0 writes nothing; level 1 writes to the page cache, which survives the death of the
process but not of the machine; level 2 also calls fdatasync for groups of records.

A record whose end is missing (the process died while writing) is found by its checksum and cut off. Each record says up
to which one the workers had been promised theirs: where one of those is gone or damaged, the journal is not read,
unless the person who starts the server asks to go on.

[Note: A sync does not stop the server]
``lock`` orders records and is held for each append. A sync takes ``_syncing``, reads the open file and the last record
under ``lock``, calls fdatasync without it, and then marks the records up to that one as durable. Records that are
appended while the disk works become durable with the next sync. A sync may be using the file that ``rotate`` leaves, so
that file is retired and a later sync closes it. After a failed fdatasync nothing more counts as durable and no record
is taken: the kernel may have dropped pages and would not report it again.

[Note: What a machine that died leaves]
Before a sync the disk may hold anything: the end of a file is old or zeros, or a later file is complete and an earlier
one is not. At level 2 every segment is durable before the next one begins, and the newest one before a snapshot that
may hold some of its records is published. So the missing records were never promised to anybody. At level 1 it may
have been; where no later record is there to say so, the records up to the gap are replayed and the segments after it
are set aside.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fleet.common.own_thread import OwnThread
from fleet.common.plain_files import flush, open_own, replacing
from fleet.errors import CheckpointError, ConfigError, PSError
from fleet.ps.files.chunks import block_checksum
from fleet.ps.files.own_folder import own_folder
from fleet.ps.files.row_file import open_plain
from fleet.ps.wire.messages import Buffer
from fleet.ps.wire.transport import ConnectionLost

_SEGMENT = struct.Struct("<8sQ")
_SEGMENT_MAGIC = b"FLPSJNL1"
_RECORD = struct.Struct("<4sHHQIIQQIIIQI")
_RECORD_MAGIC = b"JREC"
_CRC_END = 60  # the header's own checksum covers the bytes before it
assert _RECORD.size == 64
_INSTEAD = (
    "If the server has a standby, let it serve, remove this folder, and start the server again: it follows. Otherwise "
    "restore the folder from a copy, start with an empty one and load a save, or start once with "
    "FLEET_PS_SKIP_DAMAGE=1 to go on with what is whole before it: the pushes after it are lost."
)


class RecordKind:
    """The kinds of records; numbers are part of the file format."""

    CREATE = 1
    PUSH = 2
    ADD = 3
    SET_DENSE = 4
    HELD = 5
    APPLY = 6
    ALTER = 7
    BARRIER = 8
    GOODBYE = 9
    HISTORY = 10
    EVICT = 16  # ids whose rows a table above its limit has lost


@dataclass(frozen=True, slots=True)
class Record:
    """One change: who made it, under which number, and its body as received."""

    kind: int
    lsn: int = 0
    rank: int = 0
    channel: int = 0
    seq: int = 0
    step: int = 0
    n_tables: int = 0
    flags: int = 0
    body: Buffer = b""


class Journal:
    """Appends records once it is open; :attr:`lock` orders them and whatever must change together with them.

    Args:
        folder: where the segments are; created when missing. ``None`` only with level 0.
        level: 0, 1 or 2, see above.
        last_lsn: number of the last existing record.
        sync_interval_s: level 2: roughly the longest time between a record and its fdatasync.
    """

    def __init__(
        self, folder: Path | None, level: int = 1, *, last_lsn: int = 0, sync_interval_s: float = 0.01
    ) -> None:
        if level not in (0, 1, 2):
            raise ConfigError(f"journal level {level!r}: it is 0 (none), 1 (page cache) or 2 (fdatasync).")
        if level and folder is None:
            raise ConfigError(f"journal level {level} needs a folder to write to; give one, or use level 0.")
        self.lock = threading.Lock()
        self.level = level
        self.last_lsn = last_lsn
        self.bytes_written = 0
        self.in_snapshot: int | None = None  # the last record that a snapshot has made unnecessary
        self.confirmed: int | None = None  # the last record that counts as durable, where a standby says so
        self.tap: Callable[[list[Buffer]], None] | None = None  # is given each record as it is in the file
        self.handed_over = False  # another server goes on from the last record: this one takes no more
        self._folder = folder
        self._sync_interval_s = sync_interval_s
        self._fd = -1
        self._first = self._position = 0  # of the current segment: its first record, and its length
        self._failed: str | None = None
        self._durable_lsn = last_lsn
        self._syncing = threading.Lock()  # taken before lock, so that the files of a sync stay open
        self._retired: list[int] = []  # earlier files, to be closed after a sync that may be using them
        self._closing = threading.Event()
        self._dirty = threading.Event()
        self._syncer: OwnThread | None = None

    def open(self) -> None:
        """Starts a segment after :attr:`last_lsn`; everything before it counts as durable."""
        if self.level:
            assert self._folder is not None
            own_folder(self._folder)
            if self.level == 2:
                # Segments of an earlier process, perhaps at a lower level: their records count as durable from here on.
                for _, path in _segments(self._folder):
                    flush(path)
                for folder in self._folder.absolute().parents[:3]:
                    with contextlib.suppress(PermissionError):  # then it is not one of ours
                        flush(folder)  # or a power failure may lose the folder's own name
            self._open_segment()
        self._durable_lsn = self.last_lsn
        if self.level == 2:
            self._syncer = OwnThread(self._sync_loop, name="journal sync")
            self._syncer.start()

    @property
    def durable_lsn(self) -> int:
        """The last record that survives the failures this level protects against."""
        if self.confirmed is not None:
            return self.confirmed
        return self.last_lsn if self.level == 1 else self._durable_lsn

    def append(self, record: Record) -> int:
        """Writes ``record`` and returns its LSN; the caller holds :attr:`lock`.

        Raises:
            PSError: the write failed; the journal is as before the call.
            ConnectionLost: another server goes on from here; the worker turns to it.
        """
        if self.handed_over:
            raise ConnectionLost("this server has handed over to its standby.")
        if self._syncer is not None:
            self._syncer.check()
        lsn = self.last_lsn + 1
        if self.level:
            head = _RECORD.pack(
                _RECORD_MAGIC,
                record.kind,
                record.flags,
                lsn,
                record.rank,
                record.channel,
                record.seq,
                record.step,
                record.n_tables,
                len(record.body),
                block_checksum(record.body),
                self.durable_lsn,
                0,
            )
            head = head[:_CRC_END] + struct.pack("<I", zlib.crc32(head[:_CRC_END]))
            self._write([head, record.body])
            # After the write: a standby must not hold a record that the file of this server lacks.
            if self.tap is not None:
                self.tap([head, record.body])
        self.last_lsn = lsn
        self.bytes_written += _RECORD.size + len(record.body)
        if self.level == 2:
            self._dirty.set()
        return lsn

    def rotate(self) -> int:
        """Starts a new segment and returns the LSN of the last record before it; the caller holds :attr:`lock`.

        Raises:
            OSError: the disk failed; the old segment stays in use.
        """
        # An empty segment stays in use: a new one would have the same name.
        if self.level and (self._first != self.last_lsn + 1 or self._is_unlinked()):
            if self.level == 2:
                # See [Note: What a machine that died leaves]: at level 2 a segment is durable before the next one
                # begins.
                self._sync_fd()
            self._open_segment()
        self.bytes_written = 0
        return self.last_lsn

    def is_lost(self) -> bool:
        """Returns whether somebody has removed or moved the file that records go to."""
        with self.lock:
            return self._is_unlinked()

    def _is_unlinked(self) -> bool:
        if self._fd < 0:
            return False
        mine = os.fstat(self._fd)
        try:
            there = self._segment(self._first).stat()
        except (FileNotFoundError, NotADirectoryError):
            return True
        return not mine.st_nlink and not os.path.samestat(mine, there)  # some file systems do not count links

    def _segment(self, first: int) -> Path:
        assert self._folder is not None
        return self._folder / f"journal-{first:020d}.log"

    def snapshot_done(self, lsn: int) -> None:
        """Removes the segments in which every record is at most ``lsn``: a snapshot holds them."""
        with self.lock:
            # The snapshot is durable, so the records in it are, whatever the disk did with their own bytes.
            self._durable_lsn = max(self._durable_lsn, lsn)
            self.in_snapshot = lsn
        if self._folder is None:
            return
        segments = _segments(self._folder)
        # A segment ends where the following one begins; the newest is still written and stays.
        for (_, path), (following, _) in zip(segments, segments[1:], strict=False):
            if following <= lsn + 1:
                path.unlink(missing_ok=True)

    def sync(self) -> None:
        """Makes every record of the newest segment so far durable on the machine; appends go on.

        Raises:
            OSError: the disk failed; the journal takes no more records.
        """
        self._sync_once()

    def close(self) -> None:
        """Closes the files."""
        self._closing.set()
        self._dirty.set()
        if self._syncer is not None:
            self._syncer.join()
        # A sync in another thread may be using these files without holding the lock.
        with self._syncing, self.lock:
            try:
                self._sync_fd()
            finally:
                if self._fd >= 0:
                    self._retired.append(self._fd)
                self._fd = -1
                self._close_retired()

    def _open_segment(self) -> None:
        assert self._folder is not None
        own_folder(self._folder)
        path = self._segment(self.last_lsn + 1)
        before = (self._fd, self._position)
        path.unlink(missing_ok=True)  # left by a server that wrote no record into it; a link is not followed
        self._fd = open_own(path, os.O_WRONLY | os.O_EXCL, 0o600)
        self._position = 0
        try:
            self._write([_SEGMENT.pack(_SEGMENT_MAGIC, self.last_lsn + 1)])
            flush(self._folder)  # or a power failure may lose the new name
        except OSError:  # later records belong to the old segment, which is complete
            os.close(self._fd)
            self._fd, self._position = before
            path.unlink(missing_ok=True)
            raise
        self._first = self.last_lsn + 1
        if before[0] >= 0:
            self._retired.append(before[0])

    def _write(self, buffers: Sequence[Buffer]) -> None:
        if self._failed:
            raise PSError(
                f"the journal in {self._folder} is closed after an earlier failure: {self._failed}. Repair the disk "
                "and restart the server; workers resend what it lacks."
            )
        views = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
        written = 0
        total = sum(map(len, views))
        try:
            while written < total:
                count = os.writev(self._fd, views)
                written += count
                while views and count >= len(views[0]):
                    count -= len(views.pop(0))
                if count:
                    views[0] = views[0][count:]
        except OSError as error:
            # Cut off the written part, or the next record would follow half of this one.
            try:
                os.ftruncate(self._fd, self._position)
                os.lseek(self._fd, self._position, os.SEEK_SET)
            except OSError as second:
                # The file ends in half a record now: nothing may be appended to it.
                self._failed = f"{error}; {second}"
            raise PSError(f"the journal in {self._folder} could not be written: {error}. Free some space.") from None
        self._position += total

    def _sync_fd(self) -> None:
        if self._fd >= 0 and self.level:
            try:
                os.fdatasync(self._fd)
            except OSError as error:
                self._failed = _refused(error)
                raise
            if self.level == 2 and not self._failed:
                self._durable_lsn = max(self._durable_lsn, self.last_lsn)

    def _sync_loop(self) -> None:
        while not self._closing.is_set():
            self._dirty.wait()
            # The flag is cleared before the sync, so that a record appended during it asks for the next one.
            self._dirty.clear()
            with contextlib.suppress(OSError):  # noted, and raised by the next append
                self._sync_once()
            # The records of this pause share one fdatasync.
            self._closing.wait(self._sync_interval_s)

    def _sync_once(self) -> None:
        with self._syncing:
            with self.lock:
                fd = self._fd
                lsn = self.last_lsn
                # No other sync can be using these files while _syncing is held.
                self._close_retired()
            if fd < 0:
                return
            try:
                os.fdatasync(fd)
            except OSError as error:
                self._failed = _refused(error)
                raise
            with self.lock:
                if not self._failed:
                    self._durable_lsn = max(self._durable_lsn, lsn)

    def _close_retired(self) -> None:
        while self._retired:
            os.close(self._retired.pop())


def _refused(error: OSError) -> str:
    # The kernel may have dropped the pages that it could not write, and the next fdatasync would not report it again.
    return f"the disk did not take records: {error}"


def _segments(folder: Path) -> list[tuple[int, Path]]:
    found = []
    for path in folder.glob("journal-*.log"):
        number = path.stem.partition("-")[2]
        if number.isascii() and number.isdigit():
            found.append((int(number), path))
    return sorted(found)


def read_journal(
    folder: Path,
    after_lsn: int,
    on_cut: list[str] | None = None,
    *,
    known: int = 0,
    exact: bool = True,
    skips_damage: bool = False,
) -> Iterator[Record]:
    """Yields the records newer than ``after_lsn``; cuts off an incomplete last record.

    Args:
        folder: where the segments are.
        after_lsn: the last record that the snapshot holds.
        on_cut: receives a line for everything that is missing.
        known: the last record that some row of the snapshot holds. A server whose journal ended earlier has
            continued after it.
        exact: whether everything must be on the disk. Otherwise the records after a gap are set aside, see
            [Note: What a machine that died leaves].
        skips_damage: sets aside, too, the records after a promised one that is damaged.

    Raises:
        CheckpointError: a record is gone or damaged that was promised by a later record; with ``exact``, a segment is
            missing, or any but the last is damaged.
    """
    segments = _segments(folder)
    lines = [] if on_cut is None else on_cut
    expected: int | None = None
    damage = ""
    for index, (first, path) in enumerate(segments):
        last = index == len(segments) - 1
        if not last and segments[index + 1][0] <= after_lsn + 1:
            continue  # the snapshot holds all its records; the server was killed before it removed the segment
        wanted = after_lsn + 1 if expected is None else expected
        # Only the first segment may begin earlier. A server that lost its end goes on after ``known``, see recover().
        if (first > wanted if expected is None else first != wanted) and first != known + 1:
            if expected is None:
                raise CheckpointError(
                    f"{path}: the journal starts with record {first}, the snapshot ends with {after_lsn}: the records "
                    "between are gone. Restore the whole folder, or start with an empty one."
                )
            damage = damage or f"{path}: record {expected} should follow, the segment starts with {first}."
            _set_aside([later for _, later in segments[index:]], wanted, lines, damage, exact, skips_damage)
            return
        expected = first
        good = 0
        for record, end in _read_segment(path, first):
            good = end
            if record is not None:
                expected = record.lsn + 1
                if record.lsn > after_lsn:
                    yield record
        size = path.stat().st_size
        damage = f"{path}: record {expected} is damaged, at byte {good} of {size}." if good != size else ""
        if damage and last:
            _end_last(path, good, expected, lines, damage, skips_damage)


def _read_segment(path: Path, first: int) -> Iterator[tuple[Record | None, int]]:
    """Yields the head (as ``None``) and each complete record, with the offset of its end."""
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        if file.read(_SEGMENT.size) != _SEGMENT.pack(_SEGMENT_MAGIC, first):
            return
        yield None, _SEGMENT.size
        while record := _read_record(file.read(_RECORD.size), file.read, first, size - file.tell()):
            first += 1
            yield record, file.tell()


def read_records(data: memoryview, expected: int) -> Iterator[Record]:
    """Yields the records in ``data``, which are numbered on from at most ``expected``; those before it are left out.

    Raises:
        CheckpointError: one is damaged, or the first ones are missing.
    """
    position = 0

    def read(size: int) -> bytes:
        nonlocal position
        taken = bytes(data[position : position + size])
        position += len(taken)
        return taken

    following: int | None = None
    while position < len(data):
        head = read(_RECORD.size)
        # The first record says where the data begin: the sender may repeat records that the caller has.
        number = _RECORD.unpack(head)[3] if len(head) == _RECORD.size and following is None else following
        record = None if number is None else _read_record(head, read, number, len(data) - position)
        if record is None or record.lsn > expected:
            raise CheckpointError(f"record {expected} of the journal did not come, or came damaged.")
        following = record.lsn + 1
        if record.lsn == expected:
            expected += 1
            yield record


def _set_aside(paths: list[Path], wanted: int, lines: list[str], damage: str, exact: bool, skips_damage: bool) -> None:
    """Renames the segments behind a gap that begins with record ``wanted``.

    Raises:
        CheckpointError: the records of the gap were promised, and ``skips_damage`` is not set; or with ``exact``.
    """
    if exact or (not skips_damage and any(_has_promised(path, 0, wanted) for path in paths)):
        raise CheckpointError(f"{damage} {_INSTEAD}")
    lines.append(f"the last seconds before the machine stopped are missing, records from {wanted} on. {damage}")
    for path in paths:
        path.rename(path.with_name(f"{path.name}.lost"))


def _end_last(path: Path, good: int, expected: int, lines: list[str], damage: str, skips_damage: bool) -> None:
    """Cuts the last segment off after ``good`` bytes, where record ``expected`` should begin.

    Raises:
        CheckpointError: the record was promised, and ``skips_damage`` is not set; the file is unchanged.
    """
    if _has_promised(path, good, expected):
        if not skips_damage:
            raise CheckpointError(f"{damage} Whole records follow, so it is no write that was cut off. {_INSTEAD}")
        # A copy, because the truncation below destroys records that a person may still want to recover.
        with open_plain(path) as file, replacing(path.with_name(f"{path.name}.lost"), 0o600) as kept:
            shutil.copyfileobj(file, kept)
        lines.append(f"{damage} It and all records after it are left out; they are kept in {path.name}.lost")
    else:
        lines.append(f"{path.name}: {path.stat().st_size - good} bytes of an incomplete record were cut off")
    os.truncate(path, good)


def _has_promised(path: Path, start: int, expected: int) -> bool:
    """Returns whether a record after byte ``start`` was written when ``expected`` was promised, or is that one."""
    with open_plain(path) as file:
        data = file.read()
    at = start
    while (at := data.find(_RECORD_MAGIC, at)) >= 0:
        head = data[at : at + _RECORD.size]
        # Search on at the next byte, not behind the record: the match may lie inside a body.
        at += 1
        if len(head) == _RECORD.size and zlib.crc32(head[:_CRC_END]) == int.from_bytes(head[_CRC_END:], "little"):
            lsn, size, checksum, promised = (_RECORD.unpack(head)[field] for field in (3, 9, 10, 11))
            body = memoryview(data)[at - 1 + len(head) :][:size]
            is_whole = len(body) == size and block_checksum(body) == checksum
            if (lsn > expected and promised >= expected) or (lsn == expected and is_whole):
                return True
    return False


def _read_record(head: bytes, read: Callable[[int], bytes], expected: int, left: int) -> Record | None:
    if len(head) != _RECORD.size:
        return None
    magic, kind, flags, lsn, rank, channel, seq, step, n_tables, size, checksum, _, crc = _RECORD.unpack(head)
    # The size is compared with the rest of the file before the body is read: a wrong size allocates nothing.
    if magic != _RECORD_MAGIC or crc != zlib.crc32(head[:_CRC_END]) or lsn != expected or size > left:
        return None
    body = read(size)
    if len(body) != size or block_checksum(body) != checksum:
        return None
    return Record(kind, lsn, rank, channel, seq, step, n_tables, flags, body)
