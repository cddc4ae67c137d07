"""Local steps, and an average of the parameters from time to time: the base of localsgd and adaptive_localsgd.

Paddle averages the change since the last average and adds it to a snapshot taken then. The mean of the parameters is
the same number without the snapshot's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from fleet.strategies._declare.fields import Values
from fleet.strategies._declare.optimizer_kinds import check_sgd
from fleet.strategies._declare.strategy import Stage, Strategy
from fleet.strategies._gradients.flat import average, broadcast_from_rank_0
from fleet.strategies._shared.optimizer_wrapper import OptimizerWrapper

if TYPE_CHECKING:
    from fleet.job.job import Job


def local_training_notes(option: str, options: Values, world_size: int) -> tuple[str, ...]:
    """Returns remarks on switches that have nothing to act on while ``option`` keeps gradients on their worker."""
    if world_size == 1:
        return (f"{option} changes nothing with one worker: there is nothing to average.",)
    return tuple(
        f"{name} changes nothing while '{option}' is on: no gradient is exchanged."
        for name in ("fp16_allreduce", "use_hierarchical_allreduce")
        if options[name]
    )


def problem_of_sequences(option: str, options: Values) -> str | None:
    """Returns the reason why ``option`` cannot run where workers hold other tokens of the same rows."""
    for axis in ("sep", "cp"):
        degree = getattr(options["hybrid_configs"], f"{axis}_degree")
        if degree > 1:
            return (
                f"{option!r} is on and hybrid_configs['{axis}_degree'] is {degree}: these workers hold other tokens of "
                f"the same rows, and {option} would train on a part of a sequence as if it were a whole one. Turn "
                f"{option} off, or set {axis}_degree to 1."
            )
    return None


class TrainsLocally(Strategy):
    """The base of both strategies."""

    stage = Stage.STEP
    steps_together = True
    after = ("amp",)
    conflicts = {
        "gradient_merge": "both decide which of the user's steps count, and no definition says which one counts first",
        "lars": "workers that train by themselves need torch.optim.SGD, and lars puts its own rule in its place",
        "lamb": "workers that train by themselves need torch.optim.SGD, and lamb works on Adam",
    }
    model_effect = "starts from rank 0's parameters and exchanges no gradients"

    @classmethod
    def problem(cls, options: Values, world_size: int) -> str | None:
        """Returns the reason when workers hold parts of one sequence."""
        return problem_of_sequences(cls.name, options)

    @classmethod
    def replaces(cls, options: Values) -> Mapping[str, Sequence[str]]:
        """Returns data_parallel, whose exchange of gradients does not happen."""
        return {"data_parallel": ()}

    @classmethod
    def notes(cls, options: Values, world_size: int) -> tuple[str, ...]:
        """Returns remarks on settings that have nothing to act on while gradients stay local."""
        return local_training_notes(cls.name, options, world_size)

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raises ConfigError unless the optimizer is SGD."""
        check_sgd(self.name, optimizer)

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Returns ``model``, which starts from rank 0's parameters and buffers."""
        if self.job.process_group is not None:
            broadcast_from_rank_0([*model.parameters(), *model.buffers()], self.job.process_group)
        return model

    def note_parameters(self, model: nn.Module, added: Mapping[str, nn.Parameter]) -> None:
        """Makes new parameters equal rank 0's."""
        if added and self.job.process_group is not None:
            broadcast_from_rank_0([*added.values()], self.job.process_group)


class LocalOptimizer(OptimizerWrapper):
    """Steps on this worker alone and averages the parameters of all workers when it is time.

    ``steps`` counts the user's steps from 1; ``averaged_at`` is the step of the last average.

    Args:
        optimizer: the optimizer inside; its momentum stays local.
        option: the option, which names the entry in ``state_dict``.
        job: the workers.
        begin_step: up to this step every step averages.
        k_steps: steps between two averages after that.
    """

    trains_locally = True
    has_own_state = True  # at an average too: momentum stays local

    def __init__(self, optimizer: Optimizer, option: str, job: Job, begin_step: int, k_steps: int) -> None:
        super().__init__(optimizer)
        self._option = option
        self._job = job
        self._begin_step = begin_step
        self.k_steps = k_steps
        self.steps = self.averaged_at = 0

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Steps the optimizer inside, and averages when it is time."""
        result = super().step(closure)
        self.steps += 1
        if self.steps <= self._begin_step or self.steps - self.averaged_at >= self.k_steps:
            self.average()
        return result

    def average(self) -> None:
        """Averages the parameters of all workers now; every worker must call it at the same step."""
        if self._job.process_group is not None:
            trained = [p for p in self.parameters() if p.requires_grad]
            average(trained, self._job.process_group, self._option)
        self.averaged_at = self.steps

    @property
    def is_out_of_step(self) -> bool:
        """Whether the workers have stepped by themselves since the last average."""
        return self.steps != self.averaged_at or super().is_out_of_step

    def saving_note(self) -> str | None:
        """Returns a note for a user who saves between averages, when each worker has other parameters."""
        if self.steps == self.averaged_at or self._job.process_group is None:
            return super().saving_note()
        return (
            f"{self._option}: this state is the one of worker {self._job.global_rank} alone; the parameters were "
            f"averaged at step {self.averaged_at} and this is step {self.steps}. To save the average, let every worker "
            "call optimizer.average() first; to resume exactly here, save one file for each worker."
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the optimizer inside and where in the interval this worker is."""
        return {**super().state_dict(), self._option: self.progress()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state; a plain optimizer's state starts a new interval."""
        super().load_state_dict({name: value for name, value in state_dict.items() if name != self._option})
        self.resume(state_dict.get(self._option, {"steps": 0, "averaged_at": 0}))

    def progress(self) -> dict[str, Any]:
        """Returns the entries for :meth:`resume`."""
        return {"steps": self.steps, "averaged_at": self.averaged_at}

    def resume(self, progress: dict[str, Any]) -> None:
        """Continues from ``progress``."""
        self.steps = int(progress["steps"])
        self.averaged_at = int(progress["averaged_at"])

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_job": None}


@torch.no_grad()
def mean_over_workers(value: float, job: Job) -> float:
    """Returns the mean of ``value`` over all workers."""
    if job.process_group is None:
        return value
    total = torch.tensor([value], dtype=torch.float64 if job.device.type == "cpu" else torch.float32)
    total = total.to(job.device)
    average([total], job.process_group)
    return float(total)
