"""The FLEET logger: levels are checked, and a program's own logging is left alone."""

from __future__ import annotations

import logging

import pytest

from fleet.common.log import LOGGER, set_log_level, show_log
from fleet.errors import ConfigError


def test_levels() -> None:
    """B.2 set_log_level: names and numbers; anything else raises and changes nothing."""
    set_log_level("debug")
    assert LOGGER.level == logging.DEBUG
    set_log_level(30)
    assert LOGGER.level == logging.WARNING
    for wrong in ("LOUD", True, None, 1.5):
        with pytest.raises(ConfigError, match="DEBUG, INFO"):
            set_log_level(wrong)  # type: ignore[arg-type]
    assert LOGGER.level == logging.WARNING


def test_a_programs_own_logging_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No handler is added where the program has set up logging; otherwise one, once."""
    LOGGER.handlers.clear()
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.NullHandler()])
    show_log()
    assert LOGGER.handlers == []
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    show_log()
    show_log()
    assert len(LOGGER.handlers) == 1
