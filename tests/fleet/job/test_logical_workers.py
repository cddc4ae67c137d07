"""Logical workers: who hosts which, whose turn it is, and the random numbers of a turn."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fleet.errors import ConfigError
from fleet.job.logical_workers import LogicalWorkers, hosted_ranks


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Each test starts from one seed."""
    torch.manual_seed(5)


def drawn() -> tuple[float, float, float]:
    """Returns a number of each generator."""
    return float(torch.rand(())), float(np.random.rand()), random.random()


def rounds(logical: LogicalWorkers, count: int) -> dict[tuple[int, int], tuple[float, float, float]]:
    """Returns what the turns of ``count`` rounds draw, by round and rank."""
    found = {}
    for _ in range(count):
        logical.begin_loop()
        for _ in logical.ranks:
            rank = logical.begin_turn(None)
            found[logical.round, rank] = drawn()
            logical.end_turn()
    return found


# ---- who hosts which ------------------------------------------------------------------------------------------------


def test_blocks_are_even_and_the_first_ones_larger() -> None:
    assert [[*hosted_ranks(8, 3, host)] for host in range(3)] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert [len(hosted_ranks(8, 5, host)) for host in range(5)] == [2, 2, 2, 1, 1]


@given(st.integers(1, 40), st.data())
def test_each_rank_has_one_host(num: int, data: st.DataObject) -> None:
    num_hosts = data.draw(st.integers(1, num))
    blocks = [hosted_ranks(num, num_hosts, host) for host in range(num_hosts)]
    assert [rank for block in blocks for rank in block] == [*range(num)]
    sizes = [len(block) for block in blocks]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


# ---- turns ----------------------------------------------------------------------------------------------------------


def test_turns_follow_each_other_round_by_round() -> None:
    logical = LogicalWorkers(5, 2, 1)
    begun: list[int] = []
    ended: list[int] = []
    logical.begins.append(begun.append)
    logical.ends.append(lambda: ended.append(logical.rank))
    for _ in range(2):
        assert (logical.rank, logical.is_last, logical.is_at_update) == (3, False, True)
        assert logical.begin_turn(None) == 3
        assert (logical.is_amid_update, logical.is_at_update) == (True, False)
        logical.end_turn()
        assert (logical.rank, logical.is_last, logical.is_at_update) == (4, True, False)
        assert logical.begin_turn(None) == 4
        assert not logical.is_amid_update
        logical.end_turn()
        logical.end_turn()  # without a turn it is without effect
    assert begun == ended == [3, 4, 3, 4]
    assert logical.round == 2


def test_an_update_may_have_several_rounds() -> None:
    logical = LogicalWorkers(2, 2, 0, rounds_per_update=2)
    at_update, amid = [], []
    for _ in range(4):
        at_update.append(logical.is_at_update)
        logical.begin_turn(None)
        amid.append(logical.is_amid_update)
        logical.end_turn()
    assert at_update == [True, False, True, False]
    assert amid == [True, False, True, False]


def test_counts_begin_anew_with_each_turn() -> None:
    logical = LogicalWorkers(1, 1, 0)
    logical.begin_turn(None)
    logical.count, logical.is_counted = 7.0, True
    logical.end_turn()
    logical.begin_turn(None)
    assert (logical.count, logical.is_counted) == (1.0, False)


def test_a_turn_within_a_turn_is_refused() -> None:
    logical = LogicalWorkers(2, 1, 0)
    logical.begin_turn(None)
    with pytest.raises(ConfigError, match="batch of logical worker 0 was asked for while the loop still has another"):
        logical.begin_turn(None)


def test_a_loop_that_was_left_amid_an_update_is_refused() -> None:
    logical = LogicalWorkers(3, 1, 0)
    logical.begin_turn(None)
    logical.end_turn()
    logical.begin_turn(None)
    with pytest.raises(ConfigError, match=r"left after 2 of 3 batches of an update.*fleet.update_loss\(loss\) returns"):
        logical.begin_loop()


@pytest.mark.parametrize("num", [1, 3])
def test_a_loop_may_be_left_in_the_last_turn_of_a_round(num: int) -> None:
    logical = LogicalWorkers(num, 1, 0)
    for _ in range(num - 1):
        logical.begin_turn(None)
        logical.end_turn()
    logical.begin_turn(None)
    logical.begin_loop()
    assert (logical.round, logical.place, logical.is_open) == (1, 0, False)


