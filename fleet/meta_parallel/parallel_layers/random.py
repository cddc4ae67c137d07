"""Random streams of layers whose weights are divided; the names of :mod:`fleet.layers.mpu.random`."""

from fleet.layers.mpu.random import *  # noqa: F403
from fleet.layers.mpu.random import __all__ as __all__
