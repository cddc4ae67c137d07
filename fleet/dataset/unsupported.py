"""Datasets of Fleet that cannot exist here; creating one raises with the reason."""

from __future__ import annotations

from typing import Any

from fleet.errors import UnsupportedOptionError


class _NotOffered:
    reason = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise UnsupportedOptionError(f"fleet.dataset.{type(self).__name__}: {self.reason}")


class BoxPSDataset(_NotOffered):
    """Refused: it feeds tables that live on GPUs."""

    reason = "it feeds tables on GPUs, and tables live in the servers' host memory. Use fleet.InMemoryDataset."


class FileInstantDataset(_NotOffered):
    """Refused: it reads Paddle's own binary format."""

    reason = "it reads a binary format that Paddle's tools write. Use fleet.QueueDataset, which streams text files."


class TreeIndex(_NotOffered):
    """Refused: the tree of tree-based deep match models."""

    reason = "tree-based deep match (TDM) is not supported; there is no replacement."
