"""Where a restarted worker goes on, from what the servers say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fleet.errors import ConfigError
from fleet.ps.worker.stream_progress import Resumption, StreamProgress, resumption_of


def at(step, offset):
    return [step, {"clicks": {"0": offset}}]


def test_nothing_was_read_before() -> None:
    assert resumption_of([{"points": {}}, {}]) == Resumption()


def test_steps_that_only_some_tables_have_are_repeated_in_their_order() -> None:
    welcomes = [{"points": {"-1": at(3, 30), "0": at(6, 60)}}, {"points": {"-1": at(2, 20), "5": at(4, 40)}}]
    found = resumption_of(welcomes)
    assert found.offsets == {"clicks": {"0": 20}}
    assert [(step, reached["clicks"]["0"]) for step, reached in found.again] == [(3, 30), (4, 40), (6, 60)]


def test_a_step_that_the_others_went_past_is_said_and_not_repeated() -> None:
    welcomes = [{"points": {"-1": at(3, 30)}, "applied_step": 9}, {"points": {"-1": at(2, 20)}, "applied_step": 9}]
    found = resumption_of(welcomes)
    assert (found.offsets, found.again) == ({"clicks": {"0": 30}}, ())
    assert "step 3 of this worker reached only some parameter servers" in found.lost


def test_positions_are_ranges_from_where_it_began() -> None:
    progress = StreamProgress(Resumption())
    assert progress.positions() is None
    progress.begin("clicks", {0: 20, 2: 0})
    progress.note("clicks", 2, 7)
    assert progress.positions() == {"clicks": {"0": (20, 20), "2": (0, 7)}}
    with pytest.raises(ConfigError, match="another dataset of this process reads a stream of that name"):
        progress.begin("clicks", {0: 0})


def test_steps_count_on_after_those_that_were_repeated() -> None:
    progress = StreamProgress(Resumption(again=((3, {}), (4, {}))), step=9)
    assert [progress.step_after_again(), progress.step_after_again(), progress.again] == [3, 9, []]


def test_rows_of_a_batch_in_advance_need_ahead() -> None:
    progress = StreamProgress(Resumption())
    progress.begin("views", {0: 0}, ahead=1)
    progress.check_ahead()
    progress.begin("clicks", {0: 0})
    with pytest.raises(ConfigError, match="stream 'clicks'.*ahead=1"):
        progress.check_ahead()


def test_a_step_that_is_repeated_is_no_part_of_the_next_push() -> None:
    progress = StreamProgress(Resumption(again=((3, {}),)), step=9)
    done: list[str] = []
    exchange: Any = SimpleNamespace(put=lambda *given: done.append("put"), flush=lambda: done.append("flush"))
    client: Any = SimpleNamespace(step=2)
    progress.put(exchange, client, {})
    assert (done, client.step) == (["put", "flush"], 9)
    progress.put(exchange, client, {})
    assert done == ["put", "flush", "put"]
