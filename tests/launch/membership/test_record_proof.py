"""Records of a job on etcd that only its launchers can make."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from fleet.launch.membership import world as _world
from fleet.launch.membership.agreement import Rules, first_world
from fleet.launch.membership.record_proof import RecordProofs
from fleet.launch.membership.store import View
from fleet.launch.membership.world import FIXED, Node, World

PROOFS = RecordProofs(b"secret", "/paddle/job/")
WORLD = World(
    generation=3, state=FIXED, nodes=("a",), peers=({"host": "10.0.0.1"},), restarts=1, min_nodes=1, max_nodes=2
)
NODE = Node(host="10.0.0.1", phase="waiting", peer={"name": "a", "ports": [1, 2]})


def view_of(**texts: str) -> View:
    """A view as the store reads it; ``node_a`` stands for ``node/a``."""
    named = {name.replace("_", "/"): text for name, text in texts.items()}
    values = {key: json.loads(text) for key, text in named.items()}
    return View(1, values, named, dict.fromkeys(named, 1))


def test_proved_records_are_read_as_they_were() -> None:
    view = PROOFS.checked(view_of(world=PROOFS.text("world", WORLD), node_a=PROOFS.text("node/a", NODE)))
    world, nodes = _world.read_world(view), _world.read_nodes(view)
    assert world is not None
    assert replace(world, proof="") == WORLD
    assert replace(nodes["a"], proof="") == replace(NODE, created=1)
    assert view.unproved == {}


def changed(text: str, **values: Any) -> str:
    return json.dumps({**json.loads(text), **values})


@pytest.mark.parametrize(
    "text",
    [
        _world.to_text(NODE),
        changed(PROOFS.text("node/a", NODE), host="10.0.0.2"),
        changed(PROOFS.text("node/a", NODE), generation=4),
        changed(PROOFS.text("node/a", NODE), more=1),
        changed(PROOFS.text("node/a", NODE), proof=None),
        changed(PROOFS.text("node/a", NODE), proof="\ud800"),
        PROOFS.text("node/b", NODE),
        RecordProofs(b"secret", "/paddle/other/").text("node/a", NODE),
        RecordProofs(b"another", "/paddle/job/").text("node/a", NODE),
        RecordProofs(b"", "/paddle/job/").text("node/a", NODE),
        "[]",
        "1",
        '{"proof": 1}',
        f'{{"proof": "x", "deep": {"[" * 900 + "]" * 900}}}',
    ],
)
def test_a_record_without_the_proof_is_ignored(text: str) -> None:
    """Issue 10, Medium 9: made, changed, put under another key, or of another job."""
    view = PROOFS.checked(view_of(node_a=text))
    assert view.values == {}
    assert view.texts == {"node/a": text}, "for a compare-and-set that takes its place"
    assert list(view.unproved) == ["node/a"]


def test_the_number_of_nodes_may_change_and_is_a_number() -> None:
    """python -m fleet.elastic scale and the operator, which do not know the job's secret."""
    text = PROOFS.text("world", WORLD)
    world = _world.read_world(PROOFS.checked(view_of(world=changed(text, min_nodes=2, max_nodes=5))))
    assert world is not None
    assert (world.min_nodes, world.max_nodes, world.generation) == (2, 5, 3)
    assert _world.to_text(replace(world, max_nodes=7)) == changed(text, min_nodes=2, max_nodes=7)
    for wrong in ("2", True, -1, 1.5, None, 10**9):
        assert PROOFS.checked(view_of(world=changed(text, max_nodes=wrong))).values == {}


def test_the_first_record_of_a_job_may_be_an_operators() -> None:
    first = _world.to_text(first_world(Rules(min_nodes=2, max_nodes=3)))
    assert list(PROOFS.checked(view_of(world=first)).values) == ["world"]
    for claim in ({"generation": 1}, {"nodes": ["x"]}, {"state": "complete"}, {"restarts": 1}):
        assert PROOFS.checked(view_of(world=changed(first, **claim))).values == {}


def test_a_stranger_is_named_by_a_host_that_can_be_printed() -> None:
    texts = {
        "a": '{"host": "10.0.0.9"}',
        "b": '{"host": "\\u001b[2J"}',
        "c": '{"host": 5}',
        "d": '{"peers": []}',
        "e": "7",
    }
    hosts = PROOFS.checked(view_of(world=_world.to_text(WORLD), **texts)).unproved
    assert hosts == {"world": "10.0.0.1", "a": "10.0.0.9", **dict.fromkeys("bcde", "an unknown host")}
