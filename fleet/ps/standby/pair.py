"""Pair: the part of a server that has a standby, or is one: who serves, and the change between the two."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from typing import Any

from fleet.common.own_thread import OwnThread
from fleet.errors import FleetError, PSError
from fleet.ps.server.job_state import Refused
from fleet.ps.server.reader_requests import Readable
from fleet.ps.server.server_config import ServerConfig
from fleet.ps.server.server_state import ServerState
from fleet.ps.server.snapshot import has_snapshot
from fleet.ps.standby.carried import send_fields, send_refusal
from fleet.ps.standby.epoch_file import EpochFile
from fleet.ps.standby.follower import Follower, ask_standing
from fleet.ps.standby.leader import Leader
from fleet.ps.wire.messages import Header, Op, decode_control
from fleet.ps.wire.sealed import Sealed
from fleet.ps.wire.transport import Transport

# Requests whose answers wait for no standby: reads, and changes that the worker keeps until they are promised.
_FREE = (Op.PULL, Op.PUSH, Op.ADD, Op.SET_DENSE, Op.GEO_PULL, Op.WATCH, Op.PING, Op.STAT, Op.HELLO)
_PATIENCE_S = 5.0  # a server that has its rows waits this long for its standby's word on who leads
_POLL_S = 0.2
_REJOIN_S = 20.0  # a standby that was started again and finds nobody for this long has missed the end of the job


class Turn(Enum):
    """The turn of a server that leads or led, after a look at its standby."""

    LEADS = 1
    REPLACED = 2  # the other one leads
    OVER = 3  # the other one led, and has gone: the job is over


class Pair:
    """One of the two servers that have the same number.

    Args:
        config: of this server, with the other one as ``peer``.
        transport: how connections are made.
        make_state: makes an empty state.
        hang_up: ends the connections of all workers.
        notify: receives each line meant for the user.
    """

    _lists = "FLEET_PS_STANDBY_ENDPOINTS"  # the variable that makes workers know of the pair
    _after_promotion = ", without a standby until that server is started again"

    def __init__(
        self,
        config: ServerConfig,
        transport: Transport,
        make_state: Callable[[], ServerState],
        hang_up: Callable[[], None],
        notify: Callable[[str], None],
    ) -> None:
        assert config.folder is not None
        self._config = config
        self._transport = transport
        self._make_state = make_state
        self._hang_up = hang_up
        self._notify = notify
        self._epoch = EpochFile(config.folder)
        self._stopping = threading.Event()
        self._serves = threading.Event()
        self._away_since: float | None = None
        self._is_first_start = True
        self._peer_leads = False
        self.leader: Leader | None = None
        self.follower: Follower | None = None
        self._turn: OwnThread | None = None

    # -- the start -----------------------------------------------------------------------------------------------

    def settle_role(self) -> bool:
        """Returns whether this server serves the workers from its start; waits until that is certain.

        Otherwise it is the standby: it never led, it was replaced, or it follows as it did before.
        """
        config = self._config
        assert config.folder is not None
        epoch = self._epoch = EpochFile.read(config.folder)
        fresh = not has_snapshot(config.folder) and not any((config.folder / "journal").glob("journal-*.log"))
        self._is_first_start = epoch.epoch == 0 and fresh
        if (fresh and config.standby) or (epoch.epoch and not epoch.leads):
            return False
        began = reported = time.monotonic()
        # A server that has rows may lead alone after a while; without rows only the standby knows whether it has newer
        # ones, so the server waits for the standby's word however long that takes.
        while not self._stopping.is_set():
            other = ask_standing(config, self._transport)
            now = time.monotonic()
            if other is not None and other["leads"] and other["epoch"] >= epoch.epoch:
                self._say(f"{config.peer} has taken over; this server is its standby from now on")
                self._is_first_start = False
                return False
            if other is not None and not (fresh and other["joined"]):
                break
            if other is None and not fresh and now - began > _PATIENCE_S:
                break
            if now - reported >= 3.0:
                reported = now
                missing = "is not there yet" if other is None else "has the rows, which this server has lost"
                self._say(f"waits for its standby at {config.peer}, which {missing} ({now - began:.0f} s)")
            self._stopping.wait(_POLL_S)
        epoch.write(max(epoch.epoch, 1), leads=True)
        return True

    def lead(self, state: ServerState, *, has_standby: bool) -> None:
        """Serves the workers from now on."""
        leader = Leader(self._config, state, self._epoch, self._hang_up, self._notify, has_standby=has_standby)
        state.on_unrecorded = leader.renew
        self.leader = leader
        self._serves.set()

    def follow(self, take_over: Callable[[ServerState], None]) -> None:
        """Follows the other server; ``take_over`` is called with the state once this standby is promoted."""
        self._begin(take_over, None if self._is_first_start else _REJOIN_S)

    def _begin(self, take_over: Callable[[ServerState], None], patience_s: float | None) -> None:
        follower = Follower(self._config, self._transport, self._epoch, self._make_state, self._notify, patience_s)
        self.follower = follower

        def wait() -> None:
            # The server has the state before lead() wakes the threads that wait for the turn.
            if follower.wait():
                assert follower.state is not None
                self._say(f"takes over from {self._config.peer} (epoch {self._epoch.epoch}){self._after_promotion}")
                take_over(follower.state)
                self.lead(follower.state, has_standby=False)
            if follower.promoted or follower.ended or self._stopping.is_set():
                self._serves.set()

        follower.start()
        self._turn = OwnThread(wait, name="standby turn", say=self._say, then=self._serves.set)
        self._turn.start()

    def wait_for_turn(self) -> bool:
        """Waits until this server serves the workers; returns False when the job is over before."""
        self._serves.wait()
        return self.leader is not None

    def wake(self) -> None:
        """Ends :meth:`wait_for_turn`: the thread that would bring the turn has failed."""
        self._serves.set()

    def check(self) -> None:
        """Raises the error that has ended the wait for the turn, if there is one."""
        if self._turn is not None:
            self._turn.check()

    def _peer_is_gone(self) -> bool:
        other = ask_standing(self._config, self._transport)
        self._peer_leads = other is not None and bool(other["leads"]) and not other["deposed"]
        if other is not None:
            self._away_since = None
            return False
        self._away_since = self._away_since or time.monotonic()
        return time.monotonic() - self._away_since > _PATIENCE_S

    # -- requests ------------------------------------------------------------------------------------------------

    def greet(self, header: Header, body: memoryview) -> dict[str, Any] | None:
        """Returns the answer to a worker instead of a welcome; None: this server welcomes it.

        Raises:
            Refused: no worker of this job sends such a HELLO.
        """
        fields = decode_control(body)
        rank = fields.get("rank")
        known = fields.get("epoch")
        if not isinstance(rank, int) or not 0 <= rank < self._config.num_workers or not isinstance(known, int):
            raise Refused(
                f"a worker of rank {rank!r} that knows of one endpoint alone (epoch {known!r}): set {self._lists} "
                "alike for every server and worker."
            )
        if self.leader is None and self.follower is not None:
            reason = self.follower.ask(rank, known)
            if reason is not None:
                return reason
            self._serves.wait(60.0)
        leader = self.leader
        if leader is None:
            return {"standby": "another server leads"}
        if known > leader.epoch:
            self._refuse_if_lost(leader, known)
        return leader.greet(rank, header.client_id, known)

    def _refuse_if_lost(self, leader: Leader, known: int) -> None:
        """Raises Refused where a worker has used rows that neither of the two has: waiting does not bring them back."""
        other = ask_standing(self._config, self._transport)
        if other is None or other["leads"] or other["epoch"] >= known:
            return
        text = (
            f"workers have used rows of epoch {known}; this server has epoch {leader.epoch}, the other one at "
            f"{self._config.peer} epoch {other['epoch']}, so those rows were lost with the folder of the server that "
            "served last. Restart the job from its last saved model, or that server with its folder."
        )
        leader.step_down(f"workers have used rows of epoch {known}, which are lost")
        raise Refused(text)

    def settle(self, header: Header) -> None:
        """Waits until the standby has the effect of this request, unless the worker sends it again after a loss."""
        if self.leader is not None and header.op not in _FREE:
            self.leader.settle()

    def readable(self) -> Readable | str:
        """Returns the state for readers, or the reason why there is no state to read."""
        source = self.leader or self.follower
        return "it does not serve this shard" if source is None else source.readable()

    def serve(self, line: Sealed, body: memoryview) -> None:
        """Serves the other server of the pair, or tells it where this one stands."""
        asked = decode_control(body)
        if "switch" in asked:
            self._switch(line)
            return
        if "where" in asked:  # the scale command: shards of a pair have no other places
            send_fields(line, {"places": []})
            return
        if self._is_stranger(line, asked):
            return
        if asked.get("over"):
            self._learn_end()
        if self.leader is not None:
            self.leader.serve(line, asked)
        elif self.follower is not None:
            send_fields(line, self.follower.standing(stay=asked.get("stay") is True))

    def _is_stranger(self, line: Sealed, asked: dict[str, Any]) -> bool:
        """Returns whether a server of another job or number asks, after telling it so."""
        own = {"index": self._config.index, "num_workers": self._config.num_workers, "job": self._config.job}
        given = {name: asked.get(name) for name in own}
        if given != own:
            send_refusal(line, f"server and standby belong to different jobs: {given} asks, this is {own}.")
        return given != own

    def _switch(self, line: Sealed) -> None:
        """Hands over to the other server of the pair, because the user asked for it."""
        try:
            if self.leader is None:
                raise Refused(f"{self._config.endpoint} does not serve workers: {self._config.peer} does.")
            self.leader.hand_over(lambda stay: ask_standing(self._config, self._transport, stay=stay))
        except (Refused, PSError) as error:
            send_refusal(line, error)
        else:
            send_fields(line, {"leads": self._config.peer})

    def watch(self) -> Turn:
        """Looks after the standby; returns whether this server still leads."""
        leader = self.leader
        if leader is None:
            return Turn.LEADS
        if leader.deposed:
            return Turn.OVER if self._peer_is_gone() else Turn.REPLACED if self._peer_leads else Turn.LEADS
        if leader.lacks_standby:
            # Without a line the workers may have promoted the standby, and nothing else would tell this server.
            other = ask_standing(self._config, self._transport)
            if other is not None and other["leads"] and other["epoch"] > leader.epoch:
                leader.step_down(f"the standby at {self._config.peer} has taken over (epoch {other['epoch']})")
        try:
            leader.watch()
        except (OSError, PSError) as error:
            self._say(f"cannot go on without its standby: {error}")
        return Turn.LEADS

    def step_back(self, take_over: Callable[[ServerState], None]) -> None:
        """Follows the server that has replaced this one."""
        leader = self.leader
        self.leader = None
        assert leader is not None
        leader.close()
        self._serves.clear()
        self._is_first_start = False
        # The role is on the disk first: after a kill at this point settle_role() must find a standby.
        self._epoch.write(self._epoch.epoch, leads=False)
        self.follow(take_over)

    def end(self) -> None:
        """Tells the standby that the job is over, even if it led a moment ago and does not follow yet."""
        leader = self.leader
        if leader is None:
            return
        follows = leader.joined
        leader.end()
        if self._config.peer and not follows and not leader.deposed:
            with suppress(FleetError):
                ask_standing(self._config, self._transport, over=True)

    def _learn_end(self) -> None:
        """Ends the wait of this server, unless it leads: the leading server says that the job is over."""
        if self.leader is not None and self.leader.deposed:
            self.leader.forget_job()
        elif self.leader is None and self.follower is not None:
            self.follower.forget_job()

    def stop(self) -> None:
        """Ends every wait of this server, and its lines."""
        self._stopping.set()
        if self.follower is not None:
            self.follower.close()
        if self.leader is not None:
            self.leader.close()
        self._serves.set()

    def _say(self, line: str) -> None:
        self._notify(f"parameter server {self._config.index}: {line}")
