"""The basic form: rank and size, ParallelEnv, and spawn. A thin layer over the role record and torch."""

from __future__ import annotations

from fleet.parallel.parallel_env import ParallelEnv, get_rank, get_world_size
from fleet.parallel.spawning import spawn

__all__ = ["ParallelEnv", "get_rank", "get_world_size", "spawn"]
