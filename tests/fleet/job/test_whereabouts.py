"""Where a worker is in the user's script, and whether a job can go on."""

from __future__ import annotations

import sys
import threading

import pytest
import torch

from fleet.job.whereabouts import (
    BUSY,
    ENDED,
    MEETS,
    SILENT,
    WAITS,
    Whereabouts,
    account,
    can_go_on,
    how_it_ended,
    is_waiting,
    user_line,
    user_line_of,
)


class Asking(torch.nn.Module):
    """Looks at the stack from inside a module that torch calls."""

    def forward(self, found: list[str]) -> torch.Tensor:
        """Appends the line."""
        found.append(user_line(sys._getframe()))
        return torch.zeros(())


def test_the_users_line_is_named_with_its_text() -> None:
    here = user_line(sys._getframe())
    assert here.endswith("`here = user_line(sys._getframe())`")
    found: list[str] = []
    Asking()(found)
    assert "test_whereabouts.py:" in found[0]
    assert "`found.append(user_line(sys._getframe()))`" in found[0]


def test_frames_of_torch_and_of_python_itself_are_passed_over() -> None:
    event = threading.Event()
    thread = threading.Thread(target=lambda: event.wait(10))
    thread.start()
    frame = sys._current_frames()[thread.ident or 0]
    event.set()
    thread.join()
    assert "`thread = threading.Thread(target=lambda: event.wait(10))`" in user_line(frame)


def test_the_line_of_an_error_is_the_users() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.zeros(2).sum().backward()
    assert "`torch.zeros(2).sum().backward()`" in user_line_of(caught.value.__traceback__)
    assert how_it_ended(caught.value).startswith(" with RuntimeError at ")
    assert how_it_ended(None) == ""
    assert user_line_of(None) == "an unknown line"


def test_a_thread_that_waits_in_an_exchange_is_known() -> None:
    assert not is_waiting(sys._getframe())


def test_it_travels_as_text() -> None:
    at = Whereabouts(WAITS, "train.py:3", step=4, since_s=1.5)
    assert Whereabouts.from_text(at.to_text()) == at


@pytest.mark.parametrize(
    ("found", "can"),
    [
        ([Whereabouts(MEETS), Whereabouts(BUSY)], True),
        ([Whereabouts(MEETS), Whereabouts(SILENT)], True),
        ([Whereabouts(MEETS), Whereabouts(ENDED)], False),
        ([Whereabouts(MEETS), Whereabouts(WAITS, "a", since_s=0.5)], True),
        ([Whereabouts(MEETS), Whereabouts(WAITS, "a", since_s=1.5)], False),
        ([Whereabouts(WAITS, "a", since_s=1.5), Whereabouts(WAITS, "a", since_s=1.5)], True),
        ([Whereabouts(WAITS, "a", since_s=1.5), Whereabouts(WAITS, "b", since_s=1.5)], False),
        ([Whereabouts(WAITS, "a", "gather", since_s=1.5), Whereabouts(WAITS, "a", "reduce", since_s=9.0)], True),
        ([Whereabouts(WAITS, "a", "gather", since_s=2.5), Whereabouts(WAITS, "a", "reduce", since_s=9.0)], False),
        ([Whereabouts(WAITS, "a", "", since_s=2.5), Whereabouts(WAITS, "a", "reduce", since_s=9.0)], True),
        ([Whereabouts(WAITS, "a", since_s=1.5), Whereabouts(WAITS, "b", since_s=1.5), Whereabouts(BUSY)], True),
    ],
)
def test_a_job_goes_on_while_one_worker_can(found: list[Whereabouts], can: bool) -> None:
    assert can_go_on(dict(enumerate(found)), 1.0) is can


def test_ranks_at_one_place_share_a_line() -> None:
    busy = Whereabouts(BUSY, "eval.py:3", step=2)
    text = account({0: Whereabouts(MEETS, "a.py:1", "Checkpoint.save()"), 1: busy, 2: busy, 3: Whereabouts(ENDED, "")})
    assert text == (
        "  rank 0: waits in Checkpoint.save() at a.py:1, after step 0\n"
        "  ranks 1, 2: is busy at eval.py:3, after step 2\n"
        "  rank 3: has ended"
    )
