"""The training loops that people write, and what each means: which batches make the gradient of a step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fleet
from tests.properties.models import Example

CLIP = 0.05  # small enough to act in every step


class Turn:
    """One loss, the models it runs and the optimizers that follow it."""

    def __init__(self, job: Job, name: str, places: tuple[int, ...]) -> None:
        self.job, self.name = job, name
        self.models, self.optimizers = ([group[i] for i in places] for group in (job.models, job.optimizers))
        self.inner = [job.inner[i] for i in places]

    def loss(self, number: int) -> Tensor:
        """Runs the models on this worker's batch of that number."""
        return getattr(self.job.example, self.name)(self.job.models, *self.job.example.data(number, self.job.rank))

    def zero_grad(self, **options: Any) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(**options)

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def parameters(self) -> Iterator[Any]:
        for model in self.models:
            yield from model.parameters()


class Job:
    """What a loop has at hand: wrapped models and optimizers, and how many batches there are."""

    def __init__(self, example: Example, models: Any, optimizers: Any, inner: Any, rank: int, steps: int) -> None:
        self.example, self.models, self.optimizers, self.inner = example, models, optimizers, inner
        self.rank, self.steps = rank, steps
        self.turns = [Turn(self, name, places) for name, places in example.turns]

    def __iter__(self) -> Iterator[tuple[int, Turn]]:
        """Yields number and turn, batch after batch."""
        for number in range(self.steps):
            for turn in self.turns:
                yield number, turn


@dataclass(frozen=True)
class Loop:
    """A loop and its meaning.

    ``parts`` batches make a step, each loss divided by their number; ``clip`` limits the norm of the gradients of an
    update; the batches in ``skipped`` run forward only; the rate is halved every ``halved_every`` batches;
    ``clears_first`` says that each turn clears the gradients of its models before its backward pass; ``hook`` comes
    before each update, registered on the optimizer before it is wrapped, ``parameter_hook`` after each gradient,
    registered on the parameters before they are wrapped; ``weight`` is a factor for each loss; with ``leaves_zeros``
    a gradient that was there once stays, as zeros; only the draws of invariants take what ``tries_invariants``.
    """

    run: Callable[[Job], None]
    parts: int = 1
    clip: float | None = None
    skipped: tuple[int, ...] = ()
    halved_every: int | None = None
    clears_first: bool = False
    hook: Callable[..., None] | None = None
    parameter_hook: Callable[[Any], None] | None = None
    weight: Callable[[Tensor, list[Any]], float] | None = None
    leaves_zeros: bool = False
    tries_invariants: bool = False


LOOPS: dict[str, Loop] = {}


def loop(**meaning: Any) -> Callable[[Callable[[Job], None]], Callable[[Job], None]]:
    """Registers a loop under the name of its function."""

    def register(run: Callable[[Job], None]) -> Callable[[Job], None]:
        LOOPS[run.__name__] = Loop(run, **meaning)
        return run

    return register


@loop(clears_first=True)
def zero_first(job: Job) -> None:
    for number, turn in job:
        turn.zero_grad()
        turn.loss(number).backward()
        turn.step()


@loop(clears_first=True)
def tutorial(job: Job) -> None:
    for number, turn in job:
        loss = turn.loss(number)
        turn.zero_grad()
        loss.backward()
        turn.step()


@loop()
def zero_last(job: Job) -> None:
    for number, turn in job:
        turn.loss(number).backward()
        turn.step()
        turn.zero_grad()


@loop(clears_first=True)
def model_zero_grad(job: Job) -> None:
    for number, turn in job:
        for model in turn.models:
            model.zero_grad()
        turn.loss(number).backward()
        turn.step()


@loop(clears_first=True, leaves_zeros=True)
def filled_with_zeros(job: Job) -> None:
    for number, turn in job:
        loss = turn.loss(number)
        turn.zero_grad(set_to_none=False)
        loss.backward()
        turn.step()


@loop(clears_first=True)
def set_to_none_by_hand(job: Job) -> None:
    for number, turn in job:
        loss = turn.loss(number)
        for p in turn.parameters():
            p.grad = None
        loss.backward()
        turn.step()


@loop()
def fleet_eager(job: Job) -> None:
    for number, turn in job:
        loss = turn.loss(number)
        loss.backward()
        for optimizer in turn.optimizers:
            optimizer.minimize(loss)
        for optimizer in turn.optimizers:
            optimizer.clear_grad()


@loop()
def fleet_static(job: Job) -> None:
    for number, turn in job:
        loss = turn.loss(number)
        for optimizer in turn.optimizers:
            optimizer.minimize(loss)


@loop(clears_first=True)
def closure(job: Job) -> None:
    for number, turn in job:

        def compute(number: int = number, turn: Turn = turn) -> Tensor:
            turn.zero_grad()
            loss = turn.loss(number)
            loss.backward()
            return loss

        turn.optimizers[0].step(compute)


@loop(clears_first=True)
def scaler(job: Job) -> None:
    scale = fleet.distributed_scaler(torch.amp.GradScaler("cpu", init_scale=1024.0))
    for number, turn in job:
        turn.zero_grad()
        scale.scale(turn.loss(number)).backward()
        for optimizer in turn.optimizers:
            scale.step(optimizer)
        scale.update()


