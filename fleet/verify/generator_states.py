"""States of the global random generators, as JSON has them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import numpy as np
import torch

from fleet.verify.tensor_digest import content
from fleet.verify.user_lines import user_site


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


class GeneratorWatch:
    """Says whether torch's generator of the CPU has moved, as every draw moves it, also one inside torch."""

    def __init__(self) -> None:
        self._last: torch.Tensor | None = None

    def settle(self) -> None:
        """Takes the state as it is now for known."""
        self._last = torch.default_generator.get_state()

    def has_moved(self) -> bool:
        """Returns whether the state is another one than it was at the last call of either method."""
        before = self._last
        self._last = torch.default_generator.get_state()
        return before is not None and not torch.equal(before, self._last)


def watch_reseeding(tell: Callable[[str], None]) -> None:
    """Tells ``tell`` the user's line where torch's seed comes from the system after the script had given one.

    A seed or a state that is given later takes its place: then ``tell`` is told ``""``.
    """
    given = False
    of_the_system: set[str] = set()  # states that were read since the system gave the seed
    seed, give_seed = torch.random.seed, torch.random.manual_seed
    read, give_state = torch.random.get_rng_state, torch.random.set_rng_state
    is_reseeded = False

    def told(*, reseeded: bool) -> None:
        nonlocal is_reseeded
        if reseeded != is_reseeded:
            is_reseeded = reseeded
            tell(user_site() if reseeded else "")

    @wraps(seed)
    def seeded() -> int:
        told(reseeded=given)
        return seed()

    @wraps(give_seed)
    def seed_given(*args: Any, **kwargs: Any) -> torch.Generator:
        nonlocal given
        given = True
        told(reseeded=False)
        return give_seed(*args, **kwargs)  # hands on

    @wraps(read)
    def state_read() -> torch.Tensor:
        state = read()
        if is_reseeded:
            of_the_system.add(content(state))
        return state

    @wraps(give_state)
    def state_given(new_state: torch.Tensor) -> None:
        told(reseeded=content(new_state) in of_the_system)
        give_state(new_state)

    for call in (seeded, seed_given, state_read, state_given):
        for module in (torch, torch.random):
            setattr(module, call.__name__, call)
