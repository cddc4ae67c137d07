"""The only reader of the process environment: one table of name, type, default and meaning.

Nothing else in the project touches ``os.environ``. A blank value counts as absent, because job templates write
``PADDLE_PSERVERS_IP_PORT_LIST=""`` for "not set". Standard library only: the launcher imports this module.

Example:
    >>> Environment({"PADDLE_TRAINER_ID": "3"}).int("PADDLE_TRAINER_ID")
    3
"""

from __future__ import annotations

import builtins
import os
from collections.abc import Mapping

from fleet.common.env_table import VARIABLES, Variable
from fleet.errors import ConfigError

__all__ = ["VARIABLES", "Environment", "Variable", "export"]

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}


class Environment:
    """A typed view of environment variables; every name read must be in :data:`VARIABLES`.

    Its methods are named after types, so annotations below them say ``builtins.str``.

    Args:
        values: the variables to read; ``None`` reads the live process environment at each call.
    """

    def __init__(self, values: Mapping[str, str] | None = None) -> None:
        self._values = values

    @property
    def _source(self) -> Mapping[str, str]:
        return os.environ if self._values is None else self._values

    def raw(self, name: str) -> str | None:
        """Returns the text of ``name``, or ``None`` when it is absent or blank."""
        if name not in VARIABLES:
            raise KeyError(f"{name} is not in fleet/common/env_table.py; add it there before reading it")
        value = self._source.get(name)
        return value if value is not None and value.strip() else None

    def has(self, name: str) -> bool:
        """Returns whether ``name`` is set to something that is not blank."""
        return self.raw(name) is not None

    def first(self, *names: str) -> str | None:
        """Returns the first of ``names`` that is set."""
        for name in names:
            value = self.raw(name)
            if value is not None:
                return value
        return None

    def str(self, name: builtins.str) -> builtins.str:
        """Returns ``name`` as text, or its default."""
        value = self.raw(name)
        return value if value is not None else _text(VARIABLES[name].default)

    def int(self, name: builtins.str) -> builtins.int:
        """Returns ``name`` as an integer, or its default; raises ConfigError for other text."""
        value = self.raw(name)
        if value is None:
            default = VARIABLES[name].default
            return default if isinstance(default, int) else 0
        try:
            number = int(value.strip())
        except ValueError:
            raise ConfigError(f"{name} is {value!r:.80} in the environment; it takes an integer.") from None
        if abs(number) >= 2**63:
            raise ConfigError(f"{name} is {value!r:.80} in the environment; it takes a 64-bit integer.")
        return number

    def float(self, name: builtins.str) -> builtins.float:
        """Returns ``name`` as a number, or its default; raises ConfigError for other text."""
        value = self.raw(name)
        if value is None:
            default = VARIABLES[name].default
            return float(default) if isinstance(default, int | float) else 0.0
        try:
            return float(value.strip())
        except ValueError:
            raise ConfigError(f"{name} is {value!r:.80} in the environment; it takes a number.") from None

    def bool(self, name: builtins.str) -> builtins.bool:
        """Returns ``name`` as a switch (1/0, true/false, yes/no, on/off), or its default."""
        value = self.raw(name)
        if value is None:
            return bool(VARIABLES[name].default)
        word = value.strip().lower()
        if word in _TRUE or word in _FALSE:
            return word in _TRUE
        raise ConfigError(f"{name} is {value!r:.80} in the environment; it takes 1 or 0.")

    def list(self, name: builtins.str) -> builtins.list[builtins.str]:
        """Returns ``name`` split at commas, blanks dropped; absent gives an empty list."""
        value = self.raw(name)
        return [] if value is None else [part.strip() for part in value.split(",") if part.strip()]

    def inherited(self) -> builtins.dict[builtins.str, builtins.str]:
        """Returns a copy of every variable, for a child process."""
        return dict(self._source)


def _text(default: object) -> str:
    return "" if default is None else f"{default}"


def export(values: Mapping[str, str]) -> None:
    """Sets variables of this process and its children; only for a process that was started to be a worker."""
    os.environ.update(values)
