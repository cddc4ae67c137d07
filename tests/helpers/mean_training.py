"""Loops with fleet.mean over drawn masks, and the same updates in one process of plain torch."""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fleet
from tests.helpers.checked_training import flat, start, weights

ROWS, TOKENS, WIDTH, CLASSES = 2, 5, 6, 4
UPDATES = 3
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no_sync": {},
    "gradient_merge": {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}},
    "gradient_merge_sum": {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2, "avg": False}},
    "acc_step": {"sharding_configs": {"gradient_merge_acc_step": 2}},
    "accumulate_steps": {"hybrid_configs": {"sharding_configs": {"accumulate_steps": 2}}},
}
LOSSES = ("one", "two_alike", "two_ahead", "penalty_ahead", "weighted")


@dataclass(frozen=True)
class Case:
    """A loop with fleet.mean.

    Attributes:
        workers: how many workers share the rows; ``passes`` backward passes make an update, in the ``form``.
        losses: which terms the loss has.
        stage: of sharding; 0 is none.
        extra: options beside these.
        clip: the norm that gradients are clipped to, or ``None``.
        scales: whether a GradScaler scales the loss.
    """

    number: int
    workers: int
    passes: int
    form: str
    losses: str
    stage: int = 0
    rule: str = "sgd"
    clip: float | None = None
    scales: bool = False
    empty: float = 0.3
    extra: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def options(self) -> dict[str, Any]:
        """Returns the options of the job."""
        made: dict[str, Any] = {}
        if self.stage:
            made = {"sharding": True, "sharding_configs": {"stage": self.stage, "sharding_degree": self.workers}}
        for name, value in {**FORMS[self.form], **self.extra}.items():
            made[name] = {**made[name], **value} if isinstance(made.get(name), dict) else value
        return made


def draw(number: int, workers: int | None = None) -> Case:
    """Returns the case of that number."""
    dice = random.Random(number)
    workers = workers or dice.choice([1, 2, 3, 4])
    stage = dice.choice([0, 0, 1, 2, 3]) if workers > 1 else 0
    forms = ["plain", "plain", "no_sync"]
    forms += ["acc_step", "accumulate_steps"] if stage else ["gradient_merge", "gradient_merge_sum"]
    form = dice.choice(forms)
    passes = 2 if form not in ("plain", "no_sync") else dice.choice([1, 2, 3])
    losses = dice.choice(LOSSES)
    if form == "acc_step" and stage > 1 and losses == "penalty_ahead":
        losses = "one"  # a gradient that comes to the shard past the model is refused there
    extra: dict[str, Any] = {}
    if dice.random() < 0.2:
        extra = {"recompute": True, "recompute_configs": {"checkpoints": ["0"]}}
    elif dice.random() < 0.2 and not stage:
        extra = {"find_unused_parameters": True}
    elif dice.random() < 0.2 and not stage:
        extra = {"gradient_scale_configs": {"scale_strategy": "sum"}}
    return Case(
        number,
        workers,
        passes,
        form,
        losses,
        stage,
        dice.choice(["sgd", "momentum", "adam"]),
        dice.choice([None, None, 0.05]),
        form in ("plain", "no_sync") and stage < 2 and dice.random() < 0.2,
        dice.choice([0.0, 0.3, 0.7]),
        extra,
    )


def net_of(case: Case) -> nn.Sequential:
    """Returns the model, the same on every worker."""
    torch.manual_seed(case.number)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def optimizer_of(case: Case, net: nn.Module) -> torch.optim.Optimizer:
    """Returns the optimizer; Adam's eps keeps rounding of small gradients from becoming a step."""
    if case.rule == "adam":
        return torch.optim.Adam(net.parameters(), 0.02, eps=1e-2)
    return torch.optim.SGD(net.parameters(), 0.1, momentum=0.9 if case.rule == "momentum" else 0.0)


