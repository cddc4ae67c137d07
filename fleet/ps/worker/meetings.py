"""Meetings: barriers at which all workers agree on their next act, such as a save."""

from __future__ import annotations

import zlib
from collections.abc import Callable

from fleet.errors import PSError
from fleet.ps.client.client import NothingLoaded
from fleet.ps.wire.messages import DISAGREE
from fleet.ps.worker.served_model import ServedModel

# The name of a barrier. The workers count each name apart, so a save cannot meet the start of another process.
SAVE = "fleet.save"
_ENDS = {
    "load": (NothingLoaded, "loaded"),
    "save": (PSError, "saved"),
    "shrink": (PSError, "deleted"),
    "mark": (PSError, "marked"),
}


class Meetings:
    """Brings this worker to the others.

    Args:
        model: stands at the barriers.
    """

    def __init__(self, model: ServedModel) -> None:
        self.model = model
        self._connection = model.connection
        self._user_call = model.connection.config.user_call

    def meet(self, name: str, wish: str = "") -> str | None:
        """Waits until every worker has come to its same-numbered barrier of this name; returns their common key."""
        exchange = self._connection.exchange
        if exchange is not None:
            exchange.check()
            # The others may wait for steps that this worker has not sent.
            exchange.meeting()
        key = self.model.stand(name, self._user_call(), wish)
        if exchange is not None:
            exchange.met()
        return key

    def act_together(self, what: str, act: Callable[[str], int]) -> int:
        """Does ``act`` with a key that all workers doing ``what`` share; returns when all have done it.

        A restarted worker skips an act that the others have finished without it.

        Raises:
            PSError: one worker came to load and another to do something else; none has done anything.
        """
        key = self.come(what)
        found = 0 if key is None else act(f"{key}-{zlib.crc32(what.encode()):08x}")
        self.end()
        return found

    def come(self, what: str) -> str | None:
        """Waits until every worker is here with its steps applied, to do ``what``; returns the key they share."""
        # A save has all steps up to the call, of every worker.
        self._connection.flush()
        if self._connection.client.state_dict()["barriers"].get(SAVE, 0) % 2:
            # The previous process did not reach the end of a save, or its act was refused: one barrier is left over.
            self.model.stand(SAVE, self._user_call())
        key = self.meet(SAVE, what)
        if key is not None and key.startswith(DISAGREE):
            kind, end = _ENDS[what.split()[0]]
            raise kind(
                f"{self._user_call()}: this worker asks to {what}, but not all ask for the same: "
                f"{key.removeprefix(DISAGREE)}. Every worker must make the same call, with the same folder and "
                f"settings. Nothing was {end}."
            )
        return key

    def end(self) -> None:
        """Waits until every worker has done its part of the act."""
        self._connection.client.barrier(SAVE, self._user_call())
