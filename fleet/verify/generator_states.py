"""States of the global random generators, as JSON has them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def generator_states() -> dict[str, Any]:
    """Returns the states of torch's generator of the CPU, numpy's and Python's."""
    version, words, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "random": [version, list(words), gauss],
    }


def set_states(states: Mapping[str, Any]) -> None:
    """Makes the generators go on from ``states``."""
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(states["torch"]), dtype=torch.uint8))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    version, words, gauss = states["random"]
    random.setstate((version, tuple(words), gauss))


@contextmanager
def kept_states() -> Iterator[dict[str, Any]]:
    """Gives the states, which the generators have again afterwards."""
    states = generator_states()
    try:
        yield states
    finally:
        set_states(states)
