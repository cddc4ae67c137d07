"""The steps that ``--profile`` names: from one step up to another, as slices of Python count them."""

from __future__ import annotations

import re

from fleet.errors import ConfigError

PROFILE = "FLEET_PROFILE"
FOLDER = "profile"
_MOST = 1000  # a trace of more steps does not open in a browser


def read_range(text: str, source: str) -> tuple[int, int]:
    """Returns the first step and the one before which profiling ends; ``source`` names the text in the error.

    Example:
        >>> read_range("10:13", "--profile")
        (10, 13)
    """
    found = re.fullmatch(r"\s*(\d{1,12}):(\d{1,12})\s*", text)
    if found is None:
        raise ConfigError(
            f"{source} is {text!r:.80}; it takes FIRST:LAST, numbers of steps counted from 0, as in 10:13 for the "
            "steps 10, 11 and 12."
        )
    first, last = int(found[1]), int(found[2])
    if not first < last <= first + _MOST:
        raise ConfigError(
            f"{source} is {text!r:.80}; FIRST:LAST means the steps from FIRST up to LAST, which is not among them, so "
            f"LAST is greater than FIRST, by {_MOST} at most."
        )
    return first, last
