"""``python -m fleet.ps scale SERVER NUMBER``: shards move between server processes while training goes on."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from fleet.env import Environment
from fleet.errors import ConfigError, PSError
from fleet.ps_job.server_line import tell_server

_ABOUT = """Divides the shards of a running job over NUMBER of its server processes: shards move, one after the other,
while training goes on; nothing is lost, and workers wait for less than a second. The job must have been started with
--server_shards (and --server_spare for processes that serve nothing at first), and this command with the
FLEET_JOB_SECRET and FLEET_PS_CA of the job. SERVER is any endpoint of any of them."""
_SAY_S = 3.0
_POLL_S = 0.05
_SETTLE_S = 30.0  # a process that has just served a shard lets it go within a few seconds

Tell = Callable[[str, dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Move:
    """A shard, and the processes between which it moves."""

    shard: int
    source: int
    target: int


@dataclass(slots=True)
class _Job:
    """The shards of a job: which process serves each, and which processes could."""

    places: list[list[str]]
    owners: list[int] = field(default_factory=list)  # by shard: the process
    followers: list[tuple[int, int]] = field(default_factory=list)  # process and shard that follows there
    away: set[int] = field(default_factory=set)  # processes that do not answer


def run(argv: Sequence[str]) -> int:
    """Moves shards; returns 0, or 2 for a wrong call.

    Raises:
        ConfigError: the job has no shards that can move, or not as many processes.
        PSError: a process is away, or was lost during a move; shards that have moved stay, and the command can be given
            again.
    """
    parser = argparse.ArgumentParser(prog="python -m fleet.ps scale", description=_ABOUT)
    parser.add_argument("server", metavar="SERVER", help="host:port of a server, as the job's lists write it")
    parser.add_argument("number", metavar="NUMBER", type=int, help="how many server processes serve from now on")
    try:
        parsed = parser.parse_args(list(argv))
    except SystemExit as stop:
        return int(stop.code or 0)
    environment = Environment()
    scale(parsed.server, parsed.number, lambda server, fields: tell_server(server, fields, environment), print)
    return 0


def scale(server: str, number: int, tell: Tell, say: Callable[[str], None]) -> None:
    """Divides the shards over ``number`` processes; every move is a line for ``say``."""
    job = _look(server, tell)
    moves = plan_moves(job.owners, number, len(job.places), job.away)
    wanted = {(move.target, move.shard) for move in moves}
    for process, shard in job.followers:
        if (process, shard) not in wanted:  # left by a command that was interrupted
            tell(job.places[process][shard], {"rest": True})
    for move in moves:
        began = time.monotonic()
        waited_s = _move(job.places, move, tell, say)
        source = job.places[move.source][move.shard]
        target = job.places[move.target][move.shard]
        took_s = time.monotonic() - began
        say(f"shard {move.shard}: {source} -> {target} ({took_s:.2f} s, not served for {waited_s:.2f} s of it)")
        job.owners[move.shard] = move.target
    counts = [job.owners.count(process) for process in range(len(job.places))]
    serving = sum(count > 0 for count in counts)
    say(f"{serving} of {len(counts)} server processes serve; shards of each: {', '.join(map(str, counts))}")


def plan_moves(owners: Sequence[int], number: int, processes: int, away: Collection[int] = ()) -> list[Move]:
    """Returns the fewest moves after which ``number`` processes serve, and none has two shards more than another.

    Args:
        owners: the process of each shard.
        number: how many are to serve.
        processes: how many the job has.
        away: those that do not answer.

    Raises:
        ConfigError: there are fewer processes, or shards.

    Example:
        >>> plan_moves([0, 1, 0, 1], 1, 2)
        [Move(shard=1, source=1, target=0), Move(shard=3, source=1, target=0)]
    """
    most = min(processes - len(away), len(owners))
    if not 1 <= number <= most:
        missing = f", {sorted(away)} of which do not answer" if away else ""
        raise ConfigError(
            f"scale to {number}: the job has {processes} server processes{missing}, and {len(owners)} shards, so 1 to "
            f"{most} can serve."
            + (" Repeat the command when they are back." if away else "")
            + (" Start the job with more of both (--server_spare, --server_shards) for more." if number > most else "")
        )
    # The processes with the most shards stay, and keep as many as they may: only the surplus moves.
    held = {process: [s for s, owner in enumerate(owners) if owner == process] for process in range(processes)}
    present = sorted((p for p in held if p not in away), key=lambda p: (-len(held[p]), p))
    chosen = present[:number]
    least, more = divmod(len(owners), number)
    room = {process: least + (place < more) for place, process in enumerate(chosen)}
    loose = [shard for process in sorted(held) for shard in held[process][room.get(process, 0) :]]
    moves = []
    for process in chosen:
        for _ in range(room[process] - len(held[process])):
            shard = loose.pop(0)
            moves.append(Move(shard, owners[shard], process))
    return sorted(moves, key=lambda move: move.shard)


def _look(server: str, tell: Tell) -> _Job:
    """Returns where every shard is; raises PSError where nobody serves one."""
    places = tell(server, {"where": True}).get("places")
    if not places:
        raise ConfigError(f"{server} serves a job whose shards cannot move: it was started without --server_shards.")
    job = _Job(places)
    found: dict[int, int] = {}
    for process, group in enumerate(places):
        for shard, endpoint in enumerate(group):
            try:
                standing = tell(endpoint, {"where": True})
            except PSError:
                job.away.add(process)
                break
            if standing["leads"]:
                found[shard] = process
            if standing["follows"]:
                job.followers.append((process, shard))
    lacking = [shard for shard in range(len(places[0])) if shard not in found]
    if lacking:
        raise PSError(
            f"shards {lacking} are served by nobody now; server processes {sorted(job.away)} do not answer. Wait until "
            "they are started again, and repeat the command."
        )
    job.owners = [found[shard] for shard in range(len(places[0]))]
    return job


def _move(places: Sequence[Sequence[str]], move: Move, tell: Tell, say: Callable[[str], None]) -> float:
    """Moves one shard; returns for how many seconds nobody served it."""
    source = places[move.source][move.shard]
    target = places[move.target][move.shard]
    _obeyed(lambda: tell(target, {"follow": source}), f"{target} to let go of what it served before", say)
    began = reported = time.monotonic()
    while not (standing := tell(target, {"where": True}))["joined"]:
        if not standing["follows"]:
            raise PSError(f"{target} was started again while it followed {source}. Repeat the command.")
        if time.monotonic() - reported > _SAY_S:
            reported = time.monotonic()
            say(f"shard {move.shard}: waits for the rows to reach {target} ({reported - began:.0f} s)")
        time.sleep(_POLL_S)
    began = time.monotonic()
    try:
        tell(source, {"switch": True})
    except PSError:
        # The answer may be lost after the order was obeyed.
        if not tell(target, {"where": True})["leads"]:
            raise
    while not tell(target, {"where": True})["leads"]:
        time.sleep(_POLL_S)
    return time.monotonic() - began


def _obeyed(order: Callable[[], Any], what: str, say: Callable[[str], None]) -> None:
    """Repeats an order that is refused for a moment."""
    began = reported = time.monotonic()
    while True:
        try:
            order()
            return
        except PSError:
            if time.monotonic() - began > _SETTLE_S:
                raise
        if time.monotonic() - reported > _SAY_S:
            reported = time.monotonic()
            say(f"waits for {what} ({reported - began:.0f} s)")
        time.sleep(_POLL_S)
