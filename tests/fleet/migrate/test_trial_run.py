"""The trial run of a moved script: how far it comes, and what is said of it."""

from __future__ import annotations

import pytest

from fleet.migrate.trial_run import Trial, line_before
from tests.helpers.trials import Try, train


def test_a_right_script_makes_two_updates(attempt: Try) -> None:
    assert attempt(train(end="raise AssertionError('the trial goes on')")) == Trial(2)


def test_a_script_that_trains_nothing_runs_to_its_end(attempt: Try) -> None:
    assert attempt("import torch\nprint(torch.ones(2))\n") == Trial(0)


@pytest.mark.parametrize(
    ("text", "line", "why", "todo"),
    [
        (train(before="torch.zeros([2], dtype='int64')"), 8, "must be torch.dtype, not str", "Mend the line"),
        (train(after="loss.clear()"), 13, "AttributeError", "Mend the line"),
        (train(before="fleet.distributed_optimizer(optimizer)"), 8, "that it had returned", "Mend the line"),
        (train(before="open('absent.txt')"), 8, "FileNotFoundError", "finds its files"),
        (train(before="import paddle"), 8, "No module named 'paddle'", "still uses Paddle"),
        (train(before="import absent_package"), 8, "No module named 'absent_package'", "Install it"),
        (train(before="model.to('cuda')"), 8, "run for a step, it ends with", "has no GPU"),
        (train(before="raise SystemExit('no data')"), 0, "no data", "Mend the line"),
        ("def main():\n    loss.backward()\n", 0, "it made no update", "with which it trains"),
    ],
)
def test_what_ends_it_is_said_with_its_line(attempt: Try, text: str, line: int, why: str, todo: str) -> None:
    made = attempt(text)
    assert (made.line, why in made.why, todo in made.todo) == (line, True, True), made


def test_arguments_are_asked_for_and_passed_on(attempt: Try) -> None:
    text = "import argparse\np = argparse.ArgumentParser()\np.add_argument('--n', required=True)\np.parse_args()\n"
    made = attempt(text)
    assert "required: --n" in made.why
    assert "-- ARGUMENTS" in made.todo


def test_given_arguments_reach_the_script(attempt: Try) -> None:
    assert attempt("import sys\nassert sys.argv[1:] == ['--n', '3']\n", "--n", "3").why == ""


def test_the_time_limit_is_said_unless_an_update_was_made(attempt: Try) -> None:
    made = attempt(train(before="while True: pass"), timeout_s=3.0)
    assert made.why == "it made no update within 3 s"
    assert (made.line, made.updates) == (8, 0)


def test_a_slow_second_update_is_not_waited_for(attempt: Try) -> None:
    assert attempt(train(after="import time; time.sleep(60)"), timeout_s=4.0) == Trial(1)


def test_the_line_is_that_of_the_old_script() -> None:
    old = "import a\nx = 1\ny = 2\nz = 3\n"
    new = "import a\nimport b\nx = 1\ny = 22\nz = 3\nw = 4\n"
    assert [line_before(old, new, line) for line in range(1, 7)] == [1, 1, 2, 3, 4, 4]
