"""State: the content of a checkpoint beside model and optimizer: its structure, kinds of objects, random generators.

[Note: States that only one worker can load]
With data parallel, sharding, tensor parallelism, a pipeline and amp, one whole state serves every worker; worker 0
writes it, and any number of workers on any mesh can load it. localsgd (parameters between averages, momentum), dgc
(unsent gradients) and an open window of gradient_merge have a state on each worker: then every worker writes its own,
into a folder that all of them share. The wrapper that a strategy puts around the optimizer declares this by its
property ``has_own_state``, and by ``is_out_of_step`` that the workers must not stop here.
"""

from __future__ import annotations

import io
import random
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from fleet.checkpoint.to_group import StateMesh
from fleet.errors import CheckpointError
from fleet.strategies._shared.optimizer_wrapper import OptimizerWrapper
from fleet.strategies._shared.random_streams import TRACKER
from fleet.training.fleet_model import FleetModel
from fleet.training.fleet_optimizer import FleetOptimizer

if TYPE_CHECKING:
    from fleet.job.job import Job

# The structure that resume() relies on: a type; a dict of the required entries; a list of entries with one structure.
_FORMS: dict[str, Any] = {
    "random": {"torch": torch.Tensor, "python": list, "numpy": list},
    "run": {
        "epoch": int,
        "step": int,
        "world_size": int,
        "k_steps": int,
        "extra": dict,
        "kinds": dict,
        "degrees": dict,
        "replicas": int,
        "workers": [{"data": object, "place": dict}],
    },
}


def kinds_of(optimizer: Optimizer | None, scheduler: Any) -> dict[str, str]:
    """Returns the names of the classes whose states a checkpoint holds; absent objects have none."""
    found = {"scheduler": scheduler, "optimizer": getattr(optimizer, "user_optimizer", optimizer)}
    return {role: type(obj).__name__ for role, obj in found.items() if obj is not None}


def windows(state: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Returns the windows of an optimizer's state in which gradients of several batches accumulate, by option."""
    return {k: v for k, v in state.items() if isinstance(v, Mapping) and {"batch", "sums", "k_steps"} <= set(v)}


def names_elsewhere(model: nn.Module, job: Job) -> set[str]:
    """Returns the names of the whole state that only other stages hold; in a pipeline a collective call."""
    own = list((model.module if isinstance(model, FleetModel) else model).state_dict())
    whole = StateMesh(job.axes, job.device)
    return set(whole.names(own)) - set(own) if whole.has_stages else set()


def optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """Returns ``optimizer.state_dict()`` without a FleetOptimizer's warning about shards."""
    if isinstance(optimizer, FleetOptimizer):
        return OptimizerWrapper.state_dict(optimizer)
    return optimizer.state_dict()


def random_states() -> dict[str, Any]:
    """Returns the states of the random generators of this process: torch, the GPU, Python, numpy, streams by name."""
    # As tensors, lists and numbers alone: they are read without running code.
    version, words, gauss = random.getstate()
    name, keys, place, has_gauss, cached = cast("tuple[Any, ...]", np.random.get_state(legacy=True))
    found = {
        "torch": torch.get_rng_state(),
        "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), place, has_gauss, cached],
    }
    # In a process that does not use CUDA, get_rng_state() would start it.
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state()
    if TRACKER.names:
        found["streams"] = TRACKER.get_states_tracker()
    return found


def set_random_states(state: Mapping[str, Any], streams: bool = True) -> None:
    """Sets the random generators to saved :func:`random_states`; without ``streams``, the global ones only."""
    torch.set_rng_state(state["torch"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    name, keys, place, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), place, has_gauss, cached))
    # A run may go on without the GPU that it was saved on.
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if streams and "streams" in state:
        TRACKER.set_states_tracker(state["streams"])


def to_bytes(obj: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Returns ``obj`` as an array of bytes that workers can exchange."""
    buffer = io.BytesIO()
    torch.save(obj, buffer)
    return np.frombuffer(buffer.getbuffer(), dtype=np.uint8)


def from_bytes(array: Any) -> Any:
    """Returns the object that :func:`to_bytes` packed; no code in it runs."""
    return torch.load(io.BytesIO(np.asarray(array).tobytes()), map_location="cpu", weights_only=True)


def check_form(content: Any, name: str, label: str) -> None:
    """Raises CheckpointError that begins with ``label`` unless ``content`` has the structure ``name``."""
    wrong = mismatch(content, _FORMS[name], "")
    if wrong:
        raise CheckpointError(f"{label} {wrong}")


def mismatch(value: Any, form: Any, place: str) -> str:
    """Returns the first difference between ``value`` and the structure ``form``, or an empty string."""
    wanted: Any = form if isinstance(form, type) else type(form)
    if not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
        at = f" at {place}" if place else ""
        return f"holds a value of type {type(value).__name__}{at}, where type {wanted.__name__} is required"
    inner: Iterable[tuple[Any, Any]] = ()
    if isinstance(form, list):
        if not value:
            return f"holds nothing at {place}"
        inner = ((key, form[0]) for key in range(len(value)))
    elif isinstance(form, dict):
        inner = form.items()
    for key, entry in inner:
        if isinstance(value, dict) and key not in value:
            return f"lacks {place}[{key!r}]"
        if wrong := mismatch(value[key], entry, f"{place}[{key!r}]"):
            return wrong
    return ""
