"""fleet.mean: the mean of a loss over everything that counts in an update, on all workers and in all its passes."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from fleet.common.outside_graphs import outside_graphs
from fleet.errors import ConfigError, OptionWarning
from fleet.job.axes import COPY_AXES, SEQUENCE_AXES
from fleet.job.listener import Listener
from fleet.job.running import running_job
from fleet.job.whereabouts import user_line
from fleet.strategies._declare.strategy import GradientKeeper
from fleet.strategies._gradients.passes import Passes, fills_gradients, forwards_behind, nodes_behind
from fleet.strategies._shared.backward_calls import watch_losses
from fleet.strategies._shared.optimizer_wrapper import OptimizerWrapper
from fleet.strategies._shared.parts import part_of
from fleet.strategies._shared.waiting import wait_for
from fleet.training.logical_mean import logical_mean
from fleet.training.mean_order import MeanOrder
from fleet.training.mean_window import (
    OTHER_STATE,
    Ahead,
    Call,
    Sums,
    Window,
    are_equal,
    divisor,
    number_in,
    stays_local,
)

if TYPE_CHECKING:
    from fleet.job.job import Job
    from fleet.job.wrapped_model import WrappedModel


_LOOKED_AT = 3  # updates
_ROUNDING = 1e-4  # of sums of weights in 32 bits, relative
_NOTE = "mean"  # among the notes of a window of batches


@outside_graphs
def mean(total: Tensor, count: Tensor | float, *, update_count: Tensor | float | None = None) -> Tensor:
    """Returns the mean of a loss over everything that counts in an update: on all workers, in all backward passes.

    After the backward passes of an update its gradient is that of ``sum(totals) / sum(counts)`` in one process,
    however much each worker and each pass counts, even nothing. Every term of a loss is such a mean; a
    term that each worker computes whole, such as a penalty on weights, counts 1. The loss is not divided by the number
    of passes. Every worker calls it, from the same lines in the same order: total and count are summed over all
    workers. A worker with nothing for a term gives the count 0.

    The value is the mean so far, up to and with this call: of the update, over all workers, where the pass exchanges
    gradients; of this worker's rows under ``no_sync()`` and in batches that complete no update; without gradients, as
    in evaluation, of this call alone, over all workers.

    Args:
        total: the sum of the loss over the elements that count here, one element.
        count: the number of summed elements, or the sum of their weights; at least 0.
        update_count: the sum of ``count`` over all calls of this worker for this loss until the update, where it is
            known before. Needed where an update of several passes has several losses that count differently.

    Raises:
        ConfigError: ``total`` is no scalar, or a count no count; several losses of an update of several passes count
            differently; the workers call it in another order, or another number of times; a pipeline or parameter
            servers train the model; inside ``join()`` or ``torch.func``.

    Example:
        >>> logits, labels = torch.zeros(6, 5), torch.tensor([1, 2, -100, 4, 0, 0])
        >>> total = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        >>> print(fleet.mean(total, (labels != -100).sum()))
        tensor(1.6094)
    """
    if not isinstance(total, Tensor) or total.numel() != 1:
        shape = f"the shape {list(total.shape)}" if isinstance(total, Tensor) else f"a {type(total).__name__}"
        raise ConfigError(
            f"fleet.mean(total, count) takes the sum of the loss, a tensor of one element, and got {shape}. Sum over "
            "what counts: reduction='sum' in torch's losses, or (losses * mask).sum()."
        )
    if total.is_complex():
        raise ConfigError("fleet.mean(total, count) takes a real total, and got a complex one. Write total.real.")
    if torch._C._functorch.is_functorch_wrapped_tensor(total):
        raise ConfigError(
            "fleet.mean() was called inside a transform of torch.func, which has no update to take the mean over. "
            "Return the total from the transformed function and divide its gradient by the count of all workers."
        )
    own = _number("count", count)
    ahead = None if update_count is None else _number("update_count", update_count)
    _check_ahead(own, ahead)
    job = running_job()
    if job is None:
        quotient: Tensor = total / divisor(_at(total, own))
        return quotient
    means: UpdateMeans = job.listeners.get(UpdateMeans)
    trains = torch.is_grad_enabled() and total.requires_grad
    if job.logical is not None and (trains or job.logical.is_open):
        return logical_mean(job.logical, total, float(own), None if ahead is None else float(ahead))
    own_sums = Sums(number_in(total), _at(total, own))
    if ahead is None:
        return means.mean(total, own_sums, None)
    return means.mean(total, own_sums, _at(total, ahead), Ahead(own, ahead, user_line(sys._getframe(1)), 0))


class _Plan(NamedTuple):
    """Facts about a job that hold while it has the same strategies and models.

    Attributes:
        strategies: the strategies of the job.
        passes: the passes of each model; ``exchanging``: whether any of them exchange gradients.
        averaged: the number by which the sum of the gradients over workers and batches is divided.
    """

    strategies: Sequence[Any]
    passes: list[Passes]
    exchanging: bool
    averaged: float


class UpdateMeans(Listener):
    """The means of a job: adds up counts, and keeps a window for each optimizer."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._windows: WeakKeyDictionary[Any, Window] = WeakKeyDictionary()
        self._order = MeanOrder(job)
        self._plan: _Plan | None = None
        self._only_counts = False
        self._updates = 0
        self._root: Any = None
        self._task = -1  # the number of the latest pass
        self._is_nested = False  # the latest pass began inside another one
        self._stop: Any = None
        self.sleeps = True

    # ---- a call -----------------------------------------------------------------------------------------------------

    def mean(self, total: Tensor, own: Sums, ahead: Any, given: Ahead | None = None) -> Tensor:
        """Returns the mean, with a graph where ``total`` has one; a collective call."""
        job = self._job
        self._check_join()
        if not (torch.is_grad_enabled() and total.requires_grad):
            return _like(total, Sums(*self._summed(own, own.count, total, COPY_AXES)[:2]).mean)
        _, known, exchanging, averaged = self._planned()
        if self._stop is None:
            self._stop = watch_losses(self._note_root)
            job.listeners.wake(self)
        # A model whose forward computes the loss has left no mark in the graph yet, and the compiler leaves none.
        forwards = forwards_behind(total) or [one.latest for one in known if one.in_forward]
        forwards = forwards or [one.latest for one in known]
        axes = COPY_AXES if exchanging else SEQUENCE_AXES
        call = Call(own, averaged, self._windows_of(total), forwards if exchanging else ())
        call.given = given
        counted = call.windows[0].counted
        if ahead is None and exchanging and stays_local(forwards):
            so_far = Sums(*self._summed(own.plus(counted.alone), own.count, total, SEQUENCE_AXES)[:2])
        else:
            so_far = self._exchange(call, total, axes, ahead)
            if ahead is None:
                so_far = so_far.plus(call.waiting).plus(counted.everywhere)
        call.value = so_far.mean
        found: Tensor = _Mean.apply(total, call, self)  # type: ignore[no-untyped-call]
        return found

    def _exchange(self, call: Call, total: Tensor, axes: Sequence[str], ahead: Any = None) -> Sums:
        """Fills in the sums over the workers along ``axes``; returns the sum of the calls alone."""
        # One exchange for everything: the call, the local sums that wait for an exchange, and update_count with the
        # number of workers that gave it.
        given = (0.0, 0.0) if ahead is None else (ahead, 1.0)
        sums = self._summed([*call.own, *(call.pending or (0.0, 0.0)), *given], call.own.count, total, axes)
        self._check_alike(sums[5], axes)
        of_calls = Sums(*sums[:2])
        if ahead is None:
            call.everywhere = of_calls
            call.waiting = Sums(*sums[2:4])
        else:
            call.ahead = sums[4]
        return of_calls

    def _check_alike(self, giving: Any, axes: Sequence[str]) -> None:
        """Raises ConfigError on all workers unless the number ``giving`` update_count is all of them, or none."""
        workers = self._job.axes.size(*axes)
        # On an accelerator ``giving`` is a tensor, and reading it would wait for every kernel before.
        if isinstance(giving, float) and 0 < giving < workers:
            raise ConfigError(
                f"fleet.mean(): {giving:.0f} of {workers} workers gave update_count for the same call. Let all of them "
                "give the count of their own update, or none."
            )

    def _check_join(self) -> None:
        reducers = (model._passes.reducer for model in self._job.models)
        if any(reducer is not None and reducer._join_config.enable for reducer in reducers):
            raise ConfigError(
                "fleet.mean() was called inside model.join(): a worker that has joined calls it no more, and the "
                "others would wait for its count. Leave join() out, and let a worker without rows go on with batches "
                "that count nothing: fleet.mean(0 * model(x).sum(), 0)."
            )

    def _check_job(self) -> None:
        job = self._job
        if not job.collective and job.world_size > 1:
            raise ConfigError(
                "fleet.mean() was called in a job with parameter servers, which take each worker's gradients as they "
                "come: nothing is there to divide by what the others count. Write total / count."
            )
        if job.axes.size("pp") > 1 or any(model.runs_micro_batches for model in job.models):
            raise ConfigError(
                "fleet.mean() was called in a pipeline, whose stages begin backward before the count of the batch is "
                "known. Let the loss_fn of the PipelineLayer return (sum, count); train_batch() makes "
                "the mean of the whole batch of them."
            )

    def _summed(self, numbers: Sequence[Any], count: Any, total: Tensor, axes: Sequence[str]) -> Sequence[Any]:
        """Returns each of ``numbers`` summed over the workers along ``axes``; they are exchanged where ``total`` is.

        Raises ConfigError where the workers are at different means.
        """
        group = self._job.axes.group(*axes) if self._job.collective else None
        if group is None:
            return numbers
        numbers = [*numbers, *self._order.marks(axes, count)]
        # On an accelerator the sums stay tensors: reading them would wait for every kernel before.
        is_read = total.device.type == "cpu"
        if is_read:
            sums = torch.tensor(numbers, dtype=torch.float64)
        else:
            sums = torch.stack([torch.as_tensor(one, dtype=torch.float64, device=total.device) for one in numbers])
        wait_for(dist.all_reduce(sums, group=group, async_op=True))
        found: Sequence[Any] = self._order.agreed(sums.tolist() if is_read else sums, axes)
        return found

    def _planned(self) -> _Plan:
        """Returns the plan of the job; raises ConfigError for a job without a mean."""
        job = self._job
        plan = self._plan
        known = [model._passes for model in job.models]
        if plan is not None and plan.strategies is job.strategies and plan.passes == known:
            return plan
        self._check_job()
        exchanging = any(passes.exchanges for passes in known)
        averages = exchanging and job.options["gradient_scale_configs"].scale_strategy == "avg"
        parts = job.axes.data_replicas if averages else 1
        for keeper in self._keepers():
            parts *= keeper.averaged_batches()
        self._plan = _Plan(job.strategies, known, exchanging, float(parts))
        return self._plan

    def _windows_of(self, total: Tensor) -> list[Window]:
        """Returns the windows of the optimizers whose parameters ``total`` reaches."""
        optimizers = list(self._job.optimizers)
        # With one optimizer there is one window, and no walk over the graph is needed to find it.
        if len(optimizers) > 1:
            reached = set(map(id, _parameters_behind(total)))
            optimizers = [one for one in optimizers if not reached.isdisjoint(map(id, one.parameters()))]
        found = [self._window(optimizer) for optimizer in optimizers] or [self._window(self._job)]
        for window in found:
            if window.passes and not window.has_gradients():
                window.end_update()  # cleared by hand
        return found

    def _window(self, key: Any) -> Window:
        window = self._windows.get(key)
        if window is None:
            window = self._windows[key] = Window(lambda: self._gradients(key))
        return window

    def _gradients(self, key: Any) -> Iterator[Tensor]:
        """Yields the gradients of an optimizer, or of the job: in ``.grad`` and with the strategies that keep some."""
        parameters = list(key.parameters())
        yield from (p.grad for p in parameters if p.grad is not None)
        for keeper in self._keepers():
            yield from keeper.held_gradients(parameters)

    def _keepers(self) -> Iterator[GradientKeeper]:
        return (strategy for strategy in self._job.strategies if isinstance(strategy, GradientKeeper))

    # ---- backward ---------------------------------------------------------------------------------------------------

    def _note_root(self, loss: Tensor, gradient: Tensor | None) -> None:
        # A backward pass inside another one has a task already: a reentrant checkpoint, which runs its own part.
        self._is_nested = torch._C._current_graph_task_id() != -1
        if not self._is_nested:
            self._note_plain(loss)
        self._root = number_in(loss) if gradient is None else number_in(loss) * number_in(gradient)

    def _note_plain(self, loss: Tensor) -> None:
        """Marks the windows of passes whose gradients a loss without a mean is about to add to."""
        begun = {key: window for key, window in self._windows.items() if window.passes}
        if not begun or any(isinstance(node, _Mean._backward_cls) for node in nodes_behind(loss)):
            return
        reached = set(map(id, _parameters_behind(loss)))
        for key, window in begun.items():
            window.is_foreign |= not reached.isdisjoint(map(id, key.parameters()))

    def scale(self, call: Call, gradient: Tensor) -> Any:
        """Returns the factor for the gradient of the total in the backward pass under way."""
        forwards = call.forwards
        if not (any(made.fills() for made in forwards) if forwards else fills_gradients(self._job.parameters())):
            if self._is_nested:
                raise ConfigError(
                    "fleet.mean() was called inside checkpoint(..., use_reentrant=True), whose backward is a pass of "
                    "its own. Give use_reentrant=False, or call fleet.mean() outside."
                )
            return call.scale_alone()
        self._settle(call, gradient)
        task = torch._C._current_graph_task_id()
        if task != self._task and call.forwards and not stays_local(call.forwards):
            self._order.before_backward(COPY_AXES)
        self._task = task
        scales = [window.enter(call, gradient, task, self._root) for window in call.windows]
        # Windows learn of the end of a pass once, however many means it has.
        if not all(window.is_in_pass for window in call.windows):
            for window in call.windows:
                window.is_in_pass = True
            torch.autograd.Variable._execution_engine.queue_callback(call.end_pass)
        if any(not are_equal(one, scales[0]) for one in scales[1:]):
            raise ConfigError(
                "fleet.mean(): the optimizers whose parameters this loss reaches have had other backward passes since "
                "their last update. Step them after the same passes, or give update_count."
            )
        return scales[0]

    def _settle(self, call: Call, gradient: Tensor) -> None:
        """Counts ``call`` on this worker alone, or on all, as its pass turns out to do.

        When ``mean()`` was called this could not be known: a backward pass within a forward, for example, may exchange
        although the forward is to keep gradients local.
        """
        if not call.forwards or call.ahead is not None:
            return
        is_held = stays_local(call.forwards)
        if is_held is (call.everywhere is None):
            return
        if call.windows[0].has_counted(call):
            raise ConfigError(OTHER_STATE)
        call.pending = call.windows[0].counted.alone
        call.everywhere = None
        if not is_held:
            self._exchange(call, gradient, COPY_AXES)

    # ---- a step -----------------------------------------------------------------------------------------------------

    def before_step(self, optimizer: Optimizer, has_closure: bool) -> None:
        """Notes whether the step will update anything; raises ConfigError where an update_count was wrong."""
        self._only_counts = bool(cast(Any, optimizer).only_counts())
        if not self._only_counts:
            for window in self._known(optimizer):
                window.check_given()

    def after_update(self, optimizer: Optimizer, has_closure: bool) -> None:
        """Begins a new window, unless the step has only ended a batch."""
        if not self._only_counts:
            self._order.end_update()
        for window in self._known(optimizer):
            if not self._only_counts:
                self._check_weights(window)
                window.end_update()
                continue
            window.end_batch()
            notes = cast(Any, optimizer).window_notes()
            if notes is not None and (noted := window.noted()) is not None:
                notes[_NOTE] = noted

    def _check_weights(self, window: Window) -> None:
        """Warns once, in the first updates, of a loop that divides by the number of passes, too."""
        self._updates += 1
        if self._updates <= _LOOKED_AT and window.is_divided_twice():
            self._updates = _LOOKED_AT
            warnings.warn(
                f"fleet.mean(): each of the {window.passes} backward passes of an update has its loss times "
                f"1/{window.passes}. Where this divides it by the number of passes, leave the division out: the mean "
                "is over the whole update already. A weight that is meant is right.",
                OptionWarning,
                stacklevel=4,
            )

    def state_loaded(self, target: WrappedModel | Optimizer) -> None:
        """Goes on with the batches of a window that the state of an optimizer holds."""
        notes = target.window_notes() if isinstance(target, OptimizerWrapper) else None
        if notes is None:
            return
        if _NOTE in notes:
            self._window(target).restore(notes[_NOTE])
        elif target in self._windows:
            self._windows[target].end_update()

    def optimizer_cleared(self, optimizer: Optimizer) -> None:
        """Forgets the passes of a batch whose gradients were cleared."""
        for window in self._known(optimizer):
            window.drop_batch()

    def gradients_cleared(self, parameters: Sequence[Tensor]) -> None:
        """Forgets the passes of a batch whose gradients were cleared."""
        cleared = set(map(id, parameters))
        for key, window in self._windows.items():
            if key is self._job or not cleared.isdisjoint(map(id, key.parameters())):
                window.drop_batch()

    def close(self) -> None:
        """Stops watching backward."""
        if self._stop is not None:
            self._stop()

    def _known(self, optimizer: Optimizer) -> list[Window]:
        windows = (self._windows.get(key) for key in (optimizer, self._job))
        return [window for window in windows if window is not None]


