"""RollCall: a call that every worker must make fails soon where only some make it, and says where the others are.

[Note: Who can go on]
The roll call uses the process group's key-value store, beside gloo and NCCL: each worker posts its call and its line.
A worker that has waited ``FLEET_WAIT_LIMIT`` seconds, there or in a torch exchange, asks the others where they are; a
thread of each answers. A job in which a worker still computes goes on, and logs for whom it waits. A job in which all
have ended or wait for each other would wait forever, so it stops.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from fleet.common.log import LOGGER
from fleet.common.own_thread import OwnThread
from fleet.env import Environment
from fleet.errors import ConfigError, RendezvousError
from fleet.job.process_group import restarted_key
from fleet.job.whereabouts import (
    BUSY,
    ENDED,
    MEETS,
    SILENT,
    WAITS,
    Described,
    Whereabouts,
    account,
    can_go_on,
    collective_of,
    how_it_ended,
    is_waiting,
    named,
    user_line,
)

_LOOK_EVERY_S = 1.0
_GROWTH = 1.5  # of the interval between two queries of where the others are
_ANSWER_WITHIN_S = 3.0
_READ_WITHIN_S = 60.0
_BREAK_WITHIN_S = 5.0
_IDLE_SHARE = 0.05  # of a core: what threads of other libraries may use while the main thread waits
_IDLE_S = 0.001
_LIMIT_NOTE = "FLEET_WAIT_LIMIT sets the time to wait before this check, in seconds."


class RollCall:
    """One worker's side of the roll call.

    Args:
        global_rank: rank of this worker.
        world_size: number of workers.
        step: returns how many steps this worker has finished.
        limit_s: seconds to wait before asking; 0 never asks.
        timeout_s: seconds after which the wait ends.
    """

    def __init__(
        self, global_rank: int, world_size: int, step: Callable[[], int], limit_s: float, timeout_s: float
    ) -> None:
        # The number of this worker's roll calls: workers make them alike, so a later job finds no posts of an earlier.
        store = _get_default_store()
        prefix = f"fleet/roll_call/{store.add(f'fleet/roll_calls/{global_rank}', 1)}"
        self._store = dist.PrefixStore(prefix, store)
        self._root = store
        # A restarted worker posts restarted_key() to the store itself, outside of every prefix.
        while isinstance(self._root, dist.PrefixStore):
            self._root = self._root.underlying_store
        self.global_rank = global_rank
        self._world_size = world_size
        self._step = step
        self._limit_s = limit_s
        self._timeout_s = timeout_s
        self._period_s = min(1.0, limit_s / 10) if limit_s else 1.0
        self._server = _connection_to(store)
        self.described: Described = lambda rank: ""  # where a rank is on the mesh; the session knows it later
        self._number = self._answered = 0
        self._meeting: tuple[str, str] | None = None  # the call and the user's line
        self._of_some: dict[str, str] = {}  # the last post in the calls of some workers
        self._is_alone = True  # no other thread than the main one has met the others
        self._waits_since: float | None = None
        self._error: BaseException | None = None
        self._clocks = (0.0, 0.0, 0.0)
        self._stopped = threading.Event()
        self._thread = OwnThread(self._watch, store, prefix, name="fleet-roll-call")
        self._thread.start()

    @classmethod
    def start(cls, global_rank: int, world_size: int, step: Callable[[], int]) -> RollCall:
        """Returns the roll call of this worker, with the limits that the environment sets."""
        environment = Environment()
        limit_s = environment.float("FLEET_WAIT_LIMIT")
        if not limit_s >= 0:
            raise ConfigError(f"FLEET_WAIT_LIMIT is {limit_s:g} in the environment; it takes seconds, at least 0.")
        return cls(global_rank, world_size, step, limit_s, environment.float("PADDLE_PG_TIMEOUT") / 1000)

    def meet(self, call: str, text: str = "") -> list[str]:
        """Returns the ``text`` of every worker in rank order, once all have made ``call``.

        Raises:
            ConfigError: a worker calls something else.
            RendezvousError: a worker has ended, or no worker can go on.
        """
        number = self._number
        self._number = number + 1
        names = {rank: f"{number}/{rank}" for rank in range(self._world_size)}
        posts = self._gather(names, call, user_line(sys._getframe(1)), text, f"{number}/read")
        self._check_calls(dict(enumerate(posts)))
        return [post[2] for post in posts]

    def meet_some(self, ranks: Sequence[int], number: int, call: str, text: str) -> list[str]:
        """Returns the ``text`` of each of ``ranks``, once they have made ``call`` for the time ``number``.

        Raises RendezvousError as :meth:`meet` does.
        """
        key = f"some/{call}/{'-'.join(map(str, ranks))}"
        names = {rank: f"{key}/{number}/{rank}" for rank in ranks}
        posts = self._gather(names, call, user_line(sys._getframe(1)), text)
        # Every worker that has posted now had read the posts before, so this worker's own post may go.
        if (before := self._of_some.get(key)) is not None:
            self._store.delete_key(before)
        self._of_some[key] = names[self.global_rank]
        return [post[2] for post in posts]

    def _gather(self, names: Mapping[int, str], call: str, where: str, text: str, read: str = "") -> list[Any]:
        """Returns the posts of the workers under ``names``; with ``read`` removes them when all have read them."""
        self._thread.check()
        is_main = threading.current_thread() is threading.main_thread()
        self._is_alone &= is_main
        self._meeting = (call, where)
        self._error = None
        try:
            self._store.set(names[self.global_rank], json.dumps([call, where, text, is_main]))
            self._wait_for(names, call, where)
            posts = [json.loads(post) for post in self._store.multi_get(list(names.values()))]
            if read:
                self._store.add(read, 1)
                if self.global_rank == 0:
                    self._clear(list(names.values()), read)
            return posts
        except dist.DistError as error:
            raise RendezvousError(
                f"{self._who} {call} at {where}: rank 0, which serves the rendezvous, has ended or cannot be "
                "reached. See its log. Every worker must make this call."
            ) from error
        finally:
            self._meeting = None

    def leave_topic(self, topic: str, count: int) -> None:
        """Says that this worker, about to raise, has read ``topic``; on rank 0 returns when ``count`` workers have."""
        with contextlib.suppress(dist.DistError):
            self._store.add(f"{topic}/read", 1)
            if self.global_rank == 0:
                self._await_readers(topic, count)

    def post(self, subject: str, text: str) -> None:
        """Posts ``text`` for :meth:`posted` of the others and waits for nobody; an empty text withdraws the last."""
        name = f"posted/{subject}/{self.global_rank}"
        with contextlib.suppress(dist.DistError):  # rank 0 has ended; the next exchange says so
            if self._is_served() and text:
                self._store.set(name, text)
            elif self._is_served():
                self._store.delete_key(name)

    def posted(self, subject: str, ranks: Sequence[int]) -> dict[int, str]:
        """Returns the posts of ``ranks`` about ``subject``; empty until all of them have posted."""
        names = [f"posted/{subject}/{rank}" for rank in ranks]
        with contextlib.suppress(dist.DistError):
            if self._is_served() and self._store.check(names):
                return dict(zip(ranks, [text.decode() for text in self._store.multi_get(names)], strict=True))
        return {}

    def others_after(self, error: BaseException) -> dict[int, Whereabouts]:
        """Returns where the other workers are; from now on they are told that this one ends with ``error``."""
        self._error = error
        return {rank: at for rank, at in self.whereabouts().items() if rank != self.global_rank}

    def _named(self, ranks: list[int]) -> str:
        return named(ranks, self.described)

    def _account(self, found: Mapping[int, Whereabouts]) -> str:
        return account(found, self.described)

    def whereabouts(self, store: dist.Store | None = None) -> dict[int, Whereabouts]:
        """Returns where every worker is; rank 0, which serves the store, counts as ended when the store is gone."""
        store = store if store is not None else self._store
        found: dict[int, Whereabouts] = {self.global_rank: self._own()}
        try:
            if not self._is_served():
                raise dist.DistNetworkError
            # Answers carry the number of their query, for an older answer may still be in the store.
            asked = store.add("asked", 1)
            deadline = time.monotonic() + _ANSWER_WITHIN_S
            while len(found) < self._world_size and time.monotonic() < deadline and not self._stopped.wait(0.02):
                # Asked in the answering thread, which therefore answers the others itself while it waits.
                if store is not self._store:
                    self._reply(store)
                for rank in set(range(self._world_size)) - set(found):
                    if (at := _answer(store, rank, asked)) is not None:
                        found[rank] = at
        except dist.DistError:
            found[0] = Whereabouts(ENDED, " or cannot be reached, nor can the rendezvous that it serves; see its log")
        return {rank: found.get(rank, Whereabouts(SILENT)) for rank in range(self._world_size)}

    def close(self) -> None:
        """Tells the others that this worker has ended."""
        # The thread first: it would answer that this worker is busy.
        self._stopped.set()
        self._thread.join(_BREAK_WITHIN_S)  # it may still connect to a store that has ended
        self._error = self._error or getattr(sys, "last_value", None)
        with contextlib.suppress(dist.DistError):
            if self._is_served():
                self._store.set(f"left/{self.global_rank}", self._ended().to_text())
        if self._server is not None:
            self._server.close()

    @property
    def _who(self) -> str:
        return f"[rank {self.global_rank} of {self._world_size}]"

    def _wait_for(self, names: Mapping[int, str], call: str, where: str) -> None:
        """Returns when every worker has called; raises when one has ended, calls something else, or none can go on."""
        began = time.monotonic()
        absent = list(names)
        look_at = began + _LOOK_EVERY_S
        ask_at = began + (self._limit_s or float("inf"))
        # Short pauses first, for workers usually come together; a request to rank 0 each time, so longer ones later.
        pause_s = 0.0002
        while not self._store.check(list(names.values())):
            now = time.monotonic()
            if now >= min(look_at, ask_at):
                present = [rank for rank, name in names.items() if self._store.check([name])]
                self._check_calls({rank: json.loads(self._store.get(names[rank])) for rank in present})
                absent = [rank for rank in names if rank not in present]
                gone = any(self._store.check([f"left/{rank}"]) for rank in absent)
                # A worker may have posted its call between the look above and its end.
                if gone and not self._store.check(list(names.values())):
                    self._refuse(call, where, absent, self.whereabouts())
                self._refuse_restarted(f"{call} at {where}", absent)
                self._raise_refused(names[self.global_rank], f"{call} at {where}")
                look_at = now + _LOOK_EVERY_S
                if now >= ask_at and absent:
                    self._ask(call, where, present, absent, now - began)
                    ask_at = began + (now - began) * _GROWTH
            if now - began > self._timeout_s:
                raise RendezvousError(
                    f"{self._who} {call} at {where}: {self._named(absent)} did not come within {self._timeout_s:g} s, "
                    "which PADDLE_PG_TIMEOUT allows."
                )
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 0.02)

    def check_restarted(self, absent: Sequence[int]) -> None:
        """Raises RendezvousError when one of ``absent``, for which this worker waits, cannot come.

        It was restarted alone and waits for a new meeting of all, or it served the rendezvous and has ended.
        """
        what = f"{user_line()} waits"
        try:
            if 0 in absent and not self._is_served():
                raise dist.DistNetworkError
            self._refuse_restarted(what, absent)
        except dist.DistError as error:
            raise RendezvousError(
                f"{self._who} {what}: rank 0, which serves the rendezvous, has ended or cannot be reached. See its "
                "log. This worker ends so that all join anew, as the launcher's --max_restart makes them; they resume "
                "from the newest checkpoint."
            ) from error

    def waiting(self, ranks: Sequence[int]) -> dict[int, str]:
        """Returns the call and line of those ``ranks`` whose main threads wait for this one in the next call of all.

        None where other threads of this worker make such calls, too, and so may come to this one.
        """
        found = {}
        with contextlib.suppress(dist.DistError):
            for rank in ranks if self._is_alone else ():
                if self._store.check([name := f"{self._number}/{rank}"]):
                    call, where, _, is_main = json.loads(self._store.get(name))
                    if is_main:
                        found[rank] = f"{call} at {where}"
        return found

    def still_wait(self, ranks: Sequence[int]) -> bool:
        """Returns whether all ``ranks`` answer that they wait in a call of all."""
        found = self.whereabouts()
        return all(found[rank].state == MEETS for rank in ranks)

    def refuse(self, ranks: Sequence[int], text: str) -> None:
        """Has ``ranks``, which wait for this worker in the next call of all, raise ``text``; it ends afterwards."""
        key = f"{self._number}/refused"
        with contextlib.suppress(dist.DistError):
            self._store.set(key, text)
            self._await_readers(key, len(ranks))

    def _await_readers(self, key: str, count: int) -> None:
        deadline = time.monotonic() + _BREAK_WITHIN_S
        while self._store.add(f"{key}/read", 0) < count and time.monotonic() < deadline:
            time.sleep(0.02)  # rank 0 serves what they read

    def _raise_refused(self, name: str, what: str) -> None:
        """Raises RendezvousError where a worker that waits for this one elsewhere has given up."""
        key = f"{name.partition('/')[0]}/refused"
        if self._store.check([key]):
            text = self._store.get(key).decode()
            self._store.add(f"{key}/read", 1)
            raise RendezvousError(f"{self._who} {what} cannot finish. {text}")

    def _refuse_restarted(self, what: str, absent: Sequence[int]) -> None:
        again = [rank for rank in absent if self._root.check([restarted_key(rank)])]
        if again:
            raise RendezvousError(
                f"{self._who} {what}: {self._named(again)} ended, was restarted and waits until all workers join anew. "
                "This worker ends so that its own restart joins, as the launcher's --max_restart makes it; without it, "
                "restart all workers. They resume from the newest checkpoint."
            )

    def _clear(self, names: list[str], read: str) -> None:
        """Removes the posts of a call once all have read them; rank 0 serves them and must not end before."""
        deadline = time.monotonic() + _READ_WITHIN_S
        while self._store.add(read, 0) < self._world_size:
            if time.monotonic() > deadline:
                return
            time.sleep(0.0002)
        for name in (*names, read):
            self._store.delete_key(name)

    def _ask(self, call: str, where: str, present: list[int], absent: list[int], waited_s: float) -> None:
        found = self.whereabouts()
        if not can_go_on(found, self._limit_s / 2):
            self._refuse(call, where, absent, found)
        # All workers that wait know the same, so one of them logs it.
        if self.global_rank == present[0]:
            places = self._account({rank: found[rank] for rank in absent})
            LOGGER.warning(
                f"{call} at {where} has been waiting for {self._named(absent)} for {waited_s:.0f} s:\n{places}"
            )

    def _refuse(self, call: str, where: str, absent: list[int], found: dict[int, Whereabouts]) -> NoReturn:
        raise RendezvousError(
            f"{self._who} {call} at {where}: every worker must make this call, and {self._named(absent)} cannot:\n"
            f"{self._account(found)}\nMake it on every worker after the same step: not inside "
            f"`if fleet.is_first_worker():`, and with the same number of batches on each. {_LIMIT_NOTE}"
        )

    def _check_calls(self, posts: dict[int, list[str]]) -> None:
        """Raises ConfigError unless all ``posts`` are for the same call."""
        places: dict[str, list[int]] = {}
        for rank, (call, *_) in posts.items():
            places.setdefault(call, []).append(rank)
        if len(places) > 1:
            calls = [f"  {self._named(ranks)}: {call} at {posts[ranks[0]][1]}" for call, ranks in places.items()]
            raise ConfigError(
                f"{self._who} the workers make different calls where all must make the same:\n"
                + "\n".join(calls)
                + "\nEvery worker must make these calls in the same order."
            )

    def _own(self) -> Whereabouts:
        """Returns where the main thread of this worker is."""
        meeting = self._meeting
        step = self._step()
        if self._error is not None:
            return self._ended()
        if meeting is not None:
            return Whereabouts(MEETS, meeting[1], meeting[0], step)
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        if frame is None:
            return self._ended()
        since = self._waits_since
        if since is None or not is_waiting(frame):
            return Whereabouts(BUSY, user_line(frame), step=step)
        return Whereabouts(WAITS, user_line(frame), collective_of(frame), step, time.monotonic() - since)

    def _ended(self) -> Whereabouts:
        return Whereabouts(ENDED, f"{how_it_ended(self._error)}, after step {self._step()}")

    def _watch(self, store: dist.Store, prefix: str) -> None:
        """Answers the others, and watches exchanges that this worker waits in; runs in a thread."""
        ask_at = self._limit_s
        try:
            # A separate connection: the main thread may block on the store's usual one.
            own = dist.PrefixStore(prefix, store.clone())  # type: ignore[attr-defined]
            while not self._stopped.wait(self._period_s):
                self._note_waiting()
                if not self._is_served():
                    return
                self._reply(own)
                since = self._waits_since
                waited_s = 0.0 if since is None else time.monotonic() - since
                if since is None or self._meeting is not None:
                    ask_at = self._limit_s
                elif self._limit_s and waited_s >= ask_at:
                    self._look_after_exchange(own, waited_s)
                    ask_at = waited_s * _GROWTH
        except RuntimeError:
            return  # the store's server ended before this worker

    def _reply(self, store: dist.Store) -> None:
        """Answers the newest query for this worker's whereabouts."""
        asked = store.add("asked", 0)
        if asked != self._answered:
            self._answered = asked
            store.set(f"answer/{self.global_rank}", json.dumps([asked, self._own().to_text()]))

    def _is_served(self) -> bool:
        """Returns whether the store's server still runs; torch prints a stack for each request that it misses."""
        if self._server is None:
            return True
        try:
            return bool(self._server.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def _note_waiting(self) -> None:
        """Records since when the main thread has been in an exchange without any thread of this process computing."""
        ident = threading.main_thread().ident or 0
        before = self._clocks
        # A slow exchange moves data in some thread of this process; an exchange that waits for a worker uses no CPU.
        main = time.clock_gettime(time.pthread_getcpuclockid(ident))
        self._clocks = now = (time.monotonic(), time.process_time(), main)
        frame = sys._current_frames().get(ident)
        wall_s, process_s, main_s = (b - a for a, b in zip(before, now, strict=True))
        is_idle = main_s < _IDLE_S and process_s < _IDLE_SHARE * wall_s
        if frame is None or not is_idle or not is_waiting(frame):
            self._waits_since = None
        elif self._waits_since is None:
            self._waits_since = before[0]

    def _look_after_exchange(self, store: dist.Store, waited_s: float) -> None:
        """Logs for whom the exchange waits; ends this process when no worker can go on."""
        found = self.whereabouts(store)
        states = [at.state for at in found.values()]
        # A worker in a roll call raises by itself. Its end then breaks off this exchange.
        if MEETS in states or (ENDED in states and self._stopped.wait(_BREAK_WITHIN_S)):
            return
        if self._own().state != WAITS:
            return
        where = found[self.global_rank].where
        if can_go_on(found, self._limit_s / 2):
            if self.global_rank == min(rank for rank, at in found.items() if at.state == WAITS):
                others = self._account({rank: at for rank, at in found.items() if rank != self.global_rank})
                LOGGER.warning(f"the exchange at {where} has been waiting for {waited_s:.0f} s:\n{others}")
            return
        # The main thread waits in C++, where nothing can be raised.
        print(
            f"RendezvousError: {self._who} the exchange at {where} cannot finish:\n{self._account(found)}\nEvery "
            "worker must take part in each exchange, in the same order: the same number of batches, the same models, "
            f"no step() that some workers have skipped. {_LIMIT_NOTE}",
            file=sys.stderr,
            flush=True,
        )
        # Posted before the exit, so that the others can name the reason.
        ended = Whereabouts(ENDED, f" with RendezvousError at {where}, after step {self._step()}")
        store.set(f"left/{self.global_rank}", ended.to_text())
        store.check(["asked"])  # once this is answered, the post has arrived
        os._exit(1)


def _connection_to(store: dist.Store) -> socket.socket | None:
    """Returns a connection that closes with the store's server; None for a store that no worker serves."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return socket.create_connection((store.host, store.port)) if isinstance(store, dist.TCPStore) else None


def _answer(store: dist.Store, rank: int, asked: int) -> Whereabouts | None:
    """Returns what ``rank`` answered to query ``asked`` or a later one, or that it has left."""
    if store.check([f"left/{rank}"]):
        return Whereabouts.from_text(store.get(f"left/{rank}"))
    if store.check([f"answer/{rank}"]):
        answer: list[Any] = json.loads(store.get(f"answer/{rank}"))
        if answer[0] >= asked:
            return Whereabouts.from_text(answer[1])
    return None
