"""MovableShard: the part of a server whose rows another server process can take over while training goes on.

[Note: How a shard moves]
Where a job has more shards than server processes, each process listens on one endpoint per shard, and exactly one
process serves it; at the others the shard rests. All processes and workers know all endpoints, so a worker that is told
"not here" asks at the next one. A move is a standby for its time, and a hand-over (see [Note: Which of two servers])::

    told to follow       the process that is to serve takes a snapshot and the records after it, as a standby does
    told to switch       the process that serves hands over; its journal has taken its last record
    stepped back         it drops its rows; the shard rests there

Nobody votes here: a process that follows takes over when it is told to and at no other time. If it is lost before, the
process that serves goes on; if that one is lost, it is started again and has its journal. The epoch keeps workers from
using a process that has served before.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from fleet.errors import FleetError, PSError
from fleet.ps.server.job_state import Refused
from fleet.ps.server.server_state import ServerState
from fleet.ps.standby.carried import send_fields, send_refusal
from fleet.ps.standby.epoch_file import EpochFile
from fleet.ps.standby.follower import ask_standing, drop_rows
from fleet.ps.standby.leader import Leader
from fleet.ps.standby.pair import Pair, Turn
from fleet.ps.wire.messages import Header, decode_control
from fleet.ps.wire.sealed import Sealed

_PATIENCE_S = 5.0  # a process that served before waits this long for the others' word on who serves
_POLL_S = 0.2
_LOOK_S = 10.0  # how often a process where the shard rests looks whether it is served at all
_ABANDONED_S = 120.0  # a shard that nobody serves for this long belongs to a job that is over


class MovableShard(Pair):
    """One of the server processes that can serve a shard; the arguments are those of
    :class:`fleet.ps.standby.pair.Pair`."""

    _lists = "FLEET_PS_SHARD_ENDPOINTS"
    _after_promotion = ""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        config = self._config
        self._others = [one[config.index] for one in config.places if one[config.index] != config.endpoint]
        self._take_over: Callable[[ServerState], None] | None = None
        self._lost = ""  # the refusal of workers that have used rows which no process has now
        self._seen = False  # somebody has served the shard since this process started

    def _standings(self) -> list[dict[str, Any] | None]:
        """Returns the standing of every other process that can serve the shard; None for those that are away."""
        return [ask_standing(replace(self._config, peer=other), self._transport) for other in self._others]

    # -- the start, and the end ----------------------------------------------------------------------------------

    def settle_role(self) -> bool:
        """Returns whether this process serves the shard from its start."""
        config = self._config
        assert config.folder is not None
        epoch = self._epoch = EpochFile.read(config.folder)
        is_first = epoch.epoch == 0
        serves = not config.standby if is_first else epoch.leads
        began = time.monotonic()
        while serves and not self._stopping.is_set():
            standings = self._standings()
            leading = [one for one in standings if one is not None and one["leads"] and not one["deposed"]]
            if any(one["epoch"] >= epoch.epoch for one in leading):
                self._say("another server process serves this shard; it rests here")
                serves = False
            if is_first or None not in standings or time.monotonic() - began > _PATIENCE_S:
                break
            self._stopping.wait(_POLL_S)
        self._seen = not is_first
        if serves:
            epoch.write(max(epoch.epoch, 1), leads=True)
        elif not is_first:
            self._drop()
        return serves

    def follow(self, take_over: Callable[[ServerState], None]) -> None:
        """Lets the shard rest here until this process is told to follow."""
        self._take_over = take_over

    def wait_for_turn(self) -> bool:
        """Waits until this process serves the shard; returns False when the job is over before."""
        absent_since = time.monotonic()
        while not self._serves.wait(_LOOK_S):
            if any(one is not None and one["leads"] for one in self._standings()):
                self._seen = True
                absent_since = time.monotonic()
            elif self._seen and time.monotonic() - absent_since > _ABANDONED_S:
                self._say(f"nobody has served this shard for {_ABANDONED_S:.0f} s: the job is over")
                break
        return self.leader is not None

    def step_back(self, take_over: Callable[[ServerState], None]) -> None:
        """Lets the shard rest here: another process serves it."""
        leader = self.leader
        assert leader is not None
        leader.close()
        self._serves.clear()
        self._take_over = take_over
        self._drop()
        self.follower = None  # first, because a promoted one says that it serves
        self.leader = None

    def _drop(self) -> None:
        """Drops the rows: another process has newer ones."""
        assert self._config.folder is not None
        # The epoch first: a process that dies between the two must not come back to serve a shard without rows.
        self._epoch.write(max(self._epoch.epoch, 1), leads=False)
        drop_rows(self._config.folder)

    def end(self) -> None:
        """Tells every other process that the job is over."""
        super().end()
        for other in self._others:
            with suppress(FleetError):
                ask_standing(replace(self._config, peer=other), self._transport, over=True)

    # -- requests ------------------------------------------------------------------------------------------------

    def greet(self, header: Header, body: memoryview) -> dict[str, Any] | None:
        """Returns the answer to a worker instead of a welcome; None: this process serves it."""
        if self.leader is None and self._lost:
            raise Refused(self._lost)
        if self.leader is None:
            return {"standby": "another server process serves this shard"}
        return super().greet(header, body)

    def _refuse_if_lost(self, leader: Leader, known: int) -> None:
        if any(one is None or one["leads"] or one["epoch"] >= known for one in self._standings()):
            return  # a process that is away may still have the rows
        self._lost = (
            f"workers have used rows of epoch {known}; no server process has newer ones than epoch {leader.epoch}, so "
            "those rows were lost with the folder of the process that served last. Restart the job from its last saved "
            "model, or that process with its folder."
        )
        leader.step_down(f"workers have used rows of epoch {known}, which are lost")
        raise Refused(self._lost)

    def serve(self, line: Sealed, body: memoryview) -> None:
        """Serves another process, or the command that moves shards."""
        asked = decode_control(body)
        if "where" in asked:
            send_fields(line, self._whereabouts())
        elif "follow" in asked or "rest" in asked:
            try:
                self._obey(asked)
            except Refused as error:
                send_refusal(line, error)
            else:
                send_fields(line, self._whereabouts())
        elif "switch" in asked:
            super().serve(line, body)
        elif not self._is_stranger(line, asked):
            self._serve_process(line, asked, body)

    def _serve_process(self, line: Sealed, asked: dict[str, Any], body: memoryview) -> None:
        if asked.get("over"):
            send_fields(line, self._standing())
            if self.leader is None:
                self._rest()
                self._serves.set()
        elif self.leader is None and self.follower is None:
            send_fields(line, self._standing())
        else:
            if self.leader is not None and not asked.get("probe"):
                if asked.get("at") not in self._others:
                    send_refusal(
                        line, f"{asked.get('at')!r} is not in FLEET_PS_SHARD_ENDPOINTS of this server process."
                    )
                    return
                # The process that follows is the peer as long as the move takes: it alone may take over.
                self._config = replace(self._config, peer=str(asked["at"]))
            super().serve(line, body)

    def _obey(self, asked: dict[str, Any]) -> None:
        """Begins to follow, or stops; raises Refused where this process serves the shard."""
        config = self._config
        source = asked.get("follow")
        promoted = self.follower is not None and self.follower.promoted
        if promoted or self.leader is not None or self._take_over is None:
            raise Refused(f"{config.endpoint} serves shard {config.index}, or has just served it.")
        if source is not None and source not in self._others:
            raise Refused(f"shard {config.index} cannot come from {source!r}: it is one of {self._others}.")
        if source is not None and self.follower is not None and source == config.peer:
            return
        self._rest()
        if source is not None:
            self._lost = ""
            self._config = replace(config, peer=source)
            self._begin(self._take_over, None)

    def _rest(self) -> None:
        follower = self.follower
        self.follower = None
        if follower is not None:
            follower.close()
            self._drop()

    def _standing(self) -> dict[str, Any]:
        return {"epoch": self._epoch.epoch, "leads": False, "joined": False, "deposed": False, "stays": True}

    def _whereabouts(self) -> dict[str, Any]:
        """Returns the whereabouts of the shard, for the command that moves shards."""
        leader = self.leader
        follower = self.follower
        config = self._config
        return {
            "index": config.index,
            "job": config.job,
            "places": [list(one) for one in config.places],
            "leads": leader is not None and not leader.deposed,
            "leaves": leader is not None and leader.deposed,
            "follows": config.peer if follower is not None and leader is None else "",
            "joined": follower is not None and leader is None and follower.joined,
        }

    # -- while it serves -----------------------------------------------------------------------------------------

    def lead(self, state: ServerState, *, has_standby: bool) -> None:
        """Serves the workers from now on, without a standby."""
        super().lead(state, has_standby=False)

    def watch(self) -> Turn:
        """Looks after the process that follows; returns whether this one still serves."""
        leader = self.leader
        if leader is None:
            return Turn.LEADS
        if leader.deposed:
            return Turn.REPLACED
        try:
            leader.watch()
        except (OSError, PSError) as error:
            self._say(f"cannot go on without the process that follows: {error}")
        return Turn.LEADS
