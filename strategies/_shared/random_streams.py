"""Random streams by name: states of torch's generators that stand beside the global one and advance only when used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fleet.errors import ConfigError

# What a stream needs to go on: its seed, and the state of the generator of each kind of device that it has served.
StreamState: TypeAlias = dict[str, Tensor]


class RNGStatesTracker:
    """Random streams by name; inside :meth:`rng_state` torch draws from one of them and not from the global one.

    Example:
        >>> tracker = RNGStatesTracker()
        >>> tracker.add("local_seed", 1024 + fleet.worker_index())
        >>> with tracker.rng_state("local_seed"):
        ...     x = torch.nn.functional.dropout(x)
    """

    def __init__(self) -> None:
        self._streams: dict[str, StreamState] = {}

    @property
    def names(self) -> list[str]:
        """The names of the streams, in the order in which they were added."""
        return list(self._streams)

    def reset(self) -> None:
        """Forgets every stream."""
        self._streams.clear()

    def add(self, name: str, seed: int) -> None:
        """Adds the stream ``name``, which begins as ``torch.manual_seed(seed)`` does.

        Raises:
            ConfigError: a stream of this name, or with this seed, exists.
        """
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ConfigError(f"RNGStatesTracker.add({name!r}, seed={seed!r}): the seed is a whole number.")
        if name in self._streams:
            raise ConfigError(f"RNGStatesTracker.add({name!r}, {seed}): a stream of this name exists. Choose another.")
        for other, state in self._streams.items():
            if int(state["seed"]) == seed:
                raise ConfigError(
                    f"RNGStatesTracker.add({name!r}, {seed}): the stream {other!r} has this seed, and both would give "
                    "the same numbers. Choose another seed."
                )
        self._streams[name] = {"seed": torch.tensor(seed), "cpu": torch.Generator().manual_seed(seed).get_state()}

    @contextmanager
    def rng_state(self, name: str = "model_parallel_rng") -> Iterator[None]:
        """Makes torch draw from the stream ``name`` inside the context; the global stream stays where it is.

        Raises:
            ConfigError: there is no such stream.
        """
        if name not in self._streams:
            raise ConfigError(
                f"RNGStatesTracker.rng_state({name!r}): there is no such stream; there are {self.names}. Add it with "
                "add(name, seed). 'model_parallel_rng' exists after fleet.init() with mp_degree above 1, or after "
                "model_parallel_random_seed()."
            )
        outside = _global_states()
        stream = self._streams[name]
        torch.set_rng_state(stream["cpu"])
        if "cuda" in outside:
            if "cuda" not in stream:  # CUDA came to life after the stream
                device = torch.device("cuda", torch.cuda.current_device())
                stream["cuda"] = torch.Generator(device).manual_seed(int(stream["seed"])).get_state()
            torch.cuda.set_rng_state(stream["cuda"])
        try:
            yield
        finally:
            if self._streams.get(name) is stream:
                stream.update(_global_states())
            torch.set_rng_state(outside["cpu"])
            if "cuda" in outside:
                torch.cuda.set_rng_state(outside["cuda"])

    def get_states_tracker(self) -> dict[str, StreamState]:
        """Returns the state of every stream, as tensors on the host; later draws do not change it."""
        # rng_state() replaces the tensors and never writes into them.
        return {name: dict(state) for name, state in self._streams.items()}

    def set_states_tracker(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Replaces all streams by ``states``, which :meth:`get_states_tracker` returned.

        Raises:
            ConfigError: ``states`` has another form.
        """
        for name, state in states.items():
            if not isinstance(state, Mapping) or not {"seed", "cpu"} <= set(state) <= {"seed", "cpu", "cuda"}:
                raise ConfigError(
                    f"RNGStatesTracker.set_states_tracker(): the state of {name!r} is not one that "
                    "get_states_tracker() returned."
                )
        self._streams = {name: dict(state) for name, state in states.items()}


def _global_states() -> StreamState:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


# The tracker of this process: layers draw from it, and checkpoints and recompute keep it.
TRACKER = RNGStatesTracker()
