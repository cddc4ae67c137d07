"""The interface of the place where the launchers of a job agree: the key-value service, or etcd.

A store holds a few short texts under the job's prefix: a key for each node, which goes when its launcher does, and one
record of the job. It can do three things with them: keep this node's own key alive, show all of them, and change the
record by compare-and-set.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from fleet.errors import LaunchError


class StoreLostError(LaunchError):
    """The store cannot be reached any more, or has given this node up."""


@dataclass(frozen=True)
class View:
    """The keys under a prefix at one revision; ``created`` orders keys by when they came."""

    revision: int
    values: dict[str, Any] = field(default_factory=dict)  # key without the prefix -> value read from JSON
    texts: dict[str, str] = field(default_factory=dict)  # the same as stored, for compare-and-set
    created: dict[str, int] = field(default_factory=dict)
    unproved: dict[str, str] = field(default_factory=dict)  # key -> host, of records that strangers wrote


class Store(Protocol):
    """One node's standing contact with the store of its job."""

    prefix: str  # stands before every key of the job
    where: str  # the store as messages name it: "on etcd", "at 10.0.0.1:29400"
    ttl_s: float  # for how long this node's key outlives its last sign of life
    forget_s: float  # the key of a launcher that was killed is gone for certain after this
    fields: Mapping[str, Any]  # added to this node's record for the sake of the store
    has_claimed: bool  # this launcher has written this node's key
    is_taken: bool  # another launcher holds this node's key
    is_cut_off: bool  # this node must stop its workers, because the others may soon go on without it
    is_lost: bool  # the store is gone for good; ``silence`` says how

    def fileno(self) -> int:
        """Returns a descriptor that is readable when there may be something to do."""

    def drain(self) -> None:
        """Makes ``fileno`` unreadable until the next news."""

    def view(self) -> View:
        """Returns the newest view, however old."""

    def fresh_view(self) -> View | None:
        """Returns a view read now; None when the store does not answer."""

    def publish(self, text: str) -> None:
        """Makes ``text`` this node's key, for as long as this launcher lives."""

    def rejoin(self) -> None:
        """Says that the workers are stopped: being cut off has no further consequence."""

    def swap(self, key: str, old_text: str | None, text: str | None, *, ends: bool = False) -> bool:
        """Sets ``key`` (None: deletes it) if it holds ``old_text`` (None: absent); False also without an answer.

        ``ends`` marks the record of a job that is over: nobody needs it for long.
        """

    def silence(self) -> str:
        """Returns why the store does not answer at present; empty when it does."""

    def trusts_absence(self) -> bool:
        """Returns whether a node whose key is absent is gone, rather than late after an outage."""

    def close(self, record: str | None = None, *, linger_s: float | None = 0.0) -> None:
        """Gives this node's key back; ``record`` is deleted as well when it is then the only key of the job.

        A node that hosts the store waits up to ``linger_s`` (None: without limit) for the others to leave.
        """
