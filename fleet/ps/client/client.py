"""Client: a worker's view of all parameter servers as one.

Every call goes to all servers at once, one message per server for all tables. ``pull`` and ``push`` return a ticket
immediately; ``wait`` returns the result. Two requests may be in progress, so the next batch's rows can be pulled
while this one is computed.

::

    client = Client(ClientConfig(endpoints=["127.0.0.1:4000"], rank=0, num_workers=1))
    client.open()
    client.create_tables({0: SparseTableConfig("ads", 16)})
    rows = client.wait(client.pull({0: ids}))[0]
    client.wait(client.push({0: Gradient(ids, gradients)}))
    client.goodbye()
"""

from __future__ import annotations

import itertools
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from fleet.common.own_thread import OwnThread
from fleet.errors import ConfigError, PSError
from fleet.ps.client.client_config import ClientConfig
from fleet.ps.client.connecting import wait_for_servers
from fleet.ps.client.link import Link, Request
from fleet.ps.client.shards import (
    Gradient,
    Keys,
    Rows,
    TableMap,
    Take,
    Target,
    body_of_specs,
    rows_of_answer,
    shares_of_change,
    shares_of_pull,
)
from fleet.ps.table.dense_table import DenseTableConfig
from fleet.ps.table.layout import SparseTableConfig
from fleet.ps.wire.messages import (
    Header,
    MessageError,
    MessageFlag,
    Op,
    TablePart,
    control_body,
    decode_control,
    each_table,
    encode_parts,
    places_of_rows,
)
from fleet.ps.wire.positions import Positions, positions_tail
from fleet.ps.wire.row_form import Remainders, wire_parts
from fleet.ps.wire.transport import SocketTransport, Transport

TakeChanged = Callable[[Mapping[int, tuple[Keys, Rows]]], None]
_LOOK_S = 0.2  # how often a worker looks for servers that are lost
_ASK_S = 0.1  # how often it asks the standbys of those
_DEPUTY_START_S = 5.0  # a deputy takes over only where all servers answer


class NothingLoaded(PSError):  # noqa: N818
    """A save was refused before any server had loaded a part of it."""


@dataclass(slots=True)
class Ticket:
    """Requests in progress; :meth:`fleet.ps.client.client.Client.wait` returns their result.

    After a pull, ``reached`` is the step up to which the answers hold every worker's gradients, at least; ``given`` are
    the tables whose values the answers brought.
    """

    requests: list[tuple[Link, Request]] = field(default_factory=list)
    result: dict[int, Any] = field(default_factory=dict)
    done: bool = False
    reached: int | None = None
    given: set[int] = field(default_factory=set)


def fill(
    share: list[tuple[TablePart, Target]], ticket: Ticket, changed: TakeChanged | None = None
) -> Callable[[Header, memoryview], None]:
    """Returns a function that writes one server's answer to its targets, and hands over rows that come with ids."""

    def take(header: Header, body: memoryview) -> None:
        # The servers answer for different steps; only the least of them holds for all rows.
        ticket.reached = header.step if ticket.reached is None else min(ticket.reached, header.step)
        answered = rows_of_answer(header, body)
        if changed is not None:
            found = [(part.table_id, part.ids, part.rows) for part in each_table(answered)]
            changed({key: (ids, rows) for key, ids, rows in found if ids is not None and rows is not None})
            answered = [part for part in answered if part.ids is None]
        if len(answered) != len(share):
            raise MessageError(f"{len(answered)} tables in the answer to a pull of {len(share)}.")
        for part, (asked, target) in zip(answered, share, strict=True):
            if part.table_id != asked.table_id or part.n != asked.n * asked.dim or part.rows is None:
                raise MessageError(f"the answer for table {asked.table_id} has another size.")
            rows = part.rows.reshape(asked.n, asked.dim)
            ticket.given.add(part.table_id)
            if callable(target):
                target(rows.reshape(-1))
            elif isinstance(target, tuple):
                target[0][target[1]] = rows
            else:
                target[:] = rows

    return take


