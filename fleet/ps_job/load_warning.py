"""LoadWarning: warns that a state which a script loads changes no parameter that the servers hold."""

from __future__ import annotations

import functools
import sys
import warnings
import weakref
from collections.abc import Mapping
from typing import Any

from fleet.errors import ConfigError, OptionWarning
from fleet.ps.worker.connection import WorkerConnection

_INSTEAD = "Load a state before fleet.init_worker(), or a save of the servers with fleet.load_model(dirname)."


class LoadWarning:
    """A hook before the state of a module is loaded, also by the script's own module; its copies do nothing."""

    def __init__(self, connection: WorkerConnection) -> None:
        self._connection = weakref.ref(connection)

    def __call__(self, module: Any, state: Any, prefix: str, metadata: Mapping[str, Any], *_: Any) -> None:
        """Warns while the servers hold the parameters.

        Raises:
            ConfigError: the state would replace the parameters by others, which nothing trains.
        """
        connection = self._connection()
        if connection is None or connection.stopped:
            return
        if metadata.get("assign_to_params_buffers", False):
            raise ConfigError(
                "model.load_state_dict(assign=True) would replace the parameters, but the parameter servers hold them. "
                f"{_INSTEAD}"
            )
        # Said here once; without this the next step would report the same write again, as a mistake.
        connection.excuse_writes()
        warnings.warn(
            "model.load_state_dict() does not change what is trained: the parameter servers hold the parameters. "
            f"{_INSTEAD}",
            OptionWarning,
            stacklevel=5,
        )

    def __reduce__(self) -> Any:
        return functools.partial, (sys.audit, "fleet.load")  # it takes any arguments, and every Python has it
