"""What one worker of ``run_workers`` does: set up the process, call the function, leave result or error in a file."""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

_ARRAY = "__numpy__"


@dataclass(frozen=True)
class Job:
    """One worker's orders."""

    module: str
    file: str
    qualname: str
    rank: int
    world_size: int
    backend: str | None
    environment: dict[str, str | None]
    folder: str
    timeout_s: float


def run_job(job: Job, args: tuple[Any, ...]) -> None:
    """Runs the job's function; exits with 1 and an error file when it raises."""
    folder = Path(job.folder)
    _redirect_output(folder / f"output.{job.rank}.txt")
    signal.alarm(int(job.timeout_s) + 15)  # the last resort, should the test run itself be killed
    faulthandler.dump_traceback_later(max(job.timeout_s - 1.0, 0.5))
    for name, value in job.environment.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    try:
        _work(job, args)
    except BaseException as error:
        temporary = folder / f".error.{job.rank}"
        temporary.write_text(f"{type(error).__name__}\n{traceback.format_exc()}")
        temporary.rename(folder / f"error.{job.rank}.txt")
        _leave(1)
    _leave(0)


def load_result(folder: Path, rank: int) -> Any:
    """Reads what the worker of ``rank`` returned; no pickled code is run."""
    import torch

    return _decoded(torch.load(folder / f"result.{rank}.pt", weights_only=True))


def _work(job: Job, args: tuple[Any, ...]) -> None:
    import numpy
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    fn = _function(job)
    if job.backend is not None:
        distributed.init_process_group(job.backend, timeout=timedelta(seconds=job.timeout_s))
    result = fn(job.rank, job.world_size, *args)
    torch.save(_encoded(result), Path(job.folder) / f"result.{job.rank}.pt")
    if distributed.is_initialized():
        if job.backend is not None:
            distributed.barrier()  # nobody tears down the store while a peer still needs it
        distributed.destroy_process_group()


def _function(job: Job) -> Callable[..., Any]:
    """Finds the function by module name, or by file when that name does not lead to the file."""
    try:
        module = importlib.import_module(job.module)
    except ImportError:
        spec = importlib.util.spec_from_file_location(job.module, job.file)
        if spec is None or spec.loader is None:
            raise
        module = importlib.util.module_from_spec(spec)
        sys.modules[job.module] = module
        spec.loader.exec_module(module)
    found: Any = module
    for part in job.qualname.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]


def _redirect_output(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def _leave(code: int) -> None:
    """Ends at once: interpreter shutdown with live gloo threads is slow and may hang."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _encoded(value: Any) -> Any:
    """Returns ``value`` with numpy arrays as marked tensors, which is all that a safe reader accepts."""
    import numpy
    import torch

    if isinstance(value, numpy.ndarray | numpy.generic):
        array = numpy.array(value, order="C")
        return {_ARRAY: torch.from_numpy(array.reshape(-1)), "shape": list(array.shape)}
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, dict):
        return {key: _encoded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_encoded(item) for item in value)
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    raise TypeError(f"a worker returns numbers, text, lists, dictionaries, tensors or arrays, not {type(value)!r}")


def _decoded(value: Any) -> Any:
    if isinstance(value, dict):
        if _ARRAY in value:
            return value[_ARRAY].numpy().reshape(value["shape"])
        return {key: _decoded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_decoded(item) for item in value)
    return value