class Client:
    """All servers, as one worker sees them; safe for several threads, which take turns.

    Args:
        config: the worker's side.
        transport: how connections are made; TCP by default.
        notify: receives each line meant for the user.
        client_id: of the process, which may have several clients.
        remainders: what int8 gradients leave behind, of all clients of the process.
        look_after: called with the ranks that a server waits for, every few seconds while this worker waits for the
            server; may raise.
    """

    def __init__(
        self,
        config: ClientConfig,
        *,
        transport: Transport | None = None,
        notify: Callable[[str], None] = print,
        client_id: int | None = None,
        remainders: Remainders | None = None,
        look_after: Callable[[Sequence[int]], None] = lambda ranks: None,
    ) -> None:
        self.config = config
        self._remainders = remainders or Remainders()
        self._half = MessageFlag.NONE if config.wire == "float32" else MessageFlag.BFLOAT16
        self.tables: dict[int, TableMap] = {}
        self.step = 0  # steps pushed by this worker
        self._transport = transport or SocketTransport()
        self.notify = notify
        self.client_id = client_id or secrets.randbits(64) | 1
        self._links = [
            Link(config, index, self.client_id, self._transport, notify) for index in range(len(config.endpoints))
        ]
        for link in self._links:
            link.look_after = look_after
        self._barriers: dict[str, int] = {}
        self._questions = 0
        self._closing = threading.Event()
        self._heart: OwnThread | None = None

    # -- start and end -------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Waits for the servers and introduces this worker to them.

        A restarted worker that does not call :meth:`load_state_dict` continues after the last step on the servers.
        """
        config = self.config
        wait_for_servers(
            config.endpoints,
            self._transport,
            notify=self.notify,
            timeout_s=config.start_timeout_s,
            interval_s=config.retry_interval_s,
            others=[config.others(index) for index in range(len(config.endpoints))],
        )
        welcomes = [link.open() for link in self._links]
        for link, welcome in zip(self._links, welcomes, strict=True):
            if welcome["index"] != link.index:
                raise PSError(
                    f"{link.name} is number {welcome['index']}. List the servers in the same order everywhere."
                )
        modes = {(welcome["mode"], welcome["staleness"]) for welcome in welcomes}
        if len(modes) > 1:
            raise PSError(f"the parameter servers run in different modes: {sorted(map(str, modes))}. Start them alike.")
        self.step = max(self.step, self._steps_had(welcomes))
        if config.heartbeat:
            lease_s = min(float(welcome["lease_s"]) for welcome in welcomes)
            self._heart = OwnThread(self._beat, lease_s / 4, name="lease", say=self.notify)
            self._heart.start()

    def _steps_had(self, welcomes: Sequence[Mapping[str, Any]]) -> int:
        """Returns the steps that this rank need not push again.

        Where pulls wait for steps, all servers must have them: a server without one would wait for it,
        and this worker for the server. The others recognise a push that comes twice.
        """
        if self.staleness is None:
            return max(int(welcome["clock"]) for welcome in welcomes)
        return min(max(int(welcome["clock"]), int(welcome["applied_step"])) for welcome in welcomes)

    @property
    def staleness(self) -> int | None:
        """How many steps a pull may be behind; 0 in sync mode, None without bound."""
        welcome = self._links[0].welcome
        return 0 if welcome.get("mode") == "sync" else welcome.get("staleness")

    def welcomes(self) -> list[dict[str, Any]]:
        """Returns the answer of each server to this worker's HELLO."""
        return [link.welcome for link in self._links]

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that a checkpoint of this worker must hold."""
        return {"step": self.step, "barriers": dict(self._barriers), "questions": self._questions}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes back to a checkpoint: steps that the servers have had from this rank are not applied again."""
        self.step = int(state["step"])
        self._barriers = {str(name): int(number) for name, number in state["barriers"].items()}
        self._questions = int(state["questions"])

    def goodbye(self) -> None:
        """Tells the servers that this worker has finished, and closes."""
        self.flush()
        self._closing.set()  # or the lease thread might reconnect to a server that this worker has left
        self._all(Op.GOODBYE)
        self.close()

    def stop_servers(self) -> None:
        """Tells the servers to end now, whatever the other workers do."""
        self._all(Op.STOP)

    def deputy(self, rank: int, channel: int, client_id: int) -> Client:
        """Returns a client, not open, that pushes in the name of worker ``rank``, which was lost.

        The servers take it while the worker's lease is over; the worker's next process makes them refuse it.
        """
        config = replace(self.config, rank=rank, channel=channel, deputy=True, start_timeout_s=_DEPUTY_START_S)
        return Client(config, transport=self._transport, notify=self.notify, client_id=client_id)

    def close(self) -> None:
        """Closes the connections; the servers wait for this worker until its lease ends."""
        self._closing.set()
        for link in self._links:
            link.close()
        if self._heart is not None:
            self._heart.join()

    def flush(self, timeout_s: float | None = None) -> None:
        """Waits until every change is as durable as the servers' journal level promises (level 0: immediately)."""
        limit = self.config.deadline_s if timeout_s is None else timeout_s
        for link in self._links:
            if link.welcome.get("level") and not link.flush(limit):
                raise PSError(f"{link.name} has not made its journal durable within {limit:g} s. Look at its disk.")

    # -- tables --------------------------------------------------------------------------------------------------

    def create_tables(
        self, configs: Mapping[int, SparseTableConfig | DenseTableConfig], routing: str = "range"
    ) -> None:
        """Creates the tables on the servers, or checks that existing ones are the same.

        Args:
            configs: by table id; dense ones with their total size.
            routing: which server an id goes to, see :func:`fleet.ps.table.partition.servers_of_keys`.

        Raises:
            ConfigError: two tables of one kind have the same name, and would have the same files in a save.
        """
        _check_names({**{key: table.config for key, table in self.tables.items()}, **configs})
        count = len(self._links)
        maps = {key: TableMap(key, config, count, routing) for key, config in configs.items()}
        requests = []
        for link in self._links:
            body = body_of_specs({str(key): table.spec(link.index) for key, table in maps.items()})
            requests.append((link, link.submit(Request(Op.CREATE, [body]))))
        self.wait(Ticket(requests))
        # Known here only after every server has made them.
        self.tables.update(maps)
        for link in self._links:
            link.created(set(maps))

    def pull(
        self,
        wanted: Mapping[int, Keys | None],
        *,
        step: int | None = None,
        out: Mapping[int, Rows | Take] | None = None,
        create: bool = True,
        wait_for_others: bool = True,
    ) -> Ticket:
        """Asks for rows; the ticket's result is float32 ``[n, dim]`` per sparse and ``[size]`` per dense table.

        Args:
            wanted: ids per sparse table, which may repeat; ``None`` for a dense table.
            step: for which step the rows are, from 0; by default the steps pushed so far. For the next batch, give
                ``client.step + 1``: allowed where the servers' staleness is 1 or more.
            out: arrays to write to; for a dense table, or what takes its values.
            create: ids without a row read as the weights that their first push will begin with, otherwise as zeros; a
                pull makes no row.
            wait_for_others: wait as the servers' mode and staleness say.

        Raises:
            ConfigError: ids of another kind, or a step that cannot be reached before this worker's own push.
        """
        step = self.step if step is None else step
        staleness = self.staleness
        if wait_for_others and staleness is not None and step - staleness > self.step:
            raise ConfigError(
                f"pull(step={step}): with staleness {staleness} this worker must push step {step - staleness} first; "
                f"it has pushed {self.step}. Push before this pull, or allow more staleness."
            )
        flags = MessageFlag.NONE if create else MessageFlag.ZEROS
        flags |= MessageFlag.NONE if wait_for_others else MessageFlag.NO_WAIT
        flags |= self._half
        ticket = Ticket()
        asked = [(self._table(key), ids, None if out is None else out.get(key)) for key, ids in wanted.items()]
        ticket.result, shares = shares_of_pull(asked, len(self._links))
        for link, share in zip(self._links, shares, strict=True):
            if share:
                parts = [part for part, _ in share]
                request = Request(
                    Op.PULL, encode_parts(parts), len(parts), step, flags=flags, on_answer=fill(share, ticket)
                )
                ticket.requests.append((link, link.submit(request)))
        return ticket

    def push(
        self,
        gradients: Mapping[int, Gradient | Rows],
        *,
        step: int | None = None,
        ends_step: bool = True,
        positions: Positions | None = None,
        out: Mapping[int, Take] | None = None,
        changed: TakeChanged | None = None,
    ) -> Ticket:
        """Sends the gradients of one step: :class:`Gradient` per sparse table (distinct ids), float32 per dense one.

        Args:
            gradients: by table id.
            step: number of the step, from 1; by default one more than the last. Steps of a table must increase.
            ends_step: this is the last push of the step; matters where staleness is bounded.
            positions: of the streams whose events these gradients hold, see :mod:`fleet.ps.server.stream_points`.
            out: what takes the values that dense tables of ``gradients`` have after the step: they come with the
                answer, which waits for the step as a pull of the next one would. ``given`` of the ticket says which
                came.
            changed: takes, with each server's answer, the rows that the step and those since the last answer have
                changed, by watched table; a table that is not there must be pulled once as a whole. They are gone after
                the call.
        """
        step = self.step + 1 if step is None else step
        if step <= 0:
            raise ConfigError(f"push(step={step!r}): steps are counted from 1.")
        # Servers without a row in this step must hear of it where they count steps, keep positions or have changed rows
        # to give.
        everywhere = changed is not None or (ends_step and (self.staleness is not None or positions is not None))
        flags = MessageFlag.NONE if ends_step else MessageFlag.NO_CLOCK
        ticket = self._change(Op.PUSH, gradients, step, everywhere, flags, positions, out or {}, changed)
        self.step = max(self.step, step)
        return ticket

    @contextmanager
    def places(self, table_ids: Sequence[int]) -> Iterator[dict[int, Rows]]:
        """Yields memory for gradients of dense tables, or for none of them.

        A push that is made inside, with these tables first and in this order, does not copy the gradients that lie
        there. Other threads wait until the end.
        """
        configs = [self._table(table_id).config for table_id in table_ids]
        sizes = [config.size for config in configs if isinstance(config, DenseTableConfig)]
        starts, whole = places_of_rows(sizes)
        link = self._links[0]
        with link.lock:
            # With several servers or a smaller wire format the gradients are cut or converted, which copies them
            # anyway.
            place = link.place(whole) if len(self._links) == 1 and self.config.wire == "float32" else None
            if place is None:
                yield {}
                return
            rows = [np.frombuffer(place, np.float32, size, start) for size, start in zip(sizes, starts, strict=True)]
            yield dict(zip(table_ids, rows, strict=True))

    def add(self, deltas: Mapping[int, Gradient | Rows], *, step: int = 0) -> Ticket:
        """Adds deltas to the values (geo); ``step`` above 0 is applied once per worker even after its restart."""
        return self._change(Op.ADD, deltas, step)

    def set_dense(self, values: Mapping[int, Rows]) -> Ticket:
        """Sets the values of dense tables."""
        return self._change(Op.SET_DENSE, values, 0)

    def pull_changes(self, table_ids: Sequence[int]) -> dict[int, tuple[Keys, Rows]]:
        """Returns, per sparse table, the rows that other workers added to since the last call (geo)."""
        return self._changed_rows(Op.GEO_PULL, table_ids)[1]

    def watch(self, table_ids: Sequence[int]) -> tuple[bool, dict[int, tuple[Keys, Rows]]]:
        """Returns, per sparse table, the rows that any worker changed since the last call, this one included.

        The first item is whether other rows may have changed too, so that all must be pulled once: at the first call,
        and after a server has come back.
        """
        return self._changed_rows(Op.WATCH, table_ids)

    def _changed_rows(self, op: Op, table_ids: Sequence[int]) -> tuple[bool, dict[int, tuple[Keys, Rows]]]:
        self._questions += 1
        lacking: list[bool] = []
        found: dict[int, list[tuple[Keys, Rows]]] = {table_id: [] for table_id in table_ids}

        def take(header: Header, body: memoryview) -> None:
            lacking.append(header.step > 0)
            for part in each_table(rows_of_answer(header, body)):
                if part.ids is None or part.rows is None or part.table_id not in found:
                    raise MessageError(f"an unexpected answer for table {part.table_id}.")
                # Copies: the buffer of the answer is used again for the next one.
                found[part.table_id].append((part.ids.copy(), part.rows.copy()))

        flags = self._half
        none = np.empty(0, np.int64)
        parts = [TablePart(table_id, 0, self._table(table_id).dim, none) for table_id in table_ids]
        ticket = Ticket()
        for link in self._links:
            request = Request(op, encode_parts(parts), len(parts), seq=self._questions, flags=flags, on_answer=take)
            ticket.requests.append((link, link.submit(request)))
        self.wait(ticket)
        return any(lacking), {
            table_id: (np.concatenate([ids for ids, _ in pairs]), np.concatenate([rows for _, rows in pairs]))
            for table_id, pairs in found.items()
        }

    def wait(self, ticket: Ticket) -> dict[int, Any]:
        """Returns the result of a ticket when all servers have answered.

        Raises:
            PSError: a server refused, failed, or is away for longer than the deadline; the message names it.
        """
        if self._heart is not None:
            self._heart.check()
        if not ticket.done:
            failures = []
            # Go on after a failure: the arrays of the other requests are in use until their answers are here.
            for link, request in ticket.requests:
                try:
                    link.finish(request)
                except PSError as error:
                    failures.append(error)
            ticket.done = True
            if failures:
                raise failures[0]
        return ticket.result

    # -- the whole job -------------------------------------------------------------------------------------------

    def barrier(self, name: str = "worker", call: str = "", wish: str = "") -> str | None:
        """Waits until every live worker has come to its same-numbered barrier of this name.

        ``call`` is how messages name it. Raises PSError if all workers stand at barriers and none can open. ``wish``
        names the act that follows: where one worker is about to load and another to do something else, the key begins
        with :data:`fleet.ps.wire.messages.DISAGREE`.

        Returns a key that all workers at the barrier share; ``None`` if the others have met again since.
        In sync mode, and where staleness is bounded, all workers continue with the same step, also those that have
        taken fewer steps.
        """
        number = self._barriers.get(name, 0) + 1
        # Every server must know that this worker stands here, or it would wait forever for its next step.
        links = self._links if self.staleness is not None else self._links[:1]
        answers = self._all(Op.BARRIER, {"name": name, "call": call, "wish": wish}, links=links, step=number)
        self._barriers[name] = number
        if self.staleness is not None:
            self.step = max(self.step, *(int(answer.get("step", 0)) for answer in answers))
        key: str | None = answers[0].get("key")
        return key

    def alter(self, table_id: int, action: str, **fields: Any) -> int:
        """Does ``shrink``, ``advance_day``, ``clear`` or ``learning_rate`` on a table; returns the rows concerned."""
        self._table(table_id)
        body = {"table": table_id, "action": action, "fields": fields}
        if action == "clear":
            # The remainders of int8 rows come from gradients of rows that are gone after this.
            self._remainders.forget([table_id])
        return sum(int(answer.get("rows", 0)) for answer in self._all(Op.ALTER, body))

    def save(
        self, dirname: str, *, mode: int = 0, tables: Sequence[int] | None = None, key: str = "", text: bool = False
    ) -> int:
        """Makes every server write its share to ``dirname`` and returns the rows saved; training may continue.

        Args:
            dirname: a folder that the servers can reach.
            mode: see :mod:`fleet.ps.files.table_files`; dense tables are always saved whole.
            tables: ids of the tables, all by default.
            key: workers with the same key ask for the same save, which is made once.
            text: rows are written as text, see :mod:`fleet.ps.files.text_format`; mode is 0.
        """
        save_id = key or secrets.token_hex(8)
        fields = {"dirname": dirname, "mode": mode, "tables": tables, "save_id": save_id, "text": text}
        return sum(int(answer["rows"]) for answer in self._all(Op.SAVE, fields))

    def load(self, dirname: str, *, tables: Sequence[int] | None = None, key: str = "") -> int:
        """Makes every server read its share of a save by any number of servers, once per ``key``; returns the rows.

        All servers check their shares first, so that a refusal of one of them changes no table on any.

        Raises:
            NothingLoaded: a server refuses its share.
            PSError: a server is away, or failed after the check; then the message says that tables may be partly
                loaded.
        """
        fields = {"dirname": dirname, "tables": tables, "load_id": key or secrets.token_hex(8)}
        for link, answer in zip(self._links, self._all(Op.LOAD, {**fields, "check": True}), strict=True):
            if reason := answer.get("refused"):
                raise NothingLoaded(f"{link.name}: {reason} Nothing was loaded.")
        self._remainders.forget(list(self.tables) if tables is None else tables)
        try:
            return sum(int(answer["rows"]) for answer in self._all(Op.LOAD, fields))
        except PSError as error:
            raise PSError(f"{error} Tables may be partly loaded: load another save before training goes on.") from error

    def mark(self, name: str, keep: int, *, save: str | None = None, model: str | None = None, key: str = "") -> None:
        """Makes every server name its rows at the sink, once per ``key``; returns when all of them are there.

        Raises:
            PSError: a server refuses it: it publishes nowhere, or there is a version of this name.
        """
        key = key or secrets.token_hex(8)
        self._all(Op.MARK, {"name": name, "keep": keep, "save": save, "model": model, "key": key})

    def snapshot(self) -> None:
        """Makes every server write a snapshot of its state now."""
        self._all(Op.SNAPSHOT)

    def stat(self) -> list[dict[str, Any]]:
        """Returns facts about each server."""
        return self._all(Op.STAT)

    # -- inside --------------------------------------------------------------------------------------------------

    def _table(self, table_id: int) -> TableMap:
        try:
            return self.tables[table_id]
        except KeyError:
            raise ConfigError(
                f"table {table_id!r} is not known to this worker; it knows {sorted(self.tables)}. Call create_tables."
            ) from None

    def _change(
        self,
        op: Op,
        values: Mapping[int, Gradient | Rows],
        step: int,
        everywhere: bool = False,
        flags: int = MessageFlag.NONE,
        positions: Positions | None = None,
        out: Mapping[int, Take] = MappingProxyType({}),
        changed: TakeChanged | None = None,
    ) -> Ticket:
        tail = [] if positions is None else [positions_tail(positions)]
        flags |= MessageFlag.POSITIONS if tail else MessageFlag.NONE
        given = [(self._table(table_id), value) for table_id, value in values.items()]
        shares = shares_of_change(given, len(self._links))
        form = "float32" if op is Op.SET_DENSE else self.config.wire
        bfloat16 = form != "float32"
        flags |= MessageFlag.BFLOAT16 if bfloat16 else MessageFlag.NONE
        ticket = Ticket()
        for link, share in zip(self._links, shares, strict=True):
            if share or everywhere:
                buffers = [*encode_parts(wire_parts(share, form, self._remainders), bfloat16), *tail]
                request = Request(op, buffers, len(share), step, flags=flags, change=True)
                asked: list[tuple[TablePart, Target]] = [
                    (part, partial(out[part.table_id], start=self.tables[part.table_id].blocks[link.index][0]))
                    for part in share
                    if part.table_id in out
                ]
                if asked or changed is not None:
                    request.flags |= MessageFlag.VALUES
                    request.on_answer = fill(asked, ticket, changed)
                ticket.requests.append((link, link.submit(request)))
        return ticket

    def _all(
        self, op: Op, fields: dict[str, Any] | None = None, links: Sequence[Link] = (), step: int = 0
    ) -> list[dict[str, Any]]:
        links = links or self._links
        answers: list[dict[str, Any]] = [{} for _ in links]
        ticket = Ticket()
        for link in links:
            # ``place`` is bound now: the loop has moved on when the answer comes.
            def take(header: Header, body: memoryview, place: int = link.index) -> None:
                answers[place] = decode_control(body)

            request = Request(op, [control_body(fields or {})], step=step, change=op is Op.ALTER, on_answer=take)
            ticket.requests.append((link, link.submit(request)))
        self.wait(ticket)
        return answers

    def _beat(self, every_s: float) -> None:
        """Keeps the leases; where servers have standbys, it also answers at once when one is lost.

        A standby takes over once all workers ask for it, also those that wait for another server just now.
        """
        away: list[Link] = []
        for turn in itertools.count():
            pause_s = every_s / 2 if not self.config.has_others else _ASK_S if away else _LOOK_S
            if self._closing.wait(min(pause_s, every_s / 2)):
                return
            away = [link for link in self._links if link.is_away]  # one of them per turn, because each may take seconds
            tried = away[turn % len(away)] if away else None
            for link in [link for link in self._links if link is tried or link not in away]:
                with suppress(PSError):
                    link.beat(0.0 if self.config.has_others and link.is_cut else every_s)


def _check_names(configs: Mapping[int, SparseTableConfig | DenseTableConfig]) -> None:
    known: dict[tuple[type, str], int] = {}
    for table_id, config in configs.items():
        other = known.setdefault((type(config), config.name), table_id)
        if other != table_id:
            raise ConfigError(
                f"tables {other} and {table_id} are both called {config.name!r}, and a save has one folder for each "
                "name. Give them different names."
            )
