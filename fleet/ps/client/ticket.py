"""Ticket: requests under way to several servers, and how their answers become one result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fleet.ps.client.link import Link
from fleet.ps.client.link_request import Request
from fleet.ps.client.shards import rows_of_answer
from fleet.ps.wire.messages import Flag, Header, MessageError, Part

__all__ = ["Ticket", "fill"]


@dataclass(slots=True)
class Ticket:
    """Requests under way; :meth:`fleet.ps.client.client.Client.wait` returns their result.

    After a pull, ``reached`` is the step up to which the answers hold every worker's gradients, at least.
    """

    requests: list[tuple[Link, Request]] = field(default_factory=list)
    result: dict[int, Any] = field(default_factory=dict)
    done: bool = False
    reached: int | None = None


def fill(share: list[tuple[Part, Any]], ticket: Ticket) -> Callable[[Header, memoryview], None]:
    """Returns what puts one server's answer to ``ticket`` where it belongs: an array, or (array, places)."""

    def take(header: Header, body: memoryview) -> None:
        ticket.reached = header.step if ticket.reached is None else min(ticket.reached, header.step)
        answered = rows_of_answer(header, body, bool(header.flags & Flag.BFLOAT16))
        if len(answered) != len(share):
            raise MessageError(f"{len(answered)} tables in the answer to a pull of {len(share)}.")
        for part, (asked, target) in zip(answered, share, strict=True):
            if part.table_id != asked.table_id or part.n != asked.n * asked.dim or part.rows is None:
                raise MessageError(f"the answer for table {asked.table_id} has another size.")
            rows = part.rows.reshape(asked.n, asked.dim)
            if isinstance(target, tuple):
                target[0][target[1]] = rows
            else:
                target[:] = rows

    return take
