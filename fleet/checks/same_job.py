"""Compares options and models, which must be the same on every worker, before anything is exchanged."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fleet.checks.comparison import ranks_by
from fleet.common.version import __version__
from fleet.errors import ConfigError, OptionWarning
from fleet.job.axes import COPY_AXES
from fleet.job.job import Job
from fleet.job.listener import Listener
from fleet.job.roll_call import RollCall
from fleet.job.whereabouts import named
from fleet.options import DistributedStrategy
from fleet.strategies._declare.fields import Values
from fleet.strategies._shared.experts import expert_modules, expert_names

_MAX_SHOWN = 3


class SameJob(Listener):
    """Compares options and models between the workers of ``job`` before anything is exchanged."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._has_versions = False

    def options_asked(self, call: str, options: Values) -> None:
        """Raises ConfigError on every worker unless all have the same ``options``."""
        roll_call = self._job.roll_call
        if roll_call is not None and isinstance(options, DistributedStrategy):
            roll_call.post("versions", f"torch {torch.__version__}, torch-fleet {__version__}")
            check_options(roll_call, call, options)
            if self._job.global_rank == 0 and not self._has_versions:
                self._has_versions = True
                warn_of_versions(roll_call.posted("versions", range(self._job.world_size)))

    def before_wrap(self, module: nn.Module) -> None:
        """Raises ConfigError unless the workers that hold the same part of the model have the same ``module``."""
        if self._job.roll_call is not None:
            check_model(self._job.roll_call, module, self._job.axes.ranks(*COPY_AXES, "mp"))


def warn_of_versions(said: Mapping[int, str]) -> None:
    """Warns where workers, by rank, have ``said`` other versions than the rest."""
    if len(set(said.values())) > 1:
        warnings.warn(
            f"fleet.init(): the workers run different versions: {_by_rank(said)}. Their numbers may differ, and their "
            "exchanges may not fit together. Install the same on every node.",
            OptionWarning,
            stacklevel=4,
        )


def check_options(roll_call: RollCall, call: str, options: DistributedStrategy) -> None:
    """Raises ConfigError on every worker unless all have the same options."""
    _compare(roll_call, call, {f"strategy.{n}": f"{v!r}" for n, v in _entries("", options.to_dict(all_options=True))})


def check_model(roll_call: RollCall, module: nn.Module, peers: Sequence[int]) -> None:
    """Raises ConfigError unless the workers ``peers``, and this one, have the same parameters and buffers."""
    own = set(expert_names(module))  # named by their numbers, which differ between workers
    parameters = {name: p for name, p in module.named_parameters() if name not in own}
    found = {name: f"a parameter with {_layout(p)}" for name, p in parameters.items()}
    found |= {name: f"a buffer with {_layout(b)}" for name, b in module.named_buffers() if name not in own}
    found |= {f"the experts of {name}": f"{len(list(experts.children()))}" for name, experts in expert_modules(module)}
    found["the order of the parameters"] = "that of " + ", ".join(parameters)
    _compare(roll_call, "fleet.distributed_model()", found, peers)


def _layout(tensor: torch.Tensor) -> str:
    if is_lazy(tensor):
        return "no shape yet"
    grad = ", requires_grad=True" if tensor.requires_grad else ""
    return f"shape {tuple(tensor.shape)}, {tensor.dtype}{grad}"


def _compare(roll_call: RollCall, call: str, values: Mapping[str, str], peers: Sequence[int] | None = None) -> None:
    """Compares the digest of ``values`` with that of ``peers``, by default of all workers.

    The values themselves are exchanged only where the digests of all workers differ.
    """
    text = json.dumps(values)
    if len(set(roll_call.meet(call, hashlib.sha256(text.encode()).hexdigest()))) == 1:
        return
    said = [json.loads(other) for other in roll_call.meet(call, text)]
    found = {rank: said[rank] for rank in (range(len(said)) if peers is None else peers)}
    names = list(dict.fromkeys(name for other in found.values() for name in other))
    differing = [name for name in names if len({other.get(name) for other in found.values()}) > 1]
    if not differing:
        return
    by_name = {name: {rank: other.get(name) for rank, other in found.items()} for name in differing}
    lines = [f"  {name}: {_by_rank(by_name[name])}" for name in differing[:_MAX_SHOWN]]
    more = f"\n  and {len(differing) - _MAX_SHOWN} more" if len(differing) > _MAX_SHOWN else ""
    raise ConfigError(
        f"{call}: the workers differ:\n" + "\n".join(lines) + f"{more}\nThey must be the same on every worker; only "
        "the data may depend on the rank."
    )


def _by_rank(values: Mapping[int, str | None]) -> str:
    found = ranks_by(values)
    return "; ".join(f"{'nothing' if value is None else value} on {named(where)}" for value, where in found.items())


def _entries(prefix: str, values: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Iterates over the values of nested dictionaries, by path."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _entries(f"{prefix}{name}.", value)
        else:
            yield f"{prefix}{name}", value
