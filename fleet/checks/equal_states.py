"""EqualStates: all workers train from one state of the model, and step with one state of the optimizer.

[Note: Who may differ]
With data parallel every worker has the same parameters and optimizer state. With sharding each has its shard, and
with localsgd its own values between two averages: there the check is only whether all workers loaded a state, or some.
With tensor parallelism or a pipeline a worker is compared with its peers, which hold the same part of the model;
undivided parameters must also be equal along mp, and the parts of divided parameters must differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from fleet.checks.comparison import digest, first_difference, listed_ranks
from fleet.checks.watched import ModelWatch, OptimizerWatch, Watched
from fleet.errors import ConfigError
from fleet.job.axes import COPY_AXES, MODEL_AXES, Axes
from fleet.job.listener import Listener
from fleet.job.whereabouts import named
from fleet.job.wrapped_model import WrappedModel
from fleet.strategies._gradients.flat import broadcast_from_rank_0

_EVERY_WORKER = "Let every worker load the state, or call model.load_full_state_dict(state) on all of them"


class EqualStates(Listener):
    """Compares ``watched`` models and optimizers at the start and after a load; see [Note: Who may differ].

    Every worker comes to the same decision, for each has the reports of all.
    """

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._job = watched.job

    def before_forward(self, model: WrappedModel) -> None:
        """Raises ConfigError where the workers would train from different states."""
        watch = self._watched.recording(model)
        if watch is None or not (self._watched.compares and model.training):
            return
        if watch.loaded_at or not watch.is_compared:
            self._compare_model(watch)

    def _compare_model(self, watch: ModelWatch) -> None:
        """Ensures that all workers start from one state, at the first forward and after a state was loaded."""
        is_first, place = _begin_comparison(watch)
        sums = watch.sums()
        divides = self._job.axes.size(*MODEL_AXES) > 1  # then some stages may have changed
        # With local training the next average makes the workers equal, or discards a loaded state.
        if not is_first and (self._watched.trains_locally or (digest(sums) == watch.before and not divides)):
            return
        job = self._job
        wrote = watch.was_written() if is_first else True
        found = self._compare(
            f"training with model {self._watched.number(watch)}, which compares the workers' states",
            wrote,
            place,
            sums,
            is_first,
            watch.digests(sums),
        )
        self._check_mesh(watch, sums)
        loaded = [rank for rank, said in enumerate(found) if said is not None and said["wrote"]]
        has_loaded = any(said is not None and said["place"] for said in found)
        may_differ = watch.is_divided or self._watched.trains_locally
        if 0 < len(loaded) < len(found):
            first = self._watched.peers[0]
            if is_first and first in loaded and not watch.is_apart:  # also if the first worker of each node loaded
                tensors = [*watch.model.parameters(), *watch.model.buffers()]
                broadcast_from_rank_0(tensors, job.axes.group(*COPY_AXES))
                job.say(f"The state that worker {first} loaded ({found[first]['place']}) is now on every worker.")
            elif watch.is_apart or not is_first or self._differ(found):
                raise self._only_some("the model's state", loaded, found) from self._watched.absence
        elif watch.is_divided and has_loaded and not self._differ(found) and watch.varying():
            raise ConfigError(
                f"Every worker loaded the same shard of the model ({place}): a state_dict() that one worker saved. "
                "Save model.full_state_dict() on one worker, or model.local_state_dict() on each to a separate file."
            )
        elif not may_differ and self._differ(self._watched.said or found):
            name = self._first_different(
                f"training with model {self._watched.number(watch)}, which compares the workers' parameters", sums
            )
            raise ConfigError(f"The workers train from different values of {name}. {_EVERY_WORKER}.")

    def compare_optimizer(self, watch: OptimizerWatch) -> None:
        """Raises ConfigError where the workers step with different optimizers."""
        is_first, place = _begin_comparison(watch)
        sums = watch.sums()
        number = list(self._watched.optimizers.values()).index(watch)
        found = self._compare(
            f"a step of optimizer {number}, which compares the workers' states", bool(place), place, sums, is_first
        )
        loaded = [rank for rank, said in enumerate(found) if said is not None and said["wrote"]]
        if self._watched.trains_locally or watch.is_divided:
            is_wrong = 0 < len(loaded) < len(found)
        else:
            is_wrong = None in found or self._differ(self._watched.said or found)
        if is_wrong and 0 < len(loaded) < len(found):
            raise self._only_some("the optimizer's state", loaded, found) from self._watched.absence
        if is_wrong:
            name = self._first_different(f"a step of optimizer {number}, which compares the workers' values", sums)
            advice = (
                "LBFGS uses the loss that the closure returns: return the mean of all workers' losses"
                if isinstance(watch.user_optimizer, torch.optim.LBFGS)
                else "Create the same one with the same settings on every worker; load the same state on every worker, "
                "or resume with fleet.elastic.Checkpoint"
            )
            raise ConfigError(f"The workers step with different optimizers: {name}. {advice}.")

    def _compare(
        self, subject: str, wrote: bool, place: str, sums: dict[str, Any], is_first: bool, more: Any = None
    ) -> list[Any]:
        said = {"wrote": wrote, "place": place, "digest": digest(sums), **(more or {})}
        return self._watched.gather(subject, said, perhaps_alone=not is_first)

    def _check_mesh(self, watch: ModelWatch, sums: dict[str, Any]) -> None:
        """Raises ConfigError where workers that hold different parts of the model do not hold one model together."""
        axes = self._job.axes
        said = self._watched.said
        if axes.size(*MODEL_AXES) == 1 or not said:
            return
        wrote, others = writers(said, axes)
        if wrote and others:
            raise self._only_some("the model's state", wrote, said)
        if group := group_that_differs(said, axes, "whole", "mp"):
            rows = self._watched.post(
                f"training with model {self._watched.number(watch)}, whose undivided parameters differ",
                watch.undivided(sums),
            )
            name, _ = name_that_differs(rows, [group])
            raise ConfigError(
                f"{name!r} is whole on every worker along mp and differs on {self._described(group)}. {_EVERY_WORKER}."
            )
        if wrote and (same := next(same_parts(said, axes, "mp"), ())):
            raise ConfigError(
                f"The workers along mp hold the same part of every divided parameter ({self._described(same)}): a "
                "state_dict() that one worker saved, or one draw of random numbers on all. Save "
                "model.full_state_dict() on one worker, or model.local_state_dict() on each to a separate file."
            )

    def _described(self, ranks: Iterable[int]) -> str:
        return named(list(ranks), self._job.axes.described)

    def _only_some(self, what: str, loaded: list[int], found: list[Any]) -> ConfigError:
        others = [rank for rank in range(len(found)) if rank not in loaded]
        places = dict.fromkeys(found[rank]["place"] for rank in loaded)
        where = ", ".join(place for place in places if place)
        return ConfigError(
            f"{listed_ranks(loaded).capitalize()} loaded {what}{f' ({where})' if where else ''} after "
            f"fleet wrapped it, and {listed_ranks(others)} did not. {_EVERY_WORKER}, or resume with "
            "fleet.elastic.Checkpoint, which sends worker 0's to all."
        )

    def _first_different(self, subject: str, sums: dict[str, Any]) -> str:
        """Returns the first name whose values differ, and on which workers; every worker must call it."""
        rows = self._watched.post(subject, sums)
        groups = (
            [self._watched.peers, *self._job.axes.all_ranks(*COPY_AXES)]
            if self._job.collective
            else [self._watched.peers]
        )
        name, group = name_that_differs(rows, groups)
        alike = [rank for rank in group if rows[rank].get(name) == rows[group[0]].get(name)]
        others = [rank for rank in group if rank not in alike]
        return f"{name!r} ({listed_ranks(others)} against {listed_ranks(alike)})"

    def _differ(self, said: list[Any]) -> bool:
        """Returns whether workers that hold the same part of the model, anywhere on the mesh, differ."""
        return bool(group_that_differs(said, self._job.axes, "digest", *COPY_AXES))


def _begin_comparison(watch: ModelWatch | OptimizerWatch) -> tuple[bool, str]:
    """Marks ``watch`` as compared; returns whether this is the first time, and the line that loaded a state."""
    begun = (not watch.is_compared, watch.loaded_at)
    watch.is_compared = True
    watch.loaded_at = ""
    return begun


def group_that_differs(said: Sequence[Any], axes: Axes, key: str, *along: str) -> tuple[int, ...]:
    """Returns the first group ``along`` these axes whose workers say different values of ``key``; else ``()``.

    Example:
        >>> said = [{"sum": 1}, {"sum": 1}, {"sum": 2}, {"sum": 3}]
        >>> group_that_differs(said, Axes({"dp": 2, "mp": 2}, 0), "sum", "mp")
        (2, 3)
    """
    for group in axes.all_ranks(*along):
        if len({said[rank][key] for rank in group if said[rank] is not None}) > 1:
            return group
    return ()


def name_that_differs(rows: Sequence[Mapping[str, Any]], groups: Sequence[Sequence[int]]) -> tuple[str, list[int]]:
    """Returns the first name for which workers of one of ``groups`` hold different values, and that group."""
    for group in groups:
        if name := first_difference([rows[rank] for rank in group]):
            return name, list(group)
    return "", list(groups[0])


def writers(said: Sequence[Any], axes: Axes) -> tuple[list[int], list[int]]:
    """Returns the workers of the copy groups in which some worker wrote, and the other workers."""
    wrote = [group for group in axes.all_ranks(*COPY_AXES) if any(said[rank]["wrote"] for rank in group)]
    ranks = sorted(rank for group in wrote for rank in group)
    return ranks, [rank for rank in range(len(said)) if rank not in ranks]


def same_parts(said: Sequence[Any], axes: Axes, *along: str) -> Iterator[tuple[int, ...]]:
    """Yields the groups ``along`` these axes whose workers hold equal parts, which must be different."""
    for group in axes.all_ranks(*along):
        found = {said[rank]["parts"] for rank in group}
        if len(group) > 1 and len(found) == 1 and "" not in found:
            yield group
