"""What the checks of one job share."""

from __future__ import annotations

import torch

from fleet.checks.watched import Watched, missed
from fleet.job.running import running_session
from tests.helpers.checked_training import job


def test_a_wrapped_optimizer_is_watched_until_the_end() -> None:
    _, _, optimizer, _ = job({})
    session = running_session()
    assert session is not None
    watched = session.job.listeners.get(Watched)
    assert watched.stepped(optimizer) is not None
    assert missed(session.job) == "what the job does at a step"
    watched.close()
    assert not watched.optimizers
    assert watched.stepped(torch.optim.SGD([torch.zeros(1)], 0.1)) is None
