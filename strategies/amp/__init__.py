"""amp: 16-bit computing, the loss scale, and steps that are skipped on all workers or on none."""

from fleet.strategies.amp.amp import Amp

__all__ = ["Amp"]
