"""The session that ``fleet.init`` started, for objects that users make themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import fleet

if TYPE_CHECKING:
    from fleet._session import Session


def running_session() -> Session | None:
    """Returns the running session, or None before ``fleet.init``."""
    made = vars(fleet).get("_fleet")  # asking fleet for it would make it
    session: Session | None = None if made is None else made._session
    return session
