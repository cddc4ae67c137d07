"""sharding: optimizer states, gradients and parameters divided over workers, in stages 1 to 3."""

from fleet.strategies.sharding.sharding import Sharding

__all__ = ["Sharding"]
