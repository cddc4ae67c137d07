"""The exceptions of the project.

::

    FleetError
    |- ConfigError(ValueError, TypeError)   a value the user wrote is wrong
    |  |- UnknownOptionError(AttributeError, KeyError)  the option or key does not exist
    |  |- StrategyConflictError             two options cannot be on together
    |  `- UnsupportedOptionError            the option exists and cannot be honoured; says why
    |- NotInitializedError(RuntimeError)    a call came before fleet.init()
    |- RendezvousError(TimeoutError)        a peer did not join; names the absent ranks
    |- CheckpointError(OSError)             a file is damaged, or does not fit its target
    |- LaunchError                          the launcher could not start the job or keep it running
    |  `- WorkerFailedError                 a worker failed; carries rank, host, exit code, log path
    |- NanInfError(FloatingPointError)      check_nan_inf found a NaN or Inf; carries rank and step
    `- PSError(ConnectionError)             the parameter server was unreachable, refused or timed out

Every message says, in this order: the option or call as the user typed it, the value received, the rule, the
next step. ``ConfigError`` is a ``ValueError`` and a ``TypeError`` because Fleet scripts catch either.

Standard library only: the launcher imports this module and must start without torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from functools import partial

__all__ = [
    "CheckpointError",
    "ConfigError",
    "FleetError",
    "LaunchError",
    "NanInfError",
    "NotInitializedError",
    "OptionWarning",
    "PSError",
    "RendezvousError",
    "StrategyConflictError",
    "UnknownOptionError",
    "UnsupportedOptionError",
    "WorkerFailedError",
]


class FleetError(Exception):
    """The base of every exception this project raises on purpose."""


class ConfigError(FleetError, ValueError, TypeError):
    """A value the user wrote is wrong; nothing was changed."""


class UnknownOptionError(ConfigError, AttributeError, KeyError, AssertionError):
    """The named option or key does not exist; the message suggests the nearest name.

    It is an ``AssertionError`` too, because Paddle raised one for an unknown key.
    """

    __str__ = Exception.__str__  # KeyError would show the message in quotes


class StrategyConflictError(ConfigError):
    """Two options cannot be on together; ``first``, ``second`` and ``reason`` say which and why."""

    def __init__(self, first: str, second: str, reason: str) -> None:
        super().__init__(f"'{first}' and '{second}' cannot both be on: {reason}. Turn one of them off.")
        self.first = first
        self.second = second
        self.reason = reason

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        return type(self), (self.first, self.second, self.reason)


class UnsupportedOptionError(ConfigError):
    """The option exists and cannot be honoured; the message gives the reason."""


class NotInitializedError(FleetError, RuntimeError):
    """A call came before ``fleet.init()``."""


class RendezvousError(FleetError, TimeoutError):
    """A peer did not join within the timeout; the message names the absent ranks."""


class CheckpointError(FleetError, OSError):
    """A checkpoint file is damaged, incomplete, or does not fit its target."""


class LaunchError(FleetError):
    """The launcher could not start the job or keep it running; it exits with ``exit_code``."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class WorkerFailedError(LaunchError):
    """A worker failed; carries its rank, host, exit code and log file."""

    def __init__(self, message: str, *, rank: int, host: str, exit_code: int, log_path: str) -> None:
        super().__init__(message, exit_code)
        self.rank = rank
        self.host = host
        self.log_path = log_path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        made = partial(type(self), rank=self.rank, host=self.host, exit_code=self.exit_code, log_path=self.log_path)
        return made, (f"{self}",)


class NanInfError(FleetError, FloatingPointError):
    """A NaN or Inf appeared where ``check_nan_inf`` looks; carries the rank it appeared on and that rank's step."""

    def __init__(self, message: str, *, rank: int, step: int) -> None:
        super().__init__(message)
        self.rank = rank
        self.step = step

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return partial(type(self), rank=self.rank, step=self.step), (f"{self}",)


class PSError(FleetError, ConnectionError):
    """The parameter server was unreachable, refused the request, or timed out."""


class OptionWarning(UserWarning):
    """An option was accepted and has no effect here; the text gives the reason."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns `` Did you mean 'x'?`` for the nearest known name, or an empty string.

    Example:
        >>> did_you_mean("gradient_merg", ["amp", "gradient_merge"])
        " Did you mean 'gradient_merge'?"
    """
    if name.startswith("_"):  # tools ask every object for such names; nobody mistypes them
        return ""
    near = get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean {near[0]!r}?" if near else ""