@loop(parts=2, clears_first=True)
def accumulate_no_sync(job: Job) -> None:
    for number, turn in job:
        turn.zero_grad()
        with contextlib.ExitStack() as stack:
            for model in job.models:
                stack.enter_context(model.no_sync())
            (turn.loss(2 * number) / 2).backward()
        (turn.loss(2 * number + 1) / 2).backward()
        turn.step()


@loop(parts=2, clears_first=True)
def accumulate(job: Job) -> None:
    for number, turn in job:
        turn.zero_grad()
        (turn.loss(2 * number) / 2).backward()
        (turn.loss(2 * number + 1) / 2).backward()
        turn.step()


@loop(clip=CLIP, clears_first=True)
def clip(job: Job) -> None:
    for number, turn in job:
        turn.zero_grad()
        turn.loss(number).backward()
        for model in turn.models:
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        turn.step()


@loop(clip=CLIP, clears_first=True)
def clip_by_hand(job: Job) -> None:
    for number, turn in job:
        turn.zero_grad()
        turn.loss(number).backward()
        for model in turn.models:
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            norm = sum(g.norm().item() ** 2 for g in gradients) ** 0.5
            for gradient in gradients:
                gradient.mul_(min(1.0, CLIP / (norm + 1e-6)))
        turn.step()


def clip_before_step(optimizer: Any, *unused: Any) -> None:
    torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], CLIP)


@loop(clip=CLIP, clears_first=True, hook=clip_before_step)
def clip_in_hook(job: Job) -> None:
    for number, turn in job:
        turn.zero_grad()
        turn.loss(number).backward()
        turn.step()


def halve(parameter: Any) -> None:
    parameter.grad.mul_(0.5)


@loop(clears_first=True, parameter_hook=halve, weight=lambda *_: 0.5)
def halved_in_hook(job: Job) -> None:
    for number, turn in job:
        turn.zero_grad()
        turn.loss(number).backward()
        turn.step()


@loop(clears_first=True)
def validation(job: Job) -> None:
    for number, turn in job:
        for model in job.models:
            model.eval()
        turn.loss(50 + number)  # without no_grad
        for model in job.models:
            model.train()
        turn.zero_grad()
        turn.loss(number).backward()
        turn.step()


@loop(clears_first=True)
def two_losses(job: Job) -> None:
    for number, turn in job:
        turn.zero_grad()
        loss = turn.loss(number)
        (0.3 * loss).backward(retain_graph=True)
        (0.7 * loss).backward()
        turn.step()


@loop(skipped=(1,), clears_first=True)
def skipped_batch(job: Job) -> None:
    for number, turn in job:
        turn.zero_grad()
        loss = turn.loss(number)
        if number == 1:
            continue
        loss.backward()
        turn.step()


@loop(halved_every=2, clears_first=True)
def scheduler(job: Job) -> None:
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) for optimizer in job.optimizers]
    for number in range(job.steps):
        for turn in job.turns:
            turn.zero_grad()
            turn.loss(number).backward()
            turn.step()
        for one in schedulers:
            one.step()


def by_norm(loss: Tensor, parameters: list[Any]) -> float:
    """Returns a factor for the loss that falls with the norm of its gradients."""
    gradients = torch.autograd.grad(loss, parameters, retain_graph=True)
    return 1 / (0.2 + sum(float(g.square().sum()) for g in gradients) ** 0.5)


@loop(weight=by_norm, clears_first=True)
def measured(job: Job) -> None:
    for number, turn in job:
        turn.zero_grad()
        loss = turn.loss(number)
        (loss * by_norm(loss, [p for p in turn.parameters() if p.requires_grad])).backward()
        turn.step()


@loop(clears_first=True)
def raw_optimizer(job: Job) -> None:
    for number, turn in job:
        turn.zero_grad()
        turn.loss(number).backward()
        for optimizer in turn.inner:
            optimizer.step()


@loop(clears_first=True)
def raw_model(job: Job) -> None:
    job.models = [model.module for model in job.models]
    zero_first(job)


@loop(clears_first=True, tries_invariants=True)
def converted(job: Job) -> None:
    for number, turn in job:
        if number == 1:
            for model in job.models:
                model.double().float()
        turn.zero_grad()
        turn.loss(number).backward()
        turn.step()


@loop(clears_first=True, tries_invariants=True)
def weights_assigned(job: Job) -> None:
    for number, turn in job:
        for p in turn.parameters():
            p.data = p.data.clone()
        turn.zero_grad()
        turn.loss(number).backward()
        turn.step()


@loop(clears_first=True, tries_invariants=True, weight=lambda *_: 0.5)
def gradients_assigned(job: Job) -> None:
    for number, turn in job:
        turn.zero_grad()
        turn.loss(number).backward()
        for p in turn.parameters():
            if p.grad is not None:
                p.grad.data = p.grad.data * 0.5
        turn.step()


@loop(parts=2, clears_first=True, tries_invariants=True)
def last_stays_local(job: Job) -> None:
    for number, turn in job:
        turn.zero_grad()
        (turn.loss(2 * number) / 2).backward()
        with contextlib.ExitStack() as stack:
            for model in job.models:
                stack.enter_context(model.no_sync())
            (turn.loss(2 * number + 1) / 2).backward()
        turn.step()


@loop(parts=2, clears_first=True, tries_invariants=True)
def one_loss_of_two(job: Job) -> None:
    for number, turn in job:
        turn.zero_grad()
        (turn.loss(2 * number) / 2 + turn.loss(2 * number + 1) / 2).backward()
        turn.step()
