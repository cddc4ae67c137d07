"""Stages 2 and 3: an optimizer whose parameters are parts; it follows the parameters when the model is divided."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from fleet.errors import ConfigError
from fleet.strategies._declare.optimizer_kinds import whole_only
from fleet.strategies._shared.muon import MuonRule
from fleet.strategies._shared.optimizer_wrapper import OptimizerWrapper
from fleet.strategies._shared.parts import is_part, optimizer_state_like, part_like


def check_any_stage(optimizer: Optimizer) -> None:
    """Raises ConfigError when ``optimizer`` cannot work on a part of the parameters at all."""
    if isinstance(optimizer, LBFGS):
        raise ConfigError(
            "sharding cannot divide torch.optim.LBFGS: its state is one history over all parameters together. Use an "
            "optimizer that updates each parameter by itself, or turn sharding off."
        )


def check_divided(optimizer: Optimizer) -> None:
    """Raises ConfigError when ``optimizer`` needs whole parameters, which stages 2 and 3 do not keep."""
    found = whole_only(optimizer)
    if found is None and isinstance(optimizer, MuonRule):
        found = "fleet.optimizer.Muon", "it orthogonalizes the update of a whole matrix"
    if found is not None:
        raise ConfigError(
            f"sharding stages 2 and 3 divide each parameter, and {found[0]} needs it whole: {found[1]}. Set "
            "sharding_configs['stage'] to 1, which gives whole parameters to workers, or use another optimizer."
        )


class ShardedOptimizer(OptimizerWrapper):
    """Steps the optimizer inside on this worker's parts.

    Until the model is divided it forwards everything, and :meth:`repoint` moves it to the new parameters.

    Args:
        optimizer: the optimizer inside.
        reshard: makes the model release gathered parameters.
    """

    def __init__(self, optimizer: Optimizer, reshard: Callable[[], None]) -> None:
        super().__init__(optimizer)
        self._reshard = reshard
        self._replaced: dict[nn.Parameter, nn.Parameter] = {}

    def repoint(self, replaced: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Puts the new parameters of ``replaced`` in the place of the old ones; state goes with them, by parts."""
        self._replaced.update(replaced)
        for group in self.param_groups:
            group["params"][:] = [self._replaced.get(p, p) for p in group["params"]]
        for old in [p for p in self.state if self._replaced.get(p, p) is not p]:
            new = self._replaced[old]
            entry = self.state.pop(old)
            self.state[new] = {
                key: part_like(value, new) if isinstance(value, Tensor) and value.shape == new.shape else value
                for key, value in entry.items()
            }

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Updates this worker's parts; returns the closure's loss."""
        # A forward without a backward may have left gathered copies, which this update would not reach.
        self._reshard()
        return super().step(closure)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state: with DTensors, whole, or the part that this worker saved.

        Raises CheckpointError for the part of another worker.
        """
        if any(is_part(p) for p in self.parameters()):
            state_dict = optimizer_state_like(state_dict, self.parameters())
        super().load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group; parameters from before the model was divided are followed."""
        parameters = param_group["params"]
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        super().add_param_group({**param_group, "params": [self._replaced.get(p, p) for p in parameters]})

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_reshard": None, "_replaced": {}}