def _number(name: str, number: Any) -> Any:
    """Returns ``number`` as a float, or as a tensor on an accelerator, which nothing waits for.

    Raises ConfigError unless it is a count.
    """
    if isinstance(number, Tensor) and number.numel() != 1:
        raise ConfigError(
            f"fleet.mean(total, count): {name} is a number, and has the shape {list(number.shape)}. Write mask.sum()."
        )
    if isinstance(number, Tensor) and number.requires_grad:
        raise ConfigError(
            f"fleet.mean(total, count): {name} has a gradient, as the sum of weights that the model computes, and the "
            f"mean would drop it. Give {name}.detach() where the weights are constants of this update; a loss that is "
            "to learn its weights needs them normalised by the model."
        )
    if isinstance(number, Tensor) and number.device.type == "cuda":
        return number.detach()
    try:
        found = float(number.item() if isinstance(number, Tensor) else number)
    except (TypeError, ValueError, RuntimeError):
        found = math.nan
    if isinstance(number, str) or not 0 <= found < math.inf:
        raise ConfigError(
            f"fleet.mean(total, count): {name} is the number of what was summed, or the sum of its weights: finite and "
            f"at least 0. It is {number!r}."
        )
    return found


def _check_ahead(count: Any, update_count: Any) -> None:
    """Raises ConfigError where a call counts more than its update does."""
    if isinstance(count, float) and isinstance(update_count, float) and update_count < count * (1 - _ROUNDING):
        raise ConfigError(
            f"fleet.mean(total, count, update_count=...): this call alone counts {count:.6g}, and its update "
            f"{update_count:.6g}. update_count is the sum of count over all calls of this worker for this loss "
            "until the update."
        )


