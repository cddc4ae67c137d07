# Made by `make docs`; a change belongs into the code that it is made from.
"""Fleet's utilities: ``run_check``, ``recompute``, file systems (``fleet.utils.fs``)."""

from fleet.strategies._shared.segments import recompute as recompute
from fleet.strategies._shared.segments import recompute_sequential as recompute_sequential
from fleet.strategies.tensor_parallel.recompute_hybrid import recompute_hybrid as recompute_hybrid
from fleet.utils._run_check import run_check as run_check
from fleet.utils.fs import HDFSClient as HDFSClient
from fleet.utils.fs import LocalFS as LocalFS

__all__ = ["HDFSClient", "LocalFS", "recompute", "recompute_hybrid", "recompute_sequential", "run_check"]
