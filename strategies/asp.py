"""asp: two of every four weights stay zero, the pattern that sparse tensor cores accelerate.

[Note: Which weights]
The weights of ``nn.Linear`` and ``nn.Conv2d`` whose output dim is a multiple of 8 and whose input dim (for a
convolution, the channels of a group) is a multiple of 16: the rule of NVIDIA's ASP, which omits weights that sparse
tensor cores cannot use. Each run of four neighbours along the input dim keeps the two of largest magnitude; of equal
ones, the first. Frozen weights, and layers in ``asp_configs['excluded_layers']``, stay dense.

[Note: When the masks are chosen]
Rank 0 chooses them at the first training forward, so weights that are loaded after ``distributed_model`` count, and
sends them to the others; a worker that holds only rows of a weight (sharding) chooses for these rows. After that they
never change. They are part of the optimizer's state: a loaded state replaces them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fleet.errors import CheckpointError, ConfigError
from fleet.job.axes import COPY_AXES
from fleet.strategies._declare.fields import Config, setting
from fleet.strategies._declare.strategy import Guide, Stage, Strategy
from fleet.strategies._gradients.flat import broadcast_from_rank_0
from fleet.strategies._shared.module_names import check_patterns, find_modules
from fleet.strategies._shared.optimizer_wrapper import OptimizerWrapper
from fleet.strategies._shared.parts import local

if TYPE_CHECKING:
    from fleet.job.job import Job

_OUTPUTS, _INPUTS = 8, 16


@dataclass(frozen=True, kw_only=True)
class AspConfig(Config, option="asp_configs"):
    """The layers that stay dense; Fleet's ``asp`` has no settings."""

    excluded_layers: tuple[str, ...] = setting(
        [], "modules that stay dense, with everything in them: qualified names, or patterns such as 'head*'"
    )


class Asp(Strategy):
    """Applies 2:4 sparsity masks after each update."""

    name = "asp"
    meaning = "Keep two of every four weights at zero (2:4 sparsity): the masks are applied again after each update."
    stage = Stage.UPDATE
    Config = AspConfig
    after = ("build_strategy", "lars", "lamb")  # masks the result of the final rule
    in_ps_job = True
    in_place = True
    conflicts = {
        "tensor_parallel": "the weights that stay are chosen in whole layers, and these workers hold parts of some",
        "pipeline": "asp looks for the layers that it can make sparse in a whole model, and a stage holds some of them",
    }
    model_effect = "sets two of every four weights of large linear and convolution layers to zero at the first forward"
    optimizer_effect = "sets the masked weights back to zero after each update"
    guide = Guide(
        when="The model will be served on sparse tensor cores; train it dense first, then again with asp on.",
        cost="One pass over the masked weights in each update, and a byte for each of them.",
        formula="of w[i, 4j .. 4j + 3] the two of largest magnitude are kept",
        source="Mishra et al., 2021, arXiv 2104.08378",
        example={"asp": True},
    )

    def __init__(self, config: Any, job: Job) -> None:
        """Starts without masks."""
        super().__init__(config, job)
        self.masks = Masks(job)
        self._root: nn.Module | None = None
        self._handles: list[RemovableHandle] = []

    def check_model(self, model: nn.Module) -> None:
        """Raises ConfigError when an excluded layer does not exist, or no layer is left to be sparse."""
        if not eligible_weights(model, self.config.excluded_layers):
            raise ConfigError(
                f"asp finds no weight in {type(model).__name__} that it could make sparse: it takes nn.Linear and "
                f"nn.Conv2d whose output dim is a multiple of {_OUTPUTS} and whose input dim is a multiple of "
                f"{_INPUTS}, and {list(self.config.excluded_layers)!r} is excluded. Turn asp off for this model."
            )

    def prepare_model(self, model: nn.Module) -> None:
        """Remembers the module that has the user's names."""
        self._root = model

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Returns ``model``; its masks are chosen at its first training forward."""
        root = self._root if self._root is not None else model
        chosen = set(eligible_weights(root, self.config.excluded_layers))
        weights = {name: p for name, p in root.named_parameters() if p in chosen}
        self.masks.offer(weights)

        def before_forward(module: nn.Module, inputs: Any) -> None:
            if module.training and torch.is_grad_enabled():
                self.masks.choose(weights.values())

        self._handles.append(root.register_forward_pre_hook(before_forward, prepend=True))
        # A loaded state may be dense: its masked entries become zero at once.
        self._handles.append(root.register_load_state_dict_post_hook(lambda *_: self.masks.apply()))
        return model

    def wrap_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Returns an optimizer that applies the masks after each update."""
        return MaskingOptimizer(optimizer, self.masks)

    def close(self) -> None:
        """Removes the hooks; zeros are then updated like all other weights."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class Masks:
    """Which entries of which weights are zero; one object for all models and optimizers of a session.

    A weight goes by the number of its model and its qualified name, ``0:layer1.weight``.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._weights: dict[str, Tensor] = {}
        self._dropped: dict[Tensor, Tensor] = {}
        self._settled: set[Tensor] = set()
        self._early: dict[str, Tensor] = {}
        self._num_models = 0

    def offer(self, weights: Mapping[str, Tensor]) -> None:
        """Adds the ``weights`` of one more model to those that become sparse."""
        offered = {f"{self._num_models}:{name}": weight for name, weight in weights.items()}
        self._num_models += 1
        early = {name: self._early.pop(name) for name in offered if name in self._early}
        self._weights.update(offered)
        self.load(early)

    @torch.no_grad()
    def choose(self, weights: Iterable[Tensor]) -> None:
        """Chooses, as rank 0 does, the masks of those ``weights`` that are trained and have none yet."""
        waiting = [w for w in weights if w.requires_grad and w not in self._settled]
        if not waiting:
            return
        # Also where a loaded state has set them: whatever each worker loaded, all go on with the same ones.
        chosen = [self._dropped[w] if w in self._dropped else smaller_two_of_four(local(w)) for w in waiting]
        group = self._job.axes.group(*COPY_AXES)
        if group is not None and self._job.collective:
            whole = [place for place, w in enumerate(waiting) if local(w) is w]
            sent = [chosen[place].to(torch.uint8) for place in whole]
            broadcast_from_rank_0(sent, group)
            for place, mask in zip(whole, sent, strict=True):
                chosen[place] = mask.to(torch.bool)
        self._dropped.update(zip(waiting, chosen, strict=True))
        self._settled.update(waiting)
        self.apply()

    @torch.no_grad()
    def apply(self) -> None:
        """Sets the masked entries of every weight to zero."""
        for weight, dropped in self._dropped.items():
            local(weight).masked_fill_(dropped, 0.0)

    def of(self, weight: Tensor) -> Tensor | None:
        """Returns the mask of ``weight``, True where it is kept at zero; ``None`` without one."""
        return self._dropped.get(weight)

    def save(self) -> dict[str, Tensor]:
        """Returns a copy of each mask by name, True where the weight is zero."""
        return {name: self._dropped[w].clone() for name, w in self._weights.items() if w in self._dropped}

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Loads masks that :meth:`save` returned and applies them; masks of a later model wait for it.

        Raises CheckpointError when a mask does not fit its weight; nothing is loaded then.
        """
        # All are checked before the first is loaded.
        for name, dropped in saved.items():
            weight = self._weights.get(name)
            if weight is None and int(name.partition(":")[0]) < self._num_models:
                raise CheckpointError(
                    f"The optimizer state holds an asp mask for {name!r} (model : parameter), which asp keeps dense "
                    "here. Load the state of this model, with the same asp_configs['excluded_layers']."
                )
            if weight is not None:
                check_mask(name, dropped, local(weight))
        for name, dropped in saved.items():
            if name in self._weights:
                weight = self._weights[name]
                self._dropped[weight] = dropped.to(device=weight.device, copy=True)
            else:
                self._early[name] = dropped.clone()
        self.apply()


class MaskingOptimizer(OptimizerWrapper):
    """Applies the masks after each update; they are part of ``state_dict()``."""

    def __init__(self, optimizer: Optimizer, masks: Masks) -> None:
        super().__init__(optimizer)
        self._masks = masks

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Steps the optimizer inside, and sets the masked weights to zero again."""
        result = super().step(closure)
        self._masks.apply()
        return result

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the optimizer inside and the masks."""
        return {**super().state_dict(), "asp": {"dropped": self._masks.save()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state and applies its masks; a state that was saved without asp leaves the masks as they are.

        Raises CheckpointError when a mask does not fit its parameter; nothing is loaded then.
        """
        self._masks.load(state_dict.get("asp", {"dropped": {}})["dropped"])
        super().load_state_dict({name: value for name, value in state_dict.items() if name != "asp"})

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_masks": None}


