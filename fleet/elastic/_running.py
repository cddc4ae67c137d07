"""The session that ``fleet.init`` started, for objects that users make themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import fleet

if TYPE_CHECKING:
    from fleet._session import Session
    from fleet.options import DistributedStrategy


def running_session() -> Session | None:
    """Returns the running session, or None before ``fleet.init``."""
    made = vars(fleet).get("_fleet")  # asking fleet for it would make it
    session: Session | None = None if made is None else made._session
    return session


def is_copied(strategy: DistributedStrategy) -> bool:
    """Returns whether the running session has copied ``strategy``, so that a change of it would have no effect."""
    session = running_session()
    if session is None or strategy != session.options:
        return False
    return bool(vars(fleet)["_fleet"]._init_had_strategy or session.optimizers)
