"""Strategy: one option of ``DistributedStrategy`` = one subclass = one file; and the registry of all of them.

[Note: Stages]
The plan applies strategies from the user's objects outwards:

- ``MODULE`` rewrites parts of the user's module (sync_batch_norm, recompute): data parallel and sharding must see
  the final modules, because they register hooks on them.
- ``SHARD`` decides which worker holds and exchanges which tensors (data_parallel, sharding, pipeline).
- ``COMM`` changes the messages on the wire (fp16_allreduce, dgc): it needs the reducer of the SHARD stage.
- ``COMPILE`` hands the result to the compiler, which must see the exchange to overlap it.
- ``UPDATE`` replaces the update rule (lars, lamb; a_sync, where servers update) or corrects its result (asp): the
  innermost optimizer.
- ``SHARE`` is the stage in which SHARD strategies wrap the optimizer: outside the update rules, which then see the
  parameters of this worker only.
- ``STEP`` decides whether a call of ``step()`` becomes an update (amp skips, gradient_merge waits, localsgd averages):
  outermost, because it must see the user's calls. gradient_merge and localsgd stand outside amp: amp may skip an
  update on one worker and not on another, and their counters must advance on all workers alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from fleet.errors import ConfigError
from fleet.strategies._declare.fields import Config, FieldRule, Values

if TYPE_CHECKING:
    import torch
    from torch import nn

    from fleet.job.job import Job


class Stage(IntEnum):
    """Coarse order of application; see [Note: Stages]."""

    MODULE = 0
    SHARD = 1
    COMM = 2
    COMPILE = 3
    UPDATE = 4
    SHARE = 5
    STEP = 6

    @property
    def of_optimizer(self) -> Stage:
        """The stage in which a strategy of this stage wraps the optimizer."""
        return Stage.SHARE if self is Stage.SHARD else self


@dataclass(frozen=True, kw_only=True)
class Guide:
    """The guide to a strategy for users; ``docs/reference/strategies.md`` is made from it.

    ``example`` holds the options of a job that uses it, as in a strategy file; the contract tests train with it.
    """

    when: str
    cost: str
    formula: str = ""
    source: str = ""
    example: Mapping[str, Any] = field(default_factory=dict)


ConfigType: TypeAlias = type[Config]
REGISTRY: dict[str, type[Strategy]] = {}
GROUPS: list[type[Config]] = []


_CLASS_METHODS = {"chosen", "effects", "notes", "problem", "replaces"}


class Strategy:
    """One option of ``DistributedStrategy``; a subclass states everything about it as data and wraps objects.

    A subclass sets ``name`` (the switch users turn on), ``meaning``, ``stage``, and where it applies ``Config`` (the
    ``<name>_configs`` dictionary), ``after`` (finer order inside the stage), ``conflicts`` (other switch -> reason
    shown to the user; each pair is written once, in either file) and ``refused`` (why the option cannot be honoured).
    Reasons are phrases without a full stop. ``fleet.explain`` shows ``model_effect`` and ``optimizer_effect``. A group
    of further top-level options names the strategy as its ``owner``, see :func:`top_level`.
    """

    name: ClassVar[str]
    meaning: ClassVar[str]
    stage: ClassVar[Stage]
    Config: ClassVar[ConfigType | None] = None
    default: ClassVar[bool | None] = False  # of the boolean option of its name; None: other options choose it
    after: ClassVar[tuple[str, ...]] = ()
    conflicts: ClassVar[Mapping[str, str]] = {}
    in_ps_job: ClassVar[bool] = False  # takes part in a parameter-server job too
    steps_together: ClassVar[bool] = False  # needs every worker in every step: no join() for uneven batches
    in_place: ClassVar[bool] = False  # wrap_model changes the module itself, outside the MODULE stage too
    refused: ClassVar[str | None] = None
    model_effect: ClassVar[str] = ""
    optimizer_effect: ClassVar[str] = ""
    guide: ClassVar[Guide | None] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in sorted(_CLASS_METHODS & vars(cls).keys()):
            if not isinstance(vars(cls)[name], classmethod):
                raise TypeError(f"{cls.__name__}.{name} must be a class method: it is asked before there is an object.")
        if not hasattr(cls, "name"):
            return
        if REGISTRY.get(cls.name, cls) is not cls:
            raise TypeError(f"option {cls.name!r} is defined by both {REGISTRY[cls.name]} and {cls}")
        if missing := [name for name in ("meaning", "stage") if not hasattr(cls, name)]:
            raise TypeError(f"{cls.__name__}, the option {cls.name!r}, must also define {' and '.join(missing)}.")
        if cls.Config is not None and not (isinstance(cls.Config, type) and issubclass(cls.Config, Config)):
            raise TypeError(f"{cls.__name__}.Config is {cls.Config!r}; it must be a class derived from Config.")
        # The definition of the class registers the option: an option is one file, and no list names it again.
        REGISTRY[cls.name] = cls

    def __init__(self, config: Any, job: Job) -> None:
        """Keeps ``config`` (an instance of ``Config``, or ``None``) and the job it works in."""
        self.config = config
        self.job = job

    def __deepcopy__(self, memo: Any) -> Strategy:
        return self  # a copied model may hold hooks of it

    @classmethod
    def chosen(cls, options: Values) -> bool:
        """Returns whether the options switch this strategy on."""
        return bool(cls.default is not None and options[cls.name])

    @classmethod
    def replaces(cls, options: Values) -> Mapping[str, Sequence[str]]:
        """Returns the strategies that are left out of a plan with this one, and which of their options it honours."""
        return {}

    @classmethod
    def problem(cls, options: Values, world_size: int) -> str | None:
        """Returns, in whole sentences, why it cannot run with these options on ``world_size`` workers, or ``None``.

        Raises UnsupportedOptionError where this installation cannot honour the option.
        """
        return None

    @classmethod
    def notes(cls, options: Values, world_size: int) -> tuple[str, ...]:
        """Returns warnings about settings that are accepted and change nothing here."""
        return ()

    @classmethod
    def effects(cls, options: Values, world_size: int) -> tuple[str, str]:
        """Returns its effects on the model and on the optimizer with these options, for ``fleet.explain``."""
        return cls.model_effect, cls.optimizer_effect

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises ConfigError when the strategy cannot work with ``optimizer``; changes nothing."""

    def check_model(self, model: nn.Module) -> None:
        """Raises ConfigError when the strategy cannot work with ``model``; changes nothing."""

    def prepare_model(self, model: nn.Module) -> None:
        """Changes the user's module in place before any strategy wraps it: types of parameters, forwards."""

    def use_scaler(self, scaler: Any) -> None:
        """Records that the user's loop scales the loss with ``scaler``, a GradScaler."""

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Returns ``model``, or a module of the same interface around it; parameter names stay."""
        return model

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Returns ``optimizer``, or an optimizer of the same interface around it."""
        return optimizer

    def note_parameters(self, model: nn.Module, added: Mapping[str, nn.Parameter]) -> None:
        """Records, before a forward, that parameters of the wrapped ``model`` were added, removed, frozen or unfrozen.

        Raises ConfigError when it is too late for the parameters ``added`` to take part.
        """

    def note_clear(self, parameters: Sequence[torch.Tensor]) -> None:
        """Records that the gradients of ``parameters`` were cleared through their model."""

    def close(self) -> None:
        """Releases resources outside the model and the optimizer; called at the end of the session."""