def batch(case: Case, update: int, micro: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns inputs, labels of which -100 does not count, perhaps none, and weights of the tokens."""
    draws = torch.Generator().manual_seed(((case.number * 10 + update) * 10 + micro) * 10 + rank)
    x = torch.randn(ROWS, TOKENS, WIDTH, generator=draws)
    y = torch.randint(CLASSES, (ROWS, TOKENS), generator=draws)
    kept = torch.rand(ROWS, TOKENS, generator=draws)
    share = torch.rand((), generator=draws)
    y[kept > share] = -100
    if torch.rand((), generator=draws) < case.empty:
        y[:] = -100
    return x, y, torch.rand(ROWS, TOKENS, generator=draws)


def terms(case: Case, out: Tensor, y: Tensor, weight: Tensor, parameters: list[Tensor]) -> list[tuple[Any, Any, float]]:
    """Returns for each term of the loss its sum, what it counts, and its factor."""
    losses = F.cross_entropy(out.flatten(0, 1), y.flatten(), reduction="none").view(y.shape)
    counts = y != -100
    main = (losses.sum(), counts.sum(), 1.0)
    if case.losses == "weighted":
        return [((losses * weight).sum(), (weight * counts).sum(), 1.0)]
    if case.losses == "two_alike":
        square = out.square().mean(-1) * counts
        return [main, (square.sum(), counts.sum(), 0.3)]
    if case.losses == "two_ahead":
        rows = counts.any(1)
        return [main, (out.square().mean((1, 2))[rows].sum(), rows.sum(), 0.3)]
    if case.losses == "penalty_ahead":
        return [main, (out.sum() * 0 + sum(p.square().sum() for p in parameters), 1, 0.01)]
    return [main]


def micro_batches(case: Case, update: int, rank: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Returns the data of an update of one worker."""
    return [batch(case, update, micro, rank) for micro in range(case.passes)]


def expected(case: Case) -> Tensor:
    """Returns the parameters after the same updates in one process."""
    net = net_of(case)
    optimizer = optimizer_of(case, net)
    parameters: list[Tensor] = list(net.parameters())
    for update in range(UPDATES):
        found = [
            terms(case, net(x), y, weight, parameters)
            for rank in range(case.workers)
            for x, y, weight in micro_batches(case, update, rank)
        ]
        loss: Any = 0.0
        for columns in zip(*found, strict=True):
            count = sum(torch.as_tensor(count) for _, count, _ in columns)
            factor = columns[0][2]
            loss = loss + factor * sum(total for total, _, _ in columns) / (count if count else 1)
        optimizer.zero_grad()
        loss.backward()
        if case.clip is not None:
            nn.utils.clip_grad_norm_(parameters, case.clip)
        optimizer.step()
    return flat(net.state_dict())


def train(case: Case, rank: int) -> tuple[Tensor, float]:
    """Returns the parameters after training on the workers, and the last value of the first mean."""
    start(case.options)
    net = net_of(case)
    optimizer = fleet.distributed_optimizer(optimizer_of(case, net))
    model = fleet.distributed_model(net)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if case.scales else None
    value = torch.zeros(())
    for update in range(UPDATES):
        data = micro_batches(case, update, rank)
        ahead: list[Any] = [None, None]
        if case.losses in ("two_ahead", "penalty_ahead") and case.passes > 1:
            labels = [y for _, y, _ in data]
            ahead = [sum((y != -100).sum() for y in labels), sum((y != -100).any(1).sum() for y in labels)]
            if case.losses == "penalty_ahead":
                ahead[1] = len(data)
        for micro, (x, y, weight) in enumerate(data):
            is_last = micro == len(data) - 1
            with model.no_sync() if case.form == "no_sync" and not is_last else nullcontext():
                found = terms(case, model(x), y, weight, [whole(p) for p in model.parameters()])
                means = [
                    fleet.mean(total, count, update_count=of_update) * factor
                    for (total, count, factor), of_update in zip(found, ahead, strict=False)
                ]
                value = means[0].detach()
                loss = sum(means[1:], means[0])
                (loss if scaler is None else scaler.scale(loss)).backward()
            if case.form in ("gradient_merge", "gradient_merge_sum", "acc_step") and not is_last:
                optimizer.step()
                optimizer.zero_grad()
        if scaler is not None:
            scaler.unscale_(optimizer)
        if case.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    return weights(model), value.item()


def whole(parameter: Any) -> Tensor:
    """Returns the whole of a parameter."""
    found: Tensor = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return found


def run(rank: int, world_size: int, cases: list[Case]) -> list[Any]:
    """Returns the parameters of each case, or the text of its error."""
    found: list[Any] = []
    for case in cases:
        try:
            found.append(train(case, rank)[0])
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def off(got: Tensor, right: Tensor) -> float:
    """Returns the largest distance, relative to the largest number."""
    return float((got - right).abs().max() / right.abs().max())


# ---- a pipeline -----------------------------------------------------------------------------------------------------


def counted(out: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the sum of the loss and what it counts."""
    return F.cross_entropy(out.flatten(0, 1), y.flatten(), reduction="sum"), (y != -100).sum()


def train_pipeline(
    rank: int, world_size: int, cases: list[tuple[Case, dict[str, Any]]]
) -> list[tuple[Tensor, list[float]] | str]:
    """Returns for each case the parameters after train_batch, and its losses."""
    found: list[Any] = []
    for case, options in cases:
        try:
            start({"pipeline_configs": {"accumulate_steps": case.passes, "micro_batch_size": ROWS}, **options})
            topology = fleet.get_hybrid_communicate_group().topology()
            net = fleet.meta_parallel.PipelineLayer(list(net_of(case)), loss_fn=counted, topology=topology)
            optimizer = fleet.distributed_optimizer(optimizer_of(case, net))
            model = fleet.distributed_model(net)
            scaler = None
            if case.scales:
                scaler = fleet.distributed_scaler(torch.amp.GradScaler("cpu", init_scale=1024.0))
            losses = []
            for update in range(UPDATES):
                data = micro_batches(case, update, fleet.data_rank())
                inputs, labels = (torch.cat([row[at] for row in data]) for at in (0, 1))
                losses.append(float(model.train_batch([inputs, labels], optimizer, scaler=scaler)))
            found.append((weights(model), losses))
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found
