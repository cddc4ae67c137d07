"""ExchangedGradients: a step takes gradients that all workers have exchanged, after the same number of passes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import Optimizer

from fleet.checks.comparison import checksums, first_difference, listed_ranks
from fleet.checks.watched import ModelWatch, OptimizerWatch, Watched, arrivals_of, missed
from fleet.errors import ConfigError
from fleet.job.listener import Listener
from fleet.strategies._shared.experts import is_expert
from fleet.strategies._shared.parts import is_part, local
from fleet.strategies.amp.amp_model import AmpModel


class ExchangedGradients(Listener):
    """Looks at the gradients of each step; those of a step with a closure afterwards.

    Args:
        watched: the models and optimizers.
        compare_optimizer: raises where the workers step with different optimizers.
    """

    def __init__(self, watched: Watched, compare_optimizer: Callable[[OptimizerWatch], None]) -> None:
        self._watched = watched
        self._compare_optimizer = compare_optimizer
        self._job = watched.job
        self._only_counts = False

    def before_step(self, optimizer: Optimizer, has_closure: bool) -> None:
        """Raises ConfigError where the gradients of this step were never exchanged."""
        watch = self._watched.stepped(optimizer)
        # Afterwards a closure's step has ended the batch that is asked about.
        self._only_counts = watch is not None and watch.optimizer.only_counts()
        if watch is not None and not has_closure:
            self._check_step(watch)

    def after_update(self, optimizer: Optimizer, has_closure: bool) -> None:
        """Looks at the passes that a closure has run, and marks the gradients that the step leaves behind."""
        watch = self._watched.stepped(optimizer)
        if watch is None:
            return
        # The gradients of a closure exist only once the update has run it.
        if has_closure:
            self._check_step(watch)
        watch.note_step()

    def _check_step(self, watch: OptimizerWatch) -> None:
        """Raises ConfigError where the gradients of this step were never exchanged."""
        watches = list(self._watched.models.values())
        if not watches:
            return
        watch.look(watches, self._watched.registered)
        if self._watched.compares:
            self._check_strangers(watch)
        for model, used in watch.models.items():
            model.model._passes.check_places()
            if self._watched.compares and (name := model.unseen(self._watched.registered, watch.models)):
                raise ConfigError(
                    f"step() got a gradient of {name!r}, which did not train when the model that "
                    "distributed_model() returned last ran: the gradient came through the plain module, and the "
                    "workers have not exchanged it. In the loop, call the model that distributed_model() returned."
                )
            if model.used == used and (self._watched.compares or isinstance(model.model._chain, AmpModel)):
                self._check_forward(model, watch)
        watch.models = {model: model.used for model in watch.models}
        if self._watched.compares and (watch.loaded_at or not watch.is_compared):
            self._compare_optimizer(watch)
        if self._watched.compares and not self._watched.trains_locally and not self._only_counts:
            self._check_exchanges(watch)

    def _check_exchanges(self, watch: OptimizerWatch) -> None:
        """Raises ConfigError where workers have stepped after different exchanges, or with local gradients.

        Checked once for each number of exchanges between two updates, which is the same in all steps of most loops.
        """
        now = {model: model.model._passes.exchanged for model in watch.models}
        counts = tuple(now[model] - watch.exchanged.get(model, 0) for model in now)
        watch.exchanged = now
        local = self._local(watch)
        seen: tuple[int | str, ...] = (*counts, *local)
        if seen in watch.agreed:
            return
        watch.agreed.add(seen)
        apart: dict[str, Tensor] = {}
        for model, count in zip(now, counts, strict=True):
            if model.is_divided or len(self._watched.peers) == 1:
                continue  # no other worker has gradients that should equal these
            gradients = {name: p.grad for name, p in model.named.items() if p.grad is not None}
            kept = {n: g for n, g in gradients.items() if not count or n in local}
            apart |= {n: g for n, g in kept.items() if not (g.is_sparse or is_part(g) or is_expert(model.named[n]))}
        number = list(self._watched.optimizers.values()).index(watch)
        said = {"counts": list(seen), "sums": checksums(apart)}
        found = self._watched.gather(f"a step of optimizer {number}", said, perhaps_alone=True)
        others = [rank for rank, row in enumerate(found) if row is None or row["counts"] != list(seen)]
        if others:
            raise ConfigError(
                f"Worker {self._job.global_rank} called step() after {'/'.join(map(str, counts))} backward passes "
                f"that exchanged gradients, and {listed_ranks(others)} did not: some workers have skipped a step(). "
                "Call step() on every worker after the same backward pass, even when one worker's batch is bad."
            ) from self._watched.absence
        if name := first_difference([row["sums"] for row in found]):
            if torch._C._current_graph_task_id() != -1:
                raise ConfigError(
                    f"step() ran inside backward(), as in a hook of register_post_accumulate_grad_hook(), with a "
                    f"gradient of {name!r} that the workers have not exchanged yet: they exchange until backward() "
                    "ends. Call step() after loss.backward(); or set strategy.sharding and sharding_configs['stage'] "
                    "to 2, which exchanges a gradient before such a hook gets it."
                )
            raise ConfigError(
                f"step() got a gradient of {name!r} that differs between the workers: no backward pass of the "
                "wrapped model has exchanged what was added to it last. Gradients that torch.autograd.grad returns, "
                "those of backward() under no_sync() and those that come through the plain module stay local. Call "
                "loss.backward() outside no_sync() in the last backward pass before step()."
            )

    def _local(self, watch: OptimizerWatch) -> list[str]:
        """Returns the parameters to whose gradients something was added after the last exchange.

        Raises ConfigError where it was added inside a sharded model, and no step could use it.
        """
        if any(model.is_divided and model.model._passes.has_local for model in watch.models):
            raise ConfigError(
                "step() came after a backward pass whose gradients are still inside the sharded model, because it ran "
                "under no_sync(). Run the last one before step() outside it."
            )
        arrivals = arrivals_of(self._watched.models.values())
        # Most steps end here, without a walk over all parameters.
        if not any(one.local for one in arrivals):
            return []
        held = {id(p) for p in watch.optimizer.parameters()}
        local = {p for one in arrivals for p in one.local}
        return [
            name
            for model in watch.models
            for name, p in model.named.items()
            if id(p) in held and p.grad is not None and p in local and not any(one.has_exchanged(p) for one in arrivals)
        ]

    def _check_strangers(self, watch: OptimizerWatch) -> None:
        if self._watched.trains_locally:
            return  # the average covers all parameters of the optimizer
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
        # A parameter shared with a model that did run has its gradient from there.
        ran = (other for other, used in watch.models.items() if other.used != used)
        elsewhere = {id(p) for other in ran for p in other.model.parameters()}
        held = {id(p) for p in watch.optimizer.parameters()} - elsewhere
        for name, parameter in model.named.items():
            if id(parameter) in held and parameter.grad is not None and bool(local(parameter.grad).any()):
                raise ConfigError(
                    f"step() got a gradient of {name!r}, and the model that distributed_model() returned has "
                    "not run since the last step: the gradient came through the plain module, bypassing "
                    f"{missed(self._job)}. In the loop, call the model that distributed_model() returned."
                )