# ---- random numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_hosts", [1, 2, 3, 4, 5])
def test_numbers_follow_the_logical_rank(num_hosts: int) -> None:
    """Acceptance 4: a stream that follows the place on the process, or the process, fails here."""
    alone = rounds(LogicalWorkers(5, 1, 0), 3)
    assert len(set(alone.values())) == 15
    for host in range(num_hosts):
        torch.manual_seed(5)
        found = rounds(LogicalWorkers(5, num_hosts, host), 3)
        assert found == {place: alone[place] for place in found}


def test_between_rounds_all_processes_draw_the_same_numbers() -> None:
    found = []
    for host in range(2):
        torch.manual_seed(5)
        logical = LogicalWorkers(3, 2, host)
        rounds(logical, 1)
        found.append(drawn())
    assert found[0] == found[1]


def test_a_seed_that_the_script_sets_between_rounds_is_the_jobs() -> None:
    logical = LogicalWorkers(2, 1, 0)
    first = rounds(logical, 2)
    torch.manual_seed(6)
    second = rounds(logical, 2)
    assert logical.seed == 6
    torch.manual_seed(6)
    logical = LogicalWorkers(2, 1, 0)
    logical.round = 2
    assert rounds(logical, 2) == second
    assert {*first.values()}.isdisjoint(second.values())


def test_a_loop_knows_a_new_seed_before_its_first_turn() -> None:
    """Loader processes are given the seed of their batches ahead of the first turn."""
    logical = LogicalWorkers(1, 1, 0)
    torch.manual_seed(8)
    logical.begin_loop()
    assert logical.seed == 8


def test_numbers_drawn_for_data_hide_no_new_seed() -> None:
    logical = LogicalWorkers(1, 1, 0)
    torch.manual_seed(8)
    logical.draw_from("data", 1)
    assert logical.seed == 8


def test_a_seed_that_the_script_sets_at_an_update_holds_until_the_next_turn() -> None:
    undisturbed = rounds(LogicalWorkers(2, 1, 0), 2)
    torch.manual_seed(5)
    logical = LogicalWorkers(2, 1, 0)
    for _ in logical.ranks:
        logical.begin_turn(None)
        if logical.is_last:
            torch.manual_seed(99)
            assert float(torch.rand(())) == float(torch.rand((), generator=torch.Generator().manual_seed(99)))
        logical.end_turn()
    found = rounds(logical, 1)
    assert logical.seed == 5
    assert found == {(1, rank): undisturbed[1, rank] for rank in range(2)}


def test_a_seed_in_a_turn_before_the_last_is_refused() -> None:
    logical = LogicalWorkers(2, 1, 0)
    logical.begin_turn(None)
    with torch.random.fork_rng():
        torch.manual_seed(7)
    torch.rand(3)
    logical.end_turn()
    logical = LogicalWorkers(2, 1, 0)
    logical.begin_turn(None)
    torch.manual_seed(99)
    with pytest.raises(ConfigError, match=r"torch.manual_seed\(99\) was called in the batch of logical worker 0"):
        logical.end_turn()


def test_the_state_continues_with_any_number_of_hosts() -> None:
    whole = rounds(LogicalWorkers(4, 1, 0), 5)
    torch.manual_seed(5)
    stopped = LogicalWorkers(4, 2, 0)
    rounds(stopped, 2)
    between = drawn()
    state = stopped.state()
    assert state == {"logical_workers": 4, "seed": 5, "round": 2}
    for host in range(3):
        torch.manual_seed(77)
        resumed = LogicalWorkers(4, 3, host)
        resumed.begin_turn(None)
        resumed.load(state)
        assert drawn() == between
        found = rounds(resumed, 3)
        assert found == {place: whole[place] for place in found}
        assert {number for number, _ in found} == {2, 3, 4}


def test_an_agreed_seed_is_no_seed_of_the_script() -> None:
    torch.manual_seed(1)  # of this process alone
    logical = LogicalWorkers(2, 2, 1)
    logical.agree_on_seed(5)
    found = rounds(logical, 1)
    torch.manual_seed(5)
    assert found == rounds(LogicalWorkers(2, 2, 1), 1)