class JobKind(Strategy):
    """The strategy of every job of one kind: ``data_parallel`` of collective jobs, ``a_sync`` of jobs with servers.

    No switch turns it on; another strategy may replace it. With ``in_ps_job`` it takes part in parameter-server jobs
    only, without it in collective jobs only. ``reads`` names the top-level options of the other kind that it honours.
    Where it has an option, assigning that resets the keys in ``also_sets``.
    """

    reads: ClassVar[tuple[str, ...]] = ()
    also_sets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}


class StepCounter(Strategy):
    """A strategy that counts the user's steps outside all other strategies, beside its own wrapper."""

    def wrap_steps(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Returns ``optimizer``, or an optimizer around it, outside all others."""
        return optimizer


class GradientKeeper(Strategy):
    """A strategy that keeps the gradients of several batches until an update."""

    def averaged_batches(self) -> int:
        """Returns the number of batches by which it divides the sum of their gradients."""
        return 1

    def held_gradients(self, parameters: Sequence[torch.Tensor]) -> Iterable[torch.Tensor]:
        """Returns the gradients of ``parameters`` that it keeps outside of ``.grad`` until an update."""
        return ()

    def merges(self) -> bool:
        """Returns whether an update takes the gradients of several calls of ``step()``."""
        return True

    def use_scaler(self, scaler: Any) -> None:
        """Raises ConfigError for a scaler without amp, since a step that it skips would not be counted."""
        if self.merges() and scaler.is_enabled() and not self.job.options["amp"]:
            raise ConfigError(
                f"A GradScaler scales the loss with {self.name} on and amp off: a step that the scaler skips would not "
                "be counted, and an update takes the gradients of a number of them. Set strategy.amp = True as well; "
                "amp then leaves the scaling to the scaler."
            )


def top_level(group: type[Config]) -> type[Config]:
    """Registers a group of top-level options; usable as a class decorator.

    ``class Sizes(Config, owner="extra")`` belongs to the strategy ``extra``; without an owner it belongs to none.
    """
    GROUPS.append(group)
    return group


def switch_rule(strategy: type[Strategy]) -> FieldRule:
    """Returns the rule of a strategy's own switch."""
    return FieldRule(meaning=strategy.meaning, refused=strategy.refused)
