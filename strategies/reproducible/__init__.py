"""reproducible: the same bits on any number of workers, by logical workers that processes host in turns."""

from fleet.strategies.reproducible.reproducible import Reproducible

__all__ = ["Reproducible"]
