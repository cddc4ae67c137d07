"""The records on a store: one key ``node/ID`` for each launcher, and ``world``, the job's current generation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from fleet.launch.membership.store import View

NODE_PREFIX = "node/"
WORLD_KEY = "world"
# Phases of a node. "waiting" and "ready" are before the start, the others belong to a fixed generation.
WAITING, READY, RUNNING, WORKERS_DONE, DONE = "waiting", "ready", "running", "workers_done", "done"
# A node of an elastic job that stops its workers and does not come back.
LEAVING = "leaving"
# States of the world.
PROPOSED, FIXED, OVER, COMPLETE = "proposed", "fixed", "over", "complete"


@dataclass(frozen=True, kw_only=True)
class Node:
    """One launcher as it describes itself; ``peer`` goes to the planner, unread here."""

    host: str
    rank: int = -1
    serves: bool = False  # hosts the service: comes first unless ranks were asked for
    is_elastic: bool = True  # False: the number of nodes of the job is fixed
    phase: str = WAITING
    generation: int = 0  # the one it acknowledged or runs in
    peer: Mapping[str, Any] = field(default_factory=dict)
    created: int = 0  # not stored: when its key came
    proof: str = ""  # see record_proof


@dataclass(frozen=True, kw_only=True)
class Reason:
    """Why a generation is over: ``kind`` failed, lost or stopped; the exit code that every launcher hands on.

    In an elastic job also ``left`` (a node was told to stop), ``joined`` (nodes came) and ``scaled``.
    """

    kind: str
    code: int
    node: str
    text: str
    restart: bool = False


@dataclass(frozen=True, kw_only=True)
class World:
    """One generation: its members in rank order, with the record of each.

    ``min_nodes`` and ``max_nodes`` are the range that the job wants now.
    """

    generation: int
    state: str
    nodes: tuple[str, ...]
    peers: tuple[Mapping[str, Any], ...]
    restarts: int = 0
    reason: Reason | None = None
    min_nodes: int = 0
    max_nodes: int = 0
    proof: str = ""  # see record_proof


def job_prefix(job_id: str) -> str:
    """Returns the prefix of every key of a job on its store."""
    return f"/paddle/{job_id}/"


def to_json(record: Node | World) -> dict[str, Any]:
    """Returns ``record`` as JSON data."""
    data = asdict(record)
    data.pop("created", None)
    return data


def to_text(record: Node | World) -> str:
    """Returns ``record`` as it stands on the store."""
    return json.dumps(to_json(record), sort_keys=True)


def read_nodes(view: View) -> dict[str, Node]:
    """Returns the nodes whose lease is alive, by id."""
    return {
        key[len(NODE_PREFIX) :]: replace(Node(**value), created=view.created[key])
        for key, value in view.values.items()
        if key.startswith(NODE_PREFIX)
    }


def read_world(view: View) -> World | None:
    """Returns the current world, or None before the first."""
    value = view.values.get(WORLD_KEY)
    if value is None:
        return None
    reason = value["reason"]
    return World(
        generation=value["generation"],
        state=value["state"],
        nodes=tuple(value["nodes"]),
        peers=tuple(value["peers"]),
        restarts=value["restarts"],
        reason=None if reason is None else Reason(**reason),
        min_nodes=value["min_nodes"],
        max_nodes=value["max_nodes"],
        proof=value["proof"],
    )
