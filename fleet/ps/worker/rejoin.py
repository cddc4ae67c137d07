"""At which barriers a worker meets the others, when its process or the whole job has been started again.

Barriers of a name have numbers. The servers know the last one that was passed, also after a restart of their own, and
a checkpoint of a worker knows the last one before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fleet.ps.client.client import Client

__all__ = ["rejoin"]


def rejoin(client: Client, state: Mapping[str, Any] | None = None) -> None:
    """Makes ``client`` go on at the right step and barriers.

    Without a checkpoint it goes on where the others are: after the last barrier that the servers know. With one it
    passes again those that came after it, at once, for the others have; and where the servers know fewer (they were
    started anew, from a save) the count begins with theirs, which all workers see. So does the count of steps: a pull
    of sync mode waits for the steps before it, and servers that were started anew will never have had them.

    Args:
        client: open.
        state: what ``client.state_dict()`` was at the checkpoint.
    """
    own = client.state_dict()
    welcomes = client.welcomes() if client.staleness is not None else client.welcomes()[:1]  # where barriers are
    known = [welcome.get("barriers", {}) for welcome in welcomes]
    saved = {} if state is None else dict(state["barriers"])
    passed = {
        name: max(own["barriers"].get(name, 0), min(int(numbers.get(name, 0)) for numbers in known))
        for name in {*own["barriers"], *saved, *(name for numbers in known for name in numbers)}
    }
    if state is not None:
        passed = {name: min(number, int(saved.get(name, 0))) for name, number in passed.items()}
    merged = {**own, **(state or {}), "barriers": passed}
    had = max(max(int(welcome["clock"]), int(welcome["applied_step"])) for welcome in client.welcomes())
    client.load_state_dict({**merged, "step": min(int(merged["step"]), max(had, own["step"]))})
