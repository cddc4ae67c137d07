"""A process that has imported torch and forks itself into scripts: the program that ``ready_python`` starts.

Each request is one packet: what to run, and the descriptors for its output and for word of it. The child goes on where
the interpreter runs this file, so that it ends as a script does: uncaught errors, exit functions and all.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import socket
import sys
import types
import warnings
from dataclasses import dataclass
from typing import Any

_DEFAULT_FILTERS = len(warnings.filters)  # those of Python itself, before any package adds its own


@dataclass
class _Running:
    """A script and the connection on which its end is told."""

    pid: int
    words: socket.socket


def _import_packages() -> None:
    """Imports what a script that trains needs of other packages; of the library itself, nothing."""
    import numba  # noqa: F401
    import torch
    import torch.distributed.fsdp
    import torch.distributed.tensor
    import torch.nn.parallel
    import torch.utils.data  # noqa: F401
    import yaml  # noqa: F401

    torch.optim.SGD([torch.zeros(1)], 1.0).zero_grad()  # imports the half of torch that its optimizers need
    gc.freeze()  # each script would look through all of torch when it ends, for a second


def _next_script(connection: socket.socket) -> dict[str, Any]:
    """Forks for each request; returns in the child alone."""
    running: dict[int, _Running] = {}
    while True:
        readable, _, _ = select.select([connection, *running], [], [])
        for ended in [descriptor for descriptor in readable if isinstance(descriptor, int)]:
            of = running.pop(ended)
            status = os.waitstatus_to_exitcode(os.waitpid(of.pid, 0)[1])
            _tell(of.words, status)
            of.words.close()
            os.close(ended)
        if connection not in readable:
            continue
        packet, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 3)
        if not packet:  # the test run is over
            os._exit(0)
        out, err, told = descriptors
        words = socket.socket(fileno=told)
        pid = os.fork()
        if pid == 0:
            for descriptor, of in running.items():
                os.close(descriptor)
                of.words.close()
            words.close()
            connection.close()
            os.dup2(out, 1)
            os.dup2(err, 2)
            os.close(out)
            os.close(err)
            asked: dict[str, Any] = json.loads(packet)
            return asked
        os.close(out)
        os.close(err)
        watched = os.pidfd_open(pid)  # only here: nobody else keeps a script that has ended from being collected
        _tell(words, pid, watched)
        running[watched] = _Running(pid, words)


def _tell(words: socket.socket, number: int, *descriptors: int) -> None:
    with contextlib.suppress(ConnectionError):  # nobody waits for this script
        socket.send_fds(words, [f"{number}".encode()], descriptors)


def _become(asked: dict[str, Any]) -> types.ModuleType:
    """Makes this process what ``python [-W ...] script`` would be in this folder and environment."""
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    sys.argv[:] = [asked["file"] or "-c", *asked["arguments"]]
    sys.path[0] = os.path.dirname(asked["file"] or "")
    sys.path[1:1] = filter(None, asked["env"].get("PYTHONPATH", "").split(os.pathsep))
    # Behind what packages have added since the start, where it would stand had they been imported after it.
    place = len(warnings.filters) - _DEFAULT_FILTERS
    for option in asked["warnings"]:
        warnings._setoption(option)  # type: ignore[attr-defined]
        warnings.filters.insert(place, warnings.filters.pop(0))  # type: ignore[attr-defined]
        sys.warnoptions.append(option)
    warnings._filters_mutated()  # type: ignore[attr-defined]
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    if asked["file"]:
        main.__file__ = asked["file"]
    sys.modules["__main__"] = main
    return main


if __name__ == "__main__":
    _import_packages()
    _asked = _next_script(socket.socket(fileno=int(sys.argv[1])))
    exec(compile(_asked["code"], _asked["file"] or "<string>", "exec"), _become(_asked).__dict__)
