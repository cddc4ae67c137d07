"""The proofs between the launchers of a job: each record on the store carries an HMAC that only they can compute.

etcd takes records from everybody who may write there; the engine proves them on every store alike. The proof is keyed
by the job's secret and covers the name of the job, the key (for a node its identity) and the record with its
generation, so no record can be made, changed or put under another key without the secret. Under an empty secret it
keeps accidental strangers out, not attackers.

Not covered is how many nodes the job wants: ``python -m fleet.elastic scale`` and the operator of a cluster, which may
not read the job's secret, set it. Nor does a proof keep anybody from deleting records or putting old ones back, which
ends or delays a job: against that, etcd has users with permissions, and the key-value service asks for the secret.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fleet.launch.membership import world as _world
from fleet.launch.membership.agreement import Rules, first_world
from fleet.launch.membership.store import View
from fleet.launch.membership.world import NODE_PREFIX, WORLD_KEY, Node, Reason, World

_SIZES = ("min_nodes", "max_nodes")
_MOST_NODES = 1_000_000
_NODE = json.loads(_world.to_text(Node(host="")))
_REASON = vars(Reason(kind="", code=0, node="", text=""))
_WORLD = json.loads(_world.to_text(World(generation=0, state="", nodes=(), peers=())))


class RecordProofs:
    """Proves the records of one job, and tells those without a proof apart.

    Args:
        secret: the job's secret; empty: the nodes share no secret; None for a reader that was
            not told it, and only tells records of launchers from other values.
        prefix: stands before every key of the job.
    """

    def __init__(self, secret: bytes | None, prefix: str) -> None:
        self._secret = secret
        self._prefix = prefix

    def text(self, key: str, record: Node | World) -> str:
        """Returns ``record`` with its proof, as it stands on the store under ``key``."""
        return _world.to_text(replace(record, proof=self._proof(key, _world.to_json(record))))

    def checked(self, view: View) -> View:
        """Returns ``view`` with the values alone that carry a proof; ``unproved`` names the hosts of the others.

        Their texts stay, so that a compare-and-set can take the place of one.
        """
        values = {key: value for key, value in view.values.items() if self._is_proved(key, value)}
        unproved = {key: _host(value) for key, value in view.values.items() if key not in values}
        return replace(view, values=values, unproved=unproved)

    def _is_proved(self, key: str, value: Any) -> bool:
        if not _is_record(key, value):
            return False
        if self._secret is None:
            return True
        try:
            wanted = self._proof(key, value)
        except RecursionError:
            return False
        given = value["proof"].encode(errors="replace")
        return hmac.compare_digest(given, wanted.encode()) or (key == WORLD_KEY and _claims_nothing(value))

    def _proof(self, key: str, value: Mapping[str, Any]) -> str:
        covered = {name: value[name] for name in value if name != "proof" and not (key == WORLD_KEY and name in _SIZES)}
        text = json.dumps([f"{self._prefix}{key}", covered], sort_keys=True)
        return hmac.new(self._secret or b"", b"fleet-record " + text.encode(), hashlib.sha256).hexdigest()


def _is_record(key: str, value: Any) -> bool:
    """Returns whether ``value`` has the fields and types of the record that a launcher writes under ``key``."""
    if key != WORLD_KEY:
        return key.startswith(NODE_PREFIX) and _is_like(value, _NODE)
    reason = value.get("reason") if isinstance(value, dict) else None
    return (
        _is_like(value, {**_WORLD, "reason": reason})
        and all(_is_size(value[name]) for name in _SIZES)
        and all(isinstance(node, str) for node in value["nodes"])
        and all(isinstance(peer, dict) for peer in value["peers"])
        and (reason is None or _is_like(reason, _REASON))
    )


def _is_like(value: Any, like: Mapping[str, Any]) -> bool:
    """Returns whether ``value`` has the keys of ``like``, with values of the same types."""
    if not isinstance(value, dict) or value.keys() != like.keys():
        return False
    return all(type(value[name]) is type(like[name]) for name in like)


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MOST_NODES


def _claims_nothing(value: Mapping[str, Any]) -> bool:
    """Returns whether this is the record of a job that has not begun, as an operator writes it for its size alone."""
    rules = Rules(min_nodes=value["min_nodes"], max_nodes=value["max_nodes"])
    return bool(value == json.loads(_world.to_text(first_world(rules))))


def _host(value: object) -> str:
    """Returns the host of a node's record, or the host of a world's first node."""
    if isinstance(value, dict) and isinstance(value.get("peers"), list):
        value = next(iter(value["peers"]), None)
    host = value.get("host") if isinstance(value, dict) else None
    return host[:80] if isinstance(host, str) and host.isprintable() else "an unknown host"