def check_mask(name: str, dropped: Any, weight: Tensor) -> None:
    """Raises CheckpointError when a loaded mask does not fit ``weight``, or drops other than two of every four."""
    fits = isinstance(dropped, Tensor) and dropped.dtype == torch.bool and dropped.shape == weight.shape
    if not fits or not bool((fours(dropped).sum(-1) == 2).all()):
        raise CheckpointError(
            f"The optimizer state holds an asp mask for {name!r} (model : parameter), whose shape here is "
            f"{tuple(weight.shape)}, and the mask does not drop two of every four of its entries. Load the state of "
            "this model."
        )


def eligible_weights(model: nn.Module, excluded: tuple[str, ...]) -> list[Tensor]:
    """Returns the weights of ``model`` that asp makes sparse; see [Note: Which weights].

    Raises ConfigError when an entry of ``excluded`` names no module.
    """
    check_patterns(model, excluded, "asp_configs['excluded_layers']", None)
    dense = find_modules(model, excluded)
    found: dict[Tensor, None] = {}
    kept: set[Tensor] = set()
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear | nn.Conv2d):
            continue
        if any(name == layer or name.startswith(f"{layer}.") for layer in dense):
            kept.add(module.weight)  # also where another layer shares it
        elif module.weight.shape[0] % _OUTPUTS == 0 and module.weight.shape[1] % _INPUTS == 0:
            found[module.weight] = None
    return [weight for weight in found if weight not in kept]


def fours(weight: Tensor) -> Tensor:
    """Returns ``weight`` as runs of four neighbours along its input dim (dim 1), shape [runs, 4]."""
    return weight.movedim(1, -1).reshape(-1, 4)


@torch.no_grad()
def smaller_two_of_four(weight: Tensor) -> Tensor:
    """Returns a mask of the shape of ``weight``, True at the two entries of smallest magnitude of every four.

    Of entries of equal magnitude the later ones are taken.

    Example:
        >>> smaller_two_of_four(torch.tensor([[3.0, -1.0, 0.5, 2.0]]))
        tensor([[False,  True,  True, False]])
    """
    runs = fours(weight)
    order = runs.abs().argsort(dim=1, descending=True, stable=True)
    dropped = torch.zeros_like(runs, dtype=torch.bool).scatter_(1, order[:, 2:], True)
    return dropped.view(weight.movedim(1, -1).shape).movedim(-1, 1).contiguous()
