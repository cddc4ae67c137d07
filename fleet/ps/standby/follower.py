"""Follower: a standby; it keeps a copy of one server's state and takes over when the workers ask for it."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fleet.common.own_thread import OwnThread
from fleet.common.plain_files import open_own
from fleet.errors import ConfigError, FleetError, PSError
from fleet.ps.files.own_folder import own_folder
from fleet.ps.server.journal import read_records
from fleet.ps.server.reader_requests import Readable
from fleet.ps.server.server_config import ServerConfig
from fleet.ps.server.server_state import ServerState
from fleet.ps.server.snapshot import drop_snapshots, read_snapshot, write_snapshot
from fleet.ps.standby.carried import BEAT_S, LINE_S, Carried, send_piece
from fleet.ps.standby.epoch_file import EpochFile
from fleet.ps.wire.auth import check_secret, prove_to_server
from fleet.ps.wire.messages import Header, MessageError, Op, control_body, decode_control, decode_header, encode_header
from fleet.ps.wire.sealed import Sealed
from fleet.ps.wire.transport import Transport

QUIET_S = 0.1  # a line must be broken for this long before the standby takes over
ASK_S = 1.0  # how long a worker's question waits for the questions of the others
_RETRY_S = 0.2


class Follower:
    """The standby's side of the pair.

    Args:
        config: of the standby, with the server as ``peer``.
        transport: how connections are made.
        epoch: the number in the standby's folder.
        make_state: makes an empty state.
        notify: receives each line meant for the user.
        patience_s: the job is over when the server is away for longer and this standby has not joined yet.
    """

    def __init__(
        self,
        config: ServerConfig,
        transport: Transport,
        epoch: EpochFile,
        make_state: Callable[[], ServerState],
        notify: Callable[[str], None],
        patience_s: float | None = None,
    ) -> None:
        assert config.folder is not None
        self._config = config
        self._transport = transport
        self._epoch = epoch
        self._folder = config.folder
        self._make_state = make_state
        self._notify = notify
        self._patience_s = patience_s
        self._changed = threading.Condition()
        self._votes: dict[object, tuple[int, int]] = {}  # rank of a worker and the epoch that it knows, while it asks
        self._line: Sealed | None = None
        self._broken_since = time.monotonic()
        self._received = 0
        self._heard = time.monotonic()  # when everything that the server had sent was here
        self._closing = False
        self._thread: OwnThread | None = None
        self.state: ServerState | None = None
        self.joined = self.promoted = self.ended = False

    def start(self) -> None:
        """Drops the rows in the folder and begins to follow; the server sends all of them anew."""
        drop_rows(self._folder)
        self._epoch.write(max(self._epoch.epoch, 1), leads=False)  # from here on it knows itself as a standby
        self._thread = OwnThread(self._run, name="standby", say=self._say, then=self._wake)
        self._thread.start()

    def wait(self) -> bool:
        """Waits until the standby is promoted (True) or the job is over (False)."""
        with self._changed:
            self._changed.wait_for(lambda: self.promoted or self.ended or self._closing or self._has_failed())
        if self._thread is not None:
            self._thread.check()
        return self.promoted

    def _has_failed(self) -> bool:
        return self._thread is not None and self._thread.failure is not None

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def forget_job(self) -> None:
        """Ends this standby, unless it serves: the job is over."""
        with self._changed:
            self.ended = not self.promoted
            self._changed.notify_all()

    def close(self) -> None:
        """Stops following."""
        with self._changed:
            self._closing = True
            line = self._line
            self._changed.notify_all()
        if line is not None:
            line.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5.0)
        if not self.promoted and self.state is not None:
            self.state.journal.close()

    # -- following -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        reported = ""
        while not self._is_over():
            try:
                self._follow()
            except (FleetError, OSError) as error:
                reason = f"{error}"
                # The same reason comes back at every try, and is said once.
                if reason != reported and not self._is_over():
                    reported = reason
                    self._say(f"no line to {self._config.peer}: {reason}")
            self._break()
            with self._changed:
                self._changed.wait_for(self._is_over, _RETRY_S)

    def _is_over(self) -> bool:
        return self.promoted or self.ended or self._closing

    def _hang_up(self) -> None:
        """Closes the line, if there is one; the lock is held."""
        if self._line is not None:
            self._line.close()
            self._line = None
            self._broken_since = time.monotonic()

    def _break(self) -> None:
        with self._changed:
            self._hang_up()
            state = self.state
            if self.joined and state is not None and state.job.ended():
                self.ended = True  # every worker said goodbye before the server left
            away_s = time.monotonic() - self._broken_since
            if self._patience_s is not None and not self.joined and away_s > self._patience_s:
                self._say(f"{self._config.peer} has been away for {away_s:.0f} s, and nothing of it is here: it ends")
                self.ended = True
            self._changed.notify_all()

    def _follow(self) -> None:
        line = _connect(self._config, self._transport)
        try:
            line.send(*_message(self._config, probe=False), LINE_S)
            standing = decode_control(self._receive(line)[1])
            if standing.get("deposed") or not standing.get("leads") or standing["epoch"] < self._epoch.epoch:
                raise PSError("it does not serve workers.")
            with self._changed:
                if self._is_over():
                    return
                self._line = line
                if standing["epoch"] > self._epoch.epoch:
                    self.joined = False  # the server has gone on without this standby
            OwnThread(self._confirm, line, name="standby beats", say=self._say, then=line.close).start()
            self._receive_all(line, standing["epoch"])
        finally:
            line.close()

    def _receive(self, line: Sealed) -> tuple[Header, memoryview]:
        # LINE_S without a byte is a broken line: the server beats when it has nothing to send.
        header = decode_header(line.receive_header(10 * LINE_S, LINE_S), self._config.max_body_bytes)
        body = memoryview(bytearray(header.body_bytes))
        line.receive_body(body, 10 * LINE_S)
        if header.op is not Op.FOLLOW:
            raise MessageError(f"{line.peer}: a message of kind {header.op.name} where a standby follows.")
        if header.step == Carried.REFUSED:
            raise PSError(str(decode_control(body).get("error")))
        return header, body

    def _receive_all(self, line: Sealed, epoch: int) -> None:
        draft = self._folder / ".standby.tmp"
        shutil.rmtree(draft, ignore_errors=True)
        state: ServerState | None = None
        while not self._is_over():
            header, body = self._receive(line)
            if header.step == Carried.FILE:
                _write_piece(draft, body)
            elif header.step == Carried.SNAPSHOT:
                state = self._take_snapshot(draft, bytes(body).decode())
            elif header.step == Carried.RECORDS and state is not None:
                self._replay(state, body)
            elif header.step == Carried.JOINED:
                # The server's epoch counts only from here: before, a promotion from it would lack promised records.
                self._epoch.write(epoch, leads=False)
                with self._changed:
                    self.joined = True
            elif header.step == Carried.TAKE_OVER:
                self._take_over(line)
            elif header.step == Carried.END:
                with self._changed:
                    self.ended = True
                    self._changed.notify_all()
            if state is not None:  # before the snapshot is here, the rows are from an earlier line
                self._heard = time.monotonic()

    def _take_snapshot(self, draft: Path, name: str) -> ServerState:
        """Makes the received snapshot the state of this standby, in memory and in its folder."""
        if not name.startswith("snapshot-") or Path(name).name != name:
            raise MessageError(f"a snapshot of the name {name!r}.")
        with self._changed:  # from here on there is no state to be promoted with
            before = self.state
            self.state = None
            self.joined = False
        if before is not None:
            before.journal.close()
        drop_rows(self._folder)
        draft.rename(self._folder / name)
        state = self._make_state()
        lsn, _, self._stamps = read_snapshot(self._folder / name, state)
        state.journal.last_lsn = state.journal.in_snapshot = lsn
        state.journal.open()
        # A chunk of the snapshot may hold records after ``lsn``. Up to this one _replay() asks the stamps, so that no
        # row gets a change twice.
        self._known = max([lsn, *(stamp.latest for stamp in self._stamps.values())])
        with self._changed:
            self.state = state
            self._received = lsn
            self._changed.notify_all()
        self._say(f"follows {self._config.peer} from record {lsn} on, {len(state.tables)} tables")
        return state

    def _replay(self, state: ServerState, data: memoryview) -> None:
        # Into the journal before the tables, as on the server: a restart then has every record that was confirmed.
        for record in read_records(data, state.journal.last_lsn + 1):
            with state.journal.lock:
                state.journal.append(record)
            state.replay(record, self._stamps if record.lsn <= self._known else {})
        with self._changed:
            self._received = state.journal.last_lsn
            self._changed.notify_all()
        if state.journal.bytes_written > self._config.snapshot_bytes:
            write_snapshot(state, self._folder)

    def _confirm(self, line: Sealed) -> None:
        """Confirms the last record that is here, whenever it changes and every BEAT_S."""
        confirmed = 0
        try:
            while (reached := self._next_confirmed(line, confirmed)) is not None:
                confirmed = reached
                send_piece(line, Carried.BEAT, seq=confirmed)
        except PSError:
            line.close()

    def _next_confirmed(self, line: Sealed, confirmed: int) -> int | None:
        """Returns the last record here once it is above ``confirmed``, or after BEAT_S; None when the line has ended.

        Without a state that is 0: the server must not take the records of an earlier line for its snapshot's.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._received > confirmed or self._line is not line, BEAT_S)
            if self._line is not line:
                return None
            return self._received if self.state is not None else 0

    def readable(self) -> Readable | str:
        """Returns the state for readers, or the reason why there is no state to read."""
        with self._changed:
            if self.state is None:
                return "it has not got the rows from its server yet"
            age_s = 0.0 if self.promoted else time.monotonic() - self._heard
            return Readable(self.state, self._epoch.epoch, self._received, self._received, age_s)

    # -- promotion -----------------------------------------------------------------------------------------------

    def ask(self, rank: int, known: int) -> dict[str, Any] | None:
        """Returns why this standby does not serve the worker ``rank``; None once it is promoted."""
        with self._changed:
            # By question and not by rank: a worker may have several at a time, and each leaves on its own.
            question = object()
            self._votes[question] = (rank, known)
            self._changed.notify_all()
            deadline = time.monotonic() + ASK_S
            while not self._is_over() and self._decide() and self._line is None and self.joined:
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(min(left, QUIET_S / 4))
            reason = None if self.promoted else self._decide() or "it is ending"
            del self._votes[question]
        return None if reason is None else {"standby": reason}

    def _decide(self) -> str:
        """Promotes this standby if it may be; returns why not. The lock is held."""
        reason = self._obstacle()
        if not reason and not self.promoted:
            self._promote()
        return reason

    def _take_over(self, line: Sealed) -> None:
        """Serves from now on: the server has sent its last record on this line."""
        with self._changed:
            if self._line is line and self.joined and self.state is not None:
                self._promote()

    def _promote(self) -> None:
        # The epoch grows by two, for the server may take the next one at the same time (Leader.go_alone). It is on the
        # disk before anybody is served: after a restart this server must know that it leads.
        self._epoch.write(self._epoch.epoch + 2, leads=True)
        self.promoted = True
        self._changed.notify_all()

    def _obstacle(self) -> str:
        if self.promoted:
            return ""
        epoch = self._epoch.epoch
        known = {known for _, known in self._votes.values()}
        # The conditions of [Note: Which of two servers].
        if self._line is not None:
            return f"the server at {self._config.peer} still feeds it"
        if max(known, default=0) > epoch:
            # The standby remembers it, for the worker that knows may not ask again.
            self.joined = False
            return "the server went on without it"
        if self.state is None or not self.joined:
            return "it has not got everything from the server yet, or was given up by it"
        if time.monotonic() - self._broken_since < QUIET_S:
            return "the line to the server broke a moment ago"
        asking = {rank for rank, _ in self._votes.values()}
        absent = sorted({w.rank for w in self.state.job.workers if w.state != "gone"} - asking)
        if absent:
            return f"workers {absent} have not asked for it"
        if epoch not in known:
            return "every worker was started again, and none knows whether the server went on without it"
        return ""

    def standing(self, *, stay: bool = False) -> dict[str, Any]:
        """Returns the standing of this standby; with ``stay`` it drops the line, so no later order on it counts."""
        with self._changed:
            if stay and not self.promoted:
                self._hang_up()
            standing = {"epoch": self._epoch.epoch, "leads": self.promoted, "joined": self.joined, "deposed": False}
        return {**standing, "stays": stay and not self.promoted}

    def _say(self, line: str) -> None:
        self._notify(f"standby of parameter server {self._config.index}: {line}")


