"""What must hold while a job trains, checked before each forward and each step of the session.

[Note: Who may differ]
With data parallel every worker has the same parameters and optimizer state. With sharding each has its shard, and
with localsgd its own values between two averages: there the check is only whether all workers loaded a state, or some.
With tensor parallelism or a pipeline a worker is compared with its peers, which hold the same part of the model; what
is not divided must also be equal along mp, and what is divided must not be.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.modules import module as torch_modules
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fleet.checks.broken_exchange import listed, unused_text
from fleet.checks.comparison import checksums, digest, first_difference, listed_ranks
from fleet.checks.mesh_groups import group_that_differs, name_that_differs, same_parts, writers
from fleet.checks.watches import ModelWatch, OptimizerWatch
from fleet.errors import ConfigError, RendezvousError
from fleet.job.axes import COPY_AXES, MODEL_AXES
from fleet.job.whereabouts import named, user_line
from fleet.strategies._declare.strategy import Strategy
from fleet.strategies._gradients.flat import broadcast_from_rank_0
from fleet.strategies._shared.experts import is_expert
from fleet.strategies._shared.optimizer_wrapper import OptimizerWrapper, wrapper_in
from fleet.strategies._shared.parts import is_part
from fleet.strategies.amp.amp_model import AmpModel
from fleet.strategies.sharding.owners import PartitionedOptimizer
from fleet.training.fleet_model import FleetModel, runs_inside
from fleet.training.fleet_optimizer import Closure, FleetOptimizer, Step

if TYPE_CHECKING:
    from fleet.job.session import Session

_EVERY_WORKER = "Let every worker load the state, or call model.load_full_state_dict(state) on all of them"


class TrainingChecks:
    """Checks a job's models and optimizers while they train; see [Note: Who may differ].

    Args:
        session: the session, whose workers compare through its store.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._models: dict[FleetModel, ModelWatch] = {}
        self._optimizers: dict[FleetOptimizer, OptimizerWatch] = {}
        self._stepping = self._registered = 0
        self._handles: list[Any] = []
        # How many parameters the optimizers have that are known to train other models.
        self._strangers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._compares = session.collective and session.process_group is not None and session.world_size > 1
        self._absence: RendezvousError | None = None
        self._said: list[Any] = []  # what all workers said last; empty when one was absent

    def watch_model(self, model: FleetModel) -> None:
        """Checks ``model`` from now on, where an option or another worker makes it differ from its module."""
        if not self._session.collective or not self._session.strategies:
            return
        self._listen()
        if model in self._models:
            self._models[model].handle.remove()
        self._models[model] = ModelWatch(model, self._registered)

    def watch_optimizer(self, optimizer: FleetOptimizer) -> None:
        """Checks ``optimizer`` from now on."""
        self._optimizers[optimizer] = OptimizerWatch(optimizer)
        self._listen()

    def _listen(self) -> None:
        if not self._handles:
            count = self._count_registration
            self._handles = [
                torch_modules.register_module_parameter_registration_hook(count),
                torch_modules.register_module_module_registration_hook(count),
                register_optimizer_step_pre_hook(self.check_raw_step),
            ]

    def forget_optimizer(self, optimizer: Optimizer) -> None:
        """Removes the hooks from the user's ``optimizer``, which is about to be wrapped again."""
        for wrapped, watch in self._optimizers.items():
            if wrapped.user_optimizer is optimizer:
                while watch.handles:
                    watch.handles.pop().remove()

    def before_forward(self, model: FleetModel) -> None:
        """Handles parameters that were added, removed, frozen or unfrozen; compares the workers' states.

        Raises ConfigError where workers have done different things.
        """
        watch = self._models.get(model)
        if watch is None or not torch.is_grad_enabled() or not self._session.collective:
            return
        watch.forwards += 1
        watch.check_kinds()
        if watch.has_changed(self._registered):
            self._take_in(watch)
        if self._compares and model.training and (watch.loaded_at or not watch.is_compared):
            self._compare_model(watch)

    def stepping(self, optimizer: FleetOptimizer, step: Step, closure: Closure) -> Any:
        """Does a checked ``step`` of ``optimizer`` and returns its result; a closure's forwards are checked afterwards.

        Where no model is watched, now or later, nobody reads what a step leaves behind.
        """
        watch = self._optimizers.get(optimizer) if self._models or self._session.collective else None
        for model in self._session.models:
            if model._redirected:
                raise ConfigError(runs_inside(model.module, model._redirected, "optimizer.step()"))
        if watch is not None and closure is None:
            self._check_step(watch)
        self._stepping += 1
        try:
            result = step(closure)
        finally:
            self._stepping -= 1
        if watch is not None:
            if closure is not None:
                self._check_step(watch)
            watch.note_step()
        return result

    def close(self) -> None:
        """Removes every hook."""
        for watch in self._models.values():
            watch.handle.remove()
        for optimizer in self._session.optimizers:
            self.forget_optimizer(optimizer.user_optimizer)
        for handle in self._handles:
            handle.remove()
        self._models, self._optimizers, self._handles, self._compares = {}, {}, [], False

    def _count_registration(self, *_: Any) -> None:
        self._registered += 1

    # ---- parameters that are added, removed, frozen or unfrozen ----------------------------------------------------

    def _take_in(self, watch: ModelWatch) -> None:
        before, trained = watch.named, watch.trained_names
        watch.note_parameters(self._registered)
        now = watch.trained_names
        added = [name for name, p in watch.named.items() if before.get(name) is not p]
        if any(is_part(p) for p in before.values()):  # its object may change, but it remains a shard
            added = [name for name in added if name not in before or not is_part(watch.named[name])]
        if not added and now == trained and before.keys() == watch.named.keys():
            return
        if self._compares and now and (added or now != watch.exchanged):
            self._agree_on(watch, now)
            watch.exchanged = now
        came = {name: watch.named[name] for name in added}
        for strategy in self._session.strategies:
            strategy.note_parameters(watch.model._chain, came)

    def _agree_on(self, watch: ModelWatch, names: set[str]) -> None:
        """Raises ConfigError unless the same parameters train on every worker from this forward on."""
        common = {name: p for name, p in watch.named.items() if name in names and not is_expert(p)}
        shapes = {name: list(p.shape) for name, p in common.items()}
        found = self._gather(
            f"training with changed parameters of model {self._number(watch)}", shapes, perhaps_alone=True
        )
        absent = [rank for rank, said in enumerate(found) if said is None]
        changed = sorted(names ^ watch.exchanged)[:4]
        if absent:
            raise ConfigError(
                f"Worker {self._session.global_rank} froze, unfroze or added parameters after distributed_model() "
                f"({', '.join(changed)}), and {listed_ranks(absent)} did not. Do it on every worker, before the same "
                "forward."
            ) from self._absence
        rows = [{name: tuple(shape) for name, shape in said.items()} for said in found]
        if name := first_difference(rows):
            trains = [rank for rank, row in enumerate(rows) if name in row]
            raise ConfigError(
                f"{name!r} trains on {listed_ranks(trains)} with shape {list(rows[trains[0]][name])}, and differs on "
                "the others. Freeze, unfreeze and add the same parameters on every worker, before the same forward."
            )

    # ---- states -----------------------------------------------------------------------------------------------------

    def _compare_model(self, watch: ModelWatch) -> None:
        """Ensures that all workers start from one state, at the first forward and after a state was loaded."""
        is_first, watch.is_compared = not watch.is_compared, True
        place, watch.loaded_at = watch.loaded_at, ""
        sums = watch.sums()
        divides = self._session.axes.size(*MODEL_AXES) > 1  # then some stages may have changed
        if not is_first and (self._trains_locally or (digest(sums) == watch.before and not divides)):
            return  # the next average makes the workers equal, or discards what was loaded in between
        session = self._session
        wrote = watch.was_written() if is_first else True
        found = self._compare(
            f"training with model {self._number(watch)}, which compares the workers' states",
            wrote,
            place,
            sums,
            is_first,
            watch.digests(sums),
        )
        self._check_mesh(watch, sums)
        loaded = [rank for rank, said in enumerate(found) if said is not None and said["wrote"]]
        may_differ = watch.is_divided or self._trains_locally
        if 0 < len(loaded) < len(found):
            first = self._peers[0]
            if is_first and first in loaded and not watch.is_apart:  # also if the first worker of each node loaded
                tensors = [*watch.model.parameters(), *watch.model.buffers()]
                broadcast_from_rank_0(tensors, session.axes.group(*COPY_AXES))
                session.say(f"The state that worker {first} loaded ({found[first]['place']}) is now on every worker.")
            elif watch.is_apart or not is_first or self._differ(found):
                raise self._only_some("the model's state", loaded, found) from self._absence
        elif loaded and watch.is_divided and not any(said["place"] for said in found if said is not None):
            self._check_drawn(watch, sums)
        elif loaded and watch.is_divided and not self._differ(found) and watch.varying():
            raise ConfigError(
                f"Every worker loaded the same shard of the model ({place}): a state_dict() that one worker saved. "
                "Save model.full_state_dict() on one worker, or model.local_state_dict() on each to a separate file."
            )
        elif not may_differ and self._differ(self._said or found):
            name = self._first_different(
                f"training with model {self._number(watch)}, which compares the workers' parameters", sums
            )
            raise ConfigError(f"The workers train from different values of {name}. {_EVERY_WORKER}.")

    def _check_drawn(self, watch: ModelWatch, sums: dict[str, int]) -> None:
        """Raises ConfigError where each worker has drawn the same numbers for its shard of a parameter."""
        rows = self._gather(
            f"training with model {self._number(watch)}, which was changed after distributed_model()", sums
        )
        alike = [name for name in watch.varying() if len({(said or {}).get(name) for said in rows}) == 1]
        if alike:
            raise ConfigError(
                f"{alike[0]!r} was initialized after distributed_model(), which gave each worker a shard of it, and "
                "every worker drew the same numbers for its shard. Initialize the model before distributed_model(), or "
                "load it with load_state_dict()."
            )

    def _compare_optimizer(self, watch: OptimizerWatch) -> None:
        is_first, watch.is_compared = not watch.is_compared, True
        place, watch.loaded_at = watch.loaded_at, ""
        sums = watch.sums()
        number = list(self._optimizers.values()).index(watch)
        found = self._compare(
            f"a step of optimizer {number}, which compares the workers' states", bool(place), place, sums, is_first
        )
        loaded = [rank for rank, said in enumerate(found) if said is not None and said["wrote"]]
        if self._trains_locally or _divides(watch.optimizer):
            is_wrong = 0 < len(loaded) < len(found)
        else:
            is_wrong = None in found or self._differ(self._said or found)
        if is_wrong and 0 < len(loaded) < len(found):
            raise self._only_some("the optimizer's state", loaded, found) from self._absence
        trained = [pair for model in watch.models for pair in model.named.items() if pair[1].requires_grad]
        silent = [name for name, p in trained if p.grad is None]
        if is_wrong and is_first and silent and not self._session.options["find_unused_parameters"]:
            # A step with a closure: its backward has left out a bucket, and the next forward would say so.
            raise ConfigError(unused_text(self._session.who, listed(silent)))
        if is_wrong:
            name = self._first_different(f"a step of optimizer {number}, which compares the workers' values", sums)
            advice = (
                "LBFGS uses the loss that the closure returns: return the mean of all workers' losses"
                if isinstance(watch.optimizer.user_optimizer, torch.optim.LBFGS)
                else "Create the same one with the same settings on every worker; load the same state on every worker, "
                "or resume with fleet.elastic.Checkpoint"
            )
            raise ConfigError(f"The workers step with different optimizers: {name}. {advice}.")

    def _compare(
        self, subject: str, wrote: bool, place: str, sums: dict[str, Any], is_first: bool, more: Any = None
    ) -> list[Any]:
        said = {"wrote": wrote, "place": place, "digest": digest(sums), **(more or {})}
        return self._gather(subject, said, perhaps_alone=not is_first)

    def _check_mesh(self, watch: ModelWatch, sums: dict[str, Any]) -> None:
        """Raises ConfigError where workers that hold different parts of the model do not hold one model together."""
        axes, said = self._session.axes, self._said
        if axes.size(*MODEL_AXES) == 1 or not said:
            return
        wrote, others = writers(said, axes)
        if wrote and others:
            raise self._only_some("the model's state", wrote, said)
        if group := group_that_differs(said, axes, "whole", "mp"):
            rows = self._post(
                f"training with model {self._number(watch)}, whose undivided parameters differ", watch.undivided(sums)
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
        return named(list(ranks), self._session.axes.described)

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
        rows = self._post(subject, sums)
        groups = [self._peers, *self._session.axes.all_ranks(*COPY_AXES)] if self._session.collective else [self._peers]
        name, group = name_that_differs(rows, groups)
        alike = [rank for rank in group if rows[rank].get(name) == rows[group[0]].get(name)]
        others = [rank for rank in group if rank not in alike]
        return f"{name!r} ({listed_ranks(others)} against {listed_ranks(alike)})"

    def _differ(self, said: list[Any]) -> bool:
        """Returns whether workers that hold the same part of the model, anywhere on the mesh, differ."""
        return bool(group_that_differs(said, self._session.axes, "digest", *COPY_AXES))

    # ---- steps ------------------------------------------------------------------------------------------------------

    def _check_step(self, watch: OptimizerWatch) -> None:
        """Raises ConfigError where the gradients of this step were never exchanged."""
        watches = list(self._models.values())
        if not watches:
            return
        watch.look(watches, self._registered)
        if self._compares:
            self._check_strangers(watch)
        for model, used in watch.models.items():
            model.model._passes.check_places()
            if self._compares and (name := model.unseen(self._registered, watch.models)):
                raise ConfigError(
                    f"step() got a gradient of {name!r}, which did not train when the model that "
                    "distributed_model() returned last ran: the gradient came through the plain module, and the "
                    "workers have not exchanged it. In the loop, call the model that distributed_model() returned."
                )
            if model.used == used and (self._compares or isinstance(model.model._chain, AmpModel)):
                self._check_forward(model, watch)
        watch.models = {model: model.used for model in watch.models}
        if self._compares and (watch.loaded_at or not watch.is_compared):
            self._compare_optimizer(watch)
        if self._compares and not self._trains_locally and not watch.optimizer.only_counts():
            self._check_exchanges(watch)

    def _check_exchanges(self, watch: OptimizerWatch) -> None:
        """Raises ConfigError where workers have stepped after different exchanges, or with local gradients.

        Checked once for each number of exchanges between two updates, which is the same in all steps of most loops.
        """
        now = {model: model.model._passes.exchanged for model in watch.models}
        counts = tuple(now[model] - watch.exchanged.get(model, 0) for model in now)
        watch.exchanged = now
        if counts in watch.agreed:
            return
        watch.agreed.add(counts)
        apart: dict[str, Tensor] = {}
        for model, count in zip(now, counts, strict=True):
            gradients = {name: p.grad for name, p in model.named.items() if p.grad is not None}
            if model.is_divided:
                if not count and not gradients and model.model._passes.begun:
                    raise ConfigError(
                        "step() has no gradients: they are still inside the sharded model, because all backward passes "
                        "since the last step ran under no_sync(). Run the last one outside it."
                    )
            elif not count and len(self._peers) > 1:  # else nobody's gradients are to be like these
                apart |= {n: g for n, g in gradients.items() if not (g.is_sparse or is_expert(model.named[n]))}
        number = list(self._optimizers.values()).index(watch)
        said = {"counts": list(counts), "sums": checksums(apart)}
        found = self._gather(f"a step of optimizer {number}", said, perhaps_alone=True)
        others = [rank for rank, row in enumerate(found) if row is None or row["counts"] != list(counts)]
        if others:
            raise ConfigError(
                f"Worker {self._session.global_rank} called step() after {'/'.join(map(str, counts))} backward passes "
                f"that exchanged gradients, and {listed_ranks(others)} did not: some workers have skipped a step(). "
                "Call step() on every worker after the same backward pass, even when one worker's batch is bad."
            ) from self._absence
        if name := first_difference([row["sums"] for row in found]):
            raise ConfigError(
                f"step() got a gradient of {name!r} that differs between the workers: no backward pass of the "
                "wrapped model has exchanged it since the last step. Gradients that torch.autograd.grad returns and "
                "those of backward() under no_sync() stay local. Call loss.backward() outside no_sync()."
            )

    def _check_strangers(self, watch: OptimizerWatch) -> None:
        if self._trains_locally:
            return  # it averages what the optimizer holds
        strays = [name for name, p in watch.strangers.items() if p.grad is not None and bool(p.grad.any())]
        if strays:
            raise ConfigError(
                f"The optimizer updates {strays[0]}, which is not a parameter of any model that distributed_model() "
                "returned: its gradient is not exchanged, and the workers would diverge. Call distributed_model() for "
                "the module it belongs to, or make that module a part of one that is wrapped."
            )
        if not watch.models and not watch.is_compared and watch.strangers:
            raise ConfigError(
                "The optimizer holds no parameter of a model that distributed_model() returned, so its steps would "
                "train nothing. Create it from model.parameters() of the model that the loop calls."
            )

    def _check_forward(self, model: ModelWatch, watch: OptimizerWatch) -> None:
        if model.model._chain is model.model.module or watch.has_only_old_gradients():
            return  # nothing wraps the module that a direct call could bypass, or the loop steps twice
        ran = (other for other, used in watch.models.items() if other.used != used)
        elsewhere = {id(p) for other in ran for p in other.model.parameters()}
        held = {id(p) for p in watch.optimizer.parameters()} - elsewhere
        for name, parameter in model.named.items():
            if id(parameter) in held and parameter.grad is not None and bool(parameter.grad.any()):
                raise ConfigError(
                    f"step() got a gradient of {name!r}, and the model that distributed_model() returned has "
                    "not run since the last step: the gradient came through the plain module, bypassing "
                    f"{_missed(self._session)}. In the loop, call the model that distributed_model() returned."
                )

    def check_raw_step(self, optimizer: Optimizer, args: Any = (), kwargs: Any = None) -> None:
        """Runs before every step of an optimizer; raises ConfigError where the wrapped one should have stepped."""
        if self._stepping or isinstance(optimizer, OptimizerWrapper):
            return
        if not self._session.collective:
            self._check_step_past_servers(optimizer)
            return
        wrapped = next((w for w in self._optimizers if w.user_optimizer is optimizer), None)
        if wrapped is not None and (wrapped.optimizer is not optimizer or self._compares):
            raise ConfigError(
                f"{user_line()}: step() was called on the optimizer that was passed to distributed_optimizer(). Call "
                "it on the optimizer that distributed_optimizer() returned (GradScaler.step too); the other one "
                f"bypasses {_missed(self._session)}."
            )
        acting = [s for s in self._session.strategies if type(s).wrap_optimizer is not Strategy.wrap_optimizer]
        if wrapped is None and acting and self._holds_watched(optimizer):
            raise ConfigError(
                f"{user_line()}: step() was called on an optimizer that distributed_optimizer() has not seen, and that "
                f"has parameters of a model that distributed_model() returned. It bypasses {_missed(self._session)}. "
                "Pass it to distributed_optimizer(), and step the result."
            )

    def _check_step_past_servers(self, optimizer: Optimizer) -> None:
        """Raises ConfigError where ``optimizer`` trains what the servers hold, or what no other worker would see."""
        session = self._session
        trainer = None if session.server_job is None else session.server_job.connected
        if trainer is None or trainer.is_stepping():
            return
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        if self._strangers.get(optimizer) == count:
            return
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        served = {id(p) for wrapped in session.optimizers for g in wrapped.param_groups for p in g["params"]}
        if held & served:
            raise ConfigError(
                f"{user_line()}: step() was called on an optimizer that distributed_optimizer() did not return, and "
                "that has parameters of the job with parameter servers. It would change them in this worker alone. "
                "Call step() on the optimizer that distributed_optimizer() returned."
            )
        trained = {id(p): name for model in session.models for name, p in model.module.named_parameters()}
        own = [trained[one] for one in held if one in trained]
        if own and session.world_size > 1:
            raise ConfigError(
                f"{user_line()}: step() was called on an optimizer that distributed_optimizer() has not seen, and that "
                f"has {listed(sorted(own))} of the model. Each worker would train them alone. Put them "
                "into a group of the optimizer for distributed_optimizer(); a job with parameter servers has one."
            )
        self._strangers[optimizer] = count

    def _holds_watched(self, optimizer: Optimizer) -> bool:
        watched = {id(p) for watch in self._models.values() for p in watch.named.values()}
        return any(id(p) in watched for group in optimizer.param_groups for p in group["params"])

    # ---- helpers ----------------------------------------------------------------------------------------------------

    @property
    def _peers(self) -> tuple[int, ...]:
        """The workers that hold the same part of the model as this one, itself included."""
        return self._session.axes.ranks(*COPY_AXES)

    @property
    def _trains_locally(self) -> bool:
        return any(optimizer.trains_locally for optimizer in self._session.optimizers)

    def _gather(self, subject: str, said: Any, perhaps_alone: bool = False) -> list[Any]:
        """Returns each worker's entry about ``subject``; ``None`` for a worker that does not post one.

        A worker that is no peer counts as saying what this one says. Raises RendezvousError for an absent worker unless
        ``perhaps_alone``.
        """
        session, roll_call = self._session, self._session.roll_call
        assert roll_call is not None
        session.beat(pause=True)  # the others may arrive late
        try:
            self._said = [json.loads(text) for text in roll_call.meet(subject, json.dumps(said))]
            mine, peers = self._said[session.global_rank], self._peers
            return [other if rank in peers else mine for rank, other in enumerate(self._said)]
        except RendezvousError as error:
            if not perhaps_alone:
                raise
            self._absence, self._said = error, []
            return [said if rank == session.global_rank else None for rank in range(session.world_size)]
        finally:
            session.beat()

    def _post(self, subject: str, said: Any) -> list[Any]:
        """Returns each worker's entry about ``subject``, of peers and others."""
        self._gather(subject, said)
        return self._said

    def _number(self, watch: ModelWatch) -> int:
        return list(self._models.values()).index(watch)


def _divides(optimizer: Optimizer) -> bool:
    """Returns whether each worker has a shard of the optimizer's state."""
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return wrapper_in(optimizer, PartitionedOptimizer) is not None or any(is_part(p) for p in parameters)


def _missed(session: Session) -> str:
    return ", ".join(strategy.name for strategy in session.strategies) or "what the job does at a step"
