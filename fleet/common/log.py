"""The project's logger, named FLEET; levels and handlers belong to the user until ``fleet.init``."""

from __future__ import annotations

import logging
import sys

from fleet.errors import ConfigError

LOGGER = logging.getLogger("FLEET")
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def set_log_level(level: int | str) -> None:
    """Sets the level of the FLEET logger: a name (DEBUG, INFO, WARNING, ERROR, CRITICAL) or a number."""
    if isinstance(level, bool) or not isinstance(level, int | str):
        raise ConfigError(f"set_log_level() takes a number or one of {', '.join(_LEVELS)}, got {level!r}.")
    if isinstance(level, str) and level.upper() not in _LEVELS:
        raise ConfigError(f"set_log_level() takes a number or one of {', '.join(_LEVELS)}, got {level!r}.")
    LOGGER.setLevel(level.upper() if isinstance(level, str) else level)


def show_log() -> None:
    """Makes the FLEET logger write to standard error, unless the program has set up logging itself."""
    # A program that has set up logging decides where messages go.
    if not LOGGER.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)8s] %(message)s"))
        LOGGER.addHandler(handler)
        LOGGER.propagate = False
