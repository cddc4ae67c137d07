"""Layers whose weights are divided; the names of :mod:`fleet.layers.mpu.mp_layers`."""

from fleet.layers.mpu.mp_layers import *  # noqa: F403
from fleet.layers.mpu.mp_layers import __all__ as __all__
