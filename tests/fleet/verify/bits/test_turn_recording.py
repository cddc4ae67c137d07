"""Calls and losses belong to the turn that has begun, and digests tell a single bit."""

from __future__ import annotations

import torch

from fleet.verify.bits.turn_recording import TurnRecords


def test_calls_and_losses_belong_to_the_turn_that_has_begun() -> None:
    turns = TurnRecords()
    turns.begin(7, 2, 0)
    turns.note_call("0", "Linear", (torch.ones(2), "text"), {"out": torch.zeros(3, dtype=torch.int64)})
    turns.note_losses([0.5])
    turns.begin(7, 3, 4)
    turns.note_losses([0.25])
    found = turns.take()
    assert list(found) == ["7 2", "7 3"]
    assert [turn["losses"] for turn in found.values()] == [[0.5], [0.25]]
    assert [turn["drawn"] for turn in found.values()] == [0, 4]
    (call,) = found["7 2"]["forward"]
    assert (call["module"], len(call["ins"]), len(call["outs"])) == ("0", 1, 1)
    assert turns.take() == {}


def test_what_follows_an_update_in_the_same_turn_belongs_to_the_next_one() -> None:
    turns = TurnRecords()
    turns.begin(0, 1, 3)
    turns.take()
    turns.note_losses([1.0])
    assert turns.take() == {"0 1": {"drawn": 0, "forward": [], "losses": [1.0]}}


def test_bits_are_told_once_a_turn_has_begun() -> None:
    turns = TurnRecords()
    value = torch.linspace(0, 1, 100_000)
    other = value.clone()
    other[77] = torch.nextafter(other[77], torch.tensor(2.0))
    assert "bits" not in turns.digest(value)
    turns.begin(0, 0, 0)
    assert turns.digest(value)["bits"] != turns.digest(other)["bits"]
    assert turns.digest(value) == turns.digest(value.clone())