def _write_piece(draft: Path, body: memoryview) -> None:
    size = int.from_bytes(body[:2], "big")
    name = bytes(body[2 : 2 + size]).decode()
    # The name comes from the line: it must stay in the draft and be a file of a snapshot.
    if Path(name).name != name or not name.endswith((".bin", ".rows")) or name.startswith("."):
        raise MessageError(f"a file of a snapshot of the name {name!r}.")
    own_folder(draft)
    with open(open_own(draft / name, os.O_WRONLY | os.O_APPEND, 0o600), "ab") as file:
        file.write(body[2 + size :])


def drop_rows(folder: Path) -> None:
    """Removes snapshots and journal from a server's folder: another process has newer rows."""
    drop_snapshots(folder)
    shutil.rmtree(folder / "journal", ignore_errors=True)


def _message(config: ServerConfig, **asked: bool) -> tuple[bytes, list[bytes]]:
    """Returns a FOLLOW, which asks for the stream or, with ``probe``, for the standing of the other server alone."""
    own = {"index": config.index, "num_workers": config.num_workers, "job": config.job, "at": config.endpoint}
    body = control_body({**own, **asked})
    return encode_header(Header(Op.FOLLOW, body_bytes=len(body))), [body]


def _connect(config: ServerConfig, transport: Transport) -> Sealed:
    """Returns a proven connection to the other server of the pair."""
    connection = transport.connect(config.peer, 1.0)
    try:
        return prove_to_server(connection, config.peer, check_secret(config.peer, config.secret), 1.0)
    except BaseException:
        connection.close()
        raise


def ask_standing(
    config: ServerConfig, transport: Transport, *, stay: bool = False, over: bool = False
) -> dict[str, Any] | None:
    """Returns the standing of the other server of the pair; None when it is away.

    Args:
        config: of this server, with the other one as ``peer``.
        transport: how the connection is made.
        stay: a standby obeys no order that is still on its line.
        over: tells the other server that the job is over.

    Raises:
        ConfigError: it belongs to another job.
    """
    try:
        line = _connect(config, transport)
    except PSError:
        return None
    try:
        line.send(*_message(config, probe=True, stay=stay, over=over), LINE_S)
        header = decode_header(line.receive_header(LINE_S, LINE_S))
        body = memoryview(bytearray(header.body_bytes))
        line.receive_body(body, LINE_S)
        answer = decode_control(body)
    except PSError:
        return None
    finally:
        line.close()
    if header.step == Carried.REFUSED:
        raise ConfigError(f"parameter server {config.index}: {config.peer}: {answer.get('error')}")
    return answer or None
