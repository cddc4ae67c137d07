"""What a checkpoint holds: takes the state of model, optimizer and random generators, and restores it.

[Note: What is each worker's own]
With data parallel, sharding, tensor parallelism, a pipeline and amp, one whole state serves every worker; worker 0
writes it, and any number of workers on any mesh can load it. localsgd (parameters between averages, momentum), dgc
(unsent gradients) and an open window of gradient_merge have a state on each worker: then every worker writes its own,
into a folder that all of them share. The wrapper that a strategy puts around the optimizer declares this by its
property ``has_own_state``, and by ``is_out_of_step`` that the workers must not stop here.
"""

from __future__ import annotations

import io
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from fleet.checkpoint.model_states import ModelStates
from fleet.checkpoint.save_load import known_entries
from fleet.checkpoint.to_group import StateMesh
from fleet.strategies._shared.optimizer_wrapper import OptimizerWrapper
from fleet.strategies._shared.parts import PART, has_parts
from fleet.strategies._shared.random_streams import TRACKER
from fleet.training.fleet_model import FleetModel
from fleet.training.fleet_optimizer import FleetOptimizer

if TYPE_CHECKING:
    from fleet.job.session import Session


def module_of(model: nn.Module) -> nn.Module:
    """Returns the user's module."""
    return model.module if isinstance(model, FleetModel) else model


def kinds_of(optimizer: Optimizer | None, scheduler: Any) -> dict[str, str]:
    """Returns the names of the classes whose states a checkpoint holds; absent objects have none."""
    found = {"scheduler": scheduler, "optimizer": getattr(optimizer, "user_optimizer", optimizer)}
    return {role: type(obj).__name__ for role, obj in found.items() if obj is not None}


def windows(state: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Returns the windows of an optimizer's state in which gradients of several batches accumulate, by option."""
    return {k: v for k, v in state.items() if isinstance(v, Mapping) and {"batch", "sums", "k_steps"} <= set(v)}


def states_of(model: nn.Module, session: Session) -> ModelStates:
    """Returns what takes and loads the states of ``model``; in a pipeline a collective call."""
    module = module_of(model)
    whole = StateMesh(session.axes, session.device)
    elsewhere = set(whole.names(list(module.state_dict()))) - set(module.state_dict()) if whole.has_stages else ()
    return ModelStates(module, whole, elsewhere)


def take_model(model: nn.Module, session: Session, keep: bool, copy: bool) -> dict[str, Any]:
    """Returns the whole state of ``model``; where it is divided, a collective call.

    Args:
        model: the user's module, or what ``distributed_model`` returned.
        session: the job.
        keep: False takes part in the gather and returns ``{}``.
        copy: the state is on the host and shares no memory with the model.
    """
    states = states_of(model, session)
    if states.is_collective():
        return states.whole(keep)
    if not keep:
        return {}
    state = module_of(model).state_dict()
    return host_copy(state) if copy else dict(state)


def take_optimizer(optimizer: Optimizer, keep: bool, copy: bool) -> dict[str, Any]:
    """Returns the full state of ``optimizer``; where it is sharded, a collective call. See :func:`take_model`."""
    state = optimizer_state(optimizer)
    if isinstance(optimizer, FleetOptimizer) and (optimizer.is_part or PART in state or has_parts(state)):
        return optimizer.full_state_dict(keep)
    if not keep:
        return {}
    return host_copy(state) if copy else state


def optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """Returns ``optimizer.state_dict()`` without a FleetOptimizer's warning about shards."""
    if isinstance(optimizer, FleetOptimizer):
        return OptimizerWrapper.state_dict(optimizer)
    return optimizer.state_dict()


def put_model(model: nn.Module, session: Session, state: Mapping[str, Any]) -> None:
    """Loads a state that this worker holds, whole or its part; unknown entries are allowed if they hold no tensors."""
    module = module_of(model)
    states = states_of(model, session)
    known = known_entries(state, [*module.state_dict(), *states.elsewhere, PART])
    divided = states.is_part or PART in known or has_parts(module.state_dict())
    module.load_state_dict(states.fitted(known) if divided else known)


def put_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Loads a full state; entries that the optimizer does not know are ignored."""
    if isinstance(optimizer, FleetOptimizer):
        optimizer.set_state_dict(state)
    else:
        known = optimizer.state_dict()
        optimizer.load_state_dict({name: value for name, value in state.items() if name in known})


def host_copy(state: Any) -> Any:
    """Returns ``state`` with every tensor copied to the host."""
    return tree_map_only(Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), state)


def tensor_rows(state: Mapping[str, Any]) -> list[list[Any]]:
    """Returns place, key, type and shape of every tensor that an optimizer's whole ``state`` has for a parameter."""
    return [
        [place, key, str(value.dtype).removeprefix("torch."), list(value.shape)]
        for place, entry in state.get("state", {}).items()
        for key, value in entry.items()
        if isinstance(value, Tensor)
    ]


def without_tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an optimizer's whole ``state`` without what :func:`tensor_rows` lists."""
    entries = {
        place: {key: value for key, value in entry.items() if not isinstance(value, Tensor)}
        for place, entry in state["state"].items()
    }
    return {**state, "state": entries}


def take_random() -> dict[str, Any]:
    """Returns the states of the random generators of this process: torch, the GPU, Python, numpy, streams by name."""
    version, words, gauss = random.getstate()
    name, keys, place, has_gauss, cached = cast("tuple[Any, ...]", np.random.get_state(legacy=True))
    found = {
        "torch": torch.get_rng_state(),
        "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), place, has_gauss, cached],
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state()
    if TRACKER.names:
        found["streams"] = TRACKER.get_states_tracker()
    return found


def put_random(state: Mapping[str, Any], streams: bool = True) -> None:
    """Sets the random generators to what :func:`take_random` returned; without ``streams``, the global ones only."""
    torch.set_rng_state(state["torch"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    name, keys, place, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), place, has_gauss, cached))
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
    """Returns what :func:`to_bytes` packed; no code in it is run."""
    return torch.load(io.BytesIO(np.asarray(array).tobytes()), map_location="cpu", weights_only=True)