def _at(total: Tensor, number: Any) -> Any:
    """Returns ``number`` where ``total`` is: read where that does not wait for an accelerator."""
    return float(number) if total.device.type == "cpu" else number_in(torch.as_tensor(number, device=total.device))


def _like(total: Tensor, value: Any) -> Tensor:
    """Returns ``value`` shaped, typed and placed as ``total``; the mean of whole numbers is none itself."""
    dtype = total.dtype if total.is_floating_point() else torch.get_default_dtype()
    if isinstance(value, Tensor):
        return value.to(dtype).reshape(total.shape)
    return torch.full_like(total.detach(), value, dtype=dtype)


def _parameters_behind(loss: Tensor) -> Iterator[Tensor]:
    """Returns the parameters (the parts of a divided model) that a backward pass from ``loss`` would reach."""
    variables = (getattr(node, "variable", None) for node in nodes_behind(loss))
    leaves: Any = [loss] if loss.grad_fn is None else variables
    return (part_of(leaf) for leaf in leaves if leaf is not None)


class _Mean(torch.autograd.Function):
    """The value of a mean, with the gradient of the update; see [Note: The mean so far] in mean_window.py."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, call: Call, means: UpdateMeans) -> Tensor:
        """Returns the value, shaped and typed as ``total``."""
        ctx.call = call
        ctx.means = means
        return _like(total, call.value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Returns the gradient of ``total``."""
        return (gradient * ctx.means.scale(ctx.call, gradient)).to(gradient.dtype), None, None
