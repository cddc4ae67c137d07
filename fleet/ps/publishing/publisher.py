"""Publisher: the thread of a server that hands its changed rows to a sink, for as long as the server lives.

[Note: No hole, and no older row over a newer one]
A sink keeps the rows together with its position: the history (which journal) and the last record they hold. A delta
says which position it continues, and a sink refuses it otherwise (``check_position``). The server notes in memory, in
snapshots and by its replay which rows changed after the last position that the sink is known to have reached. So after
the death of anybody at any point the publisher asks the sink where it stands:

- at the server's history, between the confirmed record and the last one: it has at least the confirmed rows, and the
  rows that it lacks are noted. The next delta continues there. An answer that was lost is this case, too.
- at an earlier history, nowhere, or at a record before the confirmed one (its data were removed or restored): the next
  delta is whole, and replaces every row of this server.
- at the server's history, after the journal's last record: the server's folder was restored from an older copy. A new
  history begins, and it begins whole.
- at a later history: another server has taken this one's place. This one publishes no more.

A history is numbered one above the sink's, so it begins once the sink has answered for the first time.
A journal of level 1 does not survive the machine; after a reboot a new history begins.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from fleet.common.own_thread import OwnThread
from fleet.errors import ConfigError, FleetError, PSError
from fleet.ps.publishing.delta import Delta, Sink, StaleDelta
from fleet.ps.publishing.publication import Publication, open_sink
from fleet.ps.publishing.row_cut import cut, published_tables, waiting_rows
from fleet.ps.publishing.versions import Mark
from fleet.ps.server.job_state import MOST_WAITING
from fleet.ps.server.key_recorder import GONE, TOUCHED
from fleet.ps.server.server_state import ServerState

_FIRST_RETRY_S = 0.2
_LONGEST_RETRY_S = 5.0
_SLOW = "it is slow"  # why a sink that raises nothing does not take rows
_TELL_EVERY_S = 30.0


class _Overtaken(PSError):
    """The sink belongs to a later publisher."""


class Publisher:
    """Publishes the rows of one server.

    Args:
        state: the server.
        publication: what goes where.
        server: which server of the job this is.
        notify: receives a line when the sink is away, and when it is back.
        most_waiting: ids that are noted while the sink is away; beyond that the next delta is whole.
    """

    def __init__(
        self,
        state: ServerState,
        publication: Publication,
        *,
        server: int,
        notify: Callable[[str], None],
        most_waiting: int = MOST_WAITING,
    ) -> None:
        self._state = state
        self._publication = publication
        self._server = server
        self._notify = notify
        state.job.published.most_waiting = most_waiting
        self._sink: Sink = open_sink(publication, state.job.name)
        self._previous: int | None = None  # the sink's watermark in this history, None until it is asked
        self._failing_since: float | None = None
        self._reason = _SLOW  # why the sink did not store the last delta
        self._told = 0.0
        self._publishing = threading.Lock()  # of a cut and its way to the sink
        self._wake = threading.Condition()
        self._stopping = self._finishing = self._overtaken = False
        self._thread = OwnThread(self._run, name="publisher", say=self._say)

    def start(self) -> None:
        """Starts the thread; see :meth:`open`."""
        self.open()
        self._thread.start()

    def open(self) -> None:
        """Prepares to publish, and continues the history of an earlier run where the journal still has it.

        Raises:
            ConfigError: the sink holds other rows under these names, or can never take these.
        """
        state = self._state
        boot, level = state.job.published.kept_for
        # Below level 2 a reboot may have lost records that the sink has seen: the next ones would repeat their numbers.
        is_lost = level < 2 and boot != boot_id()
        if state.job.published.history and (level != state.journal.level or is_lost):
            self._say("the machine or the level of the journal is another than before: all rows are published anew")
            state.begin_history("", boot_id())
        try:
            self._sink.position(self._server)
        except ConfigError:
            raise  # it can never take these rows
        except Exception as error:
            self._note_failure(error)

    def stop(self) -> None:
        """Ends the thread; the next process with the server's folder publishes the rows that the sink lacks."""
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        if self._thread.is_alive():
            self._thread.join(5.0)
        if not self._thread.is_alive():
            with suppress(Exception):
                self._sink.close()

    def finish(self, limit_s: float = 30.0) -> None:
        """Publishes the remaining rows, once nothing changes them any more.

        Raises:
            PSError: the sink did not store them within ``limit_s``; the server's folder still has all of them.
        """
        with self._wake:
            self._finishing = True
            self._wake.notify_all()
        self._thread.join(limit_s)
        self._thread.check()
        rows = waiting_rows(self._state)
        if self._thread.is_alive() and not self._overtaken:
            raise PSError(
                f"parameter server {self._server}: {self._publication.address} did not take the last {rows} rows "
                f"within {limit_s:.0f} s ({self._reason}). Its folder (FLEET_PS_FOLDER) keeps them: start the server "
                "again with it, and it publishes them and ends; or remove the folder."
            )

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        retry_s = _FIRST_RETRY_S
        while not self._stopping:
            begun = time.monotonic()
            # Read before publishing: only a round that began after finish() proves that nothing is left.
            finishing = self._finishing
            try:
                is_clean = self.publish_once()
            except _Overtaken as error:
                self._overtaken = True
                self._say(str(error))
                return
            except Exception as error:  # whatever a sink raises: training goes on
                self._note_failure(error)
                pause_s = retry_s
                retry_s = min(2 * retry_s, _LONGEST_RETRY_S)
            else:
                if published_tables(self._state, self._publication.tables):  # without one nobody has asked the sink
                    self._note_success()
                retry_s = _FIRST_RETRY_S
                if finishing and is_clean:
                    return
                pause_s = 0.0 if finishing else max(0.0, begun + self._publication.every_s - time.monotonic())
            with self._wake:
                if self._finishing == finishing and not self._stopping:
                    self._wake.wait(pause_s)

    def publish_once(self) -> bool:
        """Publishes the rows that have changed; returns whether a further call would find nothing to publish.

        Raises:
            Exception: the sink's; the rows that it did not store stay noted.
        """
        with self._publishing:
            return self._publish()

    def mark(self, mark: Mark) -> None:
        """Gives the rows of this moment a name at the sink, once it has them; waits for a sink that is away.

        Raises:
            ConfigError: the sink keeps no versions, or refuses this one; or no table is published.
            PSError: this server stops, or another has taken its place.
        """
        self._publication.check_versions()
        if not published_tables(self._state, self._publication.tables):
            raise ConfigError(f"version {mark.name!r} names published rows, and this job has no sparse table.")
        published = self._state.job.published
        target = self._state.journal.last_lsn
        retry_s = _FIRST_RETRY_S
        while True:
            try:
                with self._publishing:
                    while not self._publish() and not self._has_reached(target):
                        pass
                    position = published.history, published.confirmed
                    self._sink.mark(self._server, mark, position)  # type: ignore[attr-defined]  # a folder, see above
                return
            except (ConfigError, _Overtaken):
                raise
            except Exception as error:  # whatever a sink raises: it may take the rows later
                self._note_failure(error)
                self._previous = None  # the sink is asked where it stands
            with self._wake:
                if self._stopping:
                    raise PSError(f"parameter server {self._server} stops; version {mark.name!r} is not marked.")
                self._wake.wait(retry_s)
            retry_s = min(2 * retry_s, _LONGEST_RETRY_S)

    def _has_reached(self, record: int) -> bool:
        return self._previous is not None and self._previous >= record and not self._state.job.published.whole

    def _publish(self) -> bool:
        state = self._state
        if not published_tables(state, self._publication.tables):
            return True
        previous = self._resume() if self._previous is None else self._previous
        try:
            delta = cut(state, self._publication.tables, previous, server=self._server)
            if delta is None:
                # The cut has moved the changed ids aside: nothing was written, so nothing can come back.
                with state.job.changed:
                    state.job.recorder.forget(TOUCHED, GONE)
                    state.job.published.writing_since = 0.0
                return not (state.job.published.loading or state.job.published.whole)
            if state.journal.level == 2:
                state.journal.sync()  # a sink never holds a record that a machine could lose
            self._sink.write(delta)
        except BaseException:
            self._take_back()
            raise
        self._confirm(delta)
        return False

    def _resume(self) -> int:
        """Asks the sink where it stands, see the Note; returns the record after which the next delta continues."""
        state = self._state
        job = state.job
        held = self._sink.position(self._server)
        published = job.published
        history = published.history
        if history and held is not None and held[0] > history:
            raise _Overtaken(
                f"{self._publication.address} belongs to another parameter server {self._server} of job {job.name!r}, "
                "which started later; this one publishes no more. If it should, give its job another name "
                "(PADDLE_JOB_ID)"
            )
        if not history or (held is not None and held[0] == history and held[1] > state.journal.last_lsn):
            number = 1 if held is None else _number(held[0]) + 1
            state.begin_history(f"{number:08d}-{secrets.token_hex(8)}", boot_id())
            held = None
        with job.changed:
            if held is None or held[0] != published.history or held[1] < published.confirmed:
                published.whole = True
                return 0
            published.confirmed = held[1]
            return held[1]

    def _confirm(self, delta: Delta) -> None:
        job = self._state.job
        with job.changed:
            job.recorder.forget(TOUCHED, GONE)
            published = job.published
            published.writing_whole = False
            published.writing_since = 0.0
            published.confirmed = self._previous = delta.watermark
            published.step = delta.step
            counts = published.counts
            counts["deltas"] += 1
            counts["rows"] += sum(len(table.keys) for table in delta.tables)
            counts["deletions"] += sum(len(table.deleted) for table in delta.tables)

    def _take_back(self) -> None:
        """Notes the rows of the last cut as changed again; the sink is asked for its position before the next delta."""
        job = self._state.job
        with job.changed:
            published = job.published
            published.whole = published.whole or published.writing_whole
            published.oldest = published.writing_since or published.oldest
            published.writing_whole = False
            published.writing_since = 0.0
            job.recorder.put_back(TOUCHED, GONE)
        self._previous = None

    # -- messages ------------------------------------------------------------------------------------------------

    def _note_failure(self, error: Exception) -> None:
        now = time.monotonic()
        self._state.job.published.counts["failures"] += 1
        if self._failing_since is None:
            self._failing_since = now
        text = self._reason = str(error) if isinstance(error, FleetError) else _text_of(error)
        if isinstance(error, StaleDelta) or now - self._told < _TELL_EVERY_S:
            return
        self._told = now
        self._say(
            f"{self._publication.address} has not taken rows for {now - self._failing_since:.0f} s: {text}; "
            f"{waiting_rows(self._state)} rows wait, training goes on"
        )

    def _note_success(self) -> None:
        since = self._failing_since
        self._failing_since = None
        self._reason = _SLOW
        if since is not None and self._told:
            self._say(f"{self._publication.address} takes rows again after {time.monotonic() - since:.0f} s")
        self._told = 0.0

    def _say(self, line: str) -> None:
        self._notify(f"parameter server {self._server}: {line}")


def boot_id() -> str:
    """Returns an identity of the machine's run since its last boot; empty where the system has none."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _text_of(error: Exception) -> str:
    """Returns the kind of an error and its text; the repr of the redis package has no text."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def _number(history: str) -> int:
    number = history.partition("-")[0]
    return int(number) if number.isascii() and number.isdigit() else 0
