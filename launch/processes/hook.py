"""Runs the command of ``--elastic_pre_hook`` before the workers of a generation start."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Mapping, Sequence

from fleet.errors import LaunchError
from fleet.launch.membership.generation import StoppedBySignalError
from fleet.launch.processes.logs import LaunchLog
from fleet.launch.processes.signals import SignalInbox

_LOOK_S = 0.5


def run_hook(words: Sequence[str], environment: Mapping[str, str], log: LaunchLog, signals: SignalInbox) -> None:
    """Runs the command of ``--elastic_pre_hook`` to its end; raises LaunchError with its code when it fails."""
    if not words:
        return
    try:
        hook = subprocess.Popen(
            words,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise LaunchError(f"--elastic_pre_hook: {words[0]!r} cannot be started: {error.strerror}.") from error
    output = ""
    with hook:
        while hook.returncode is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                output = hook.communicate(timeout=_LOOK_S)[0]
            if stops := signals.take():
                hook.kill()
                raise StoppedBySignalError(f"Terminating with signal {stops[0]}", 128 + stops[0])
    for line in output.splitlines():
        log.opening(f"elastic_pre_hook: {line}")
    if hook.returncode:
        code = hook.returncode if hook.returncode > 0 else 128 - hook.returncode
        raise LaunchError(
            f"--elastic_pre_hook {words[0]!r} ended with code {code}; the workers were not started.", code
        )
