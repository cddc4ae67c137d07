"""Trainings with ``strategy.reproducible`` that are built from names, and the bits with which they end."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

import fleet
from fleet.clip import ClipGradByGlobalNorm, ClipGradByNorm, ClipGradByValue
from fleet.elastic import ElasticSampler
from fleet.errors import FleetError
from fleet.optimizer.optimizer_arguments import with_steps_before
from tests.properties.pool import end_of_draw

__all__ = ["SCALED", "Case", "Training", "bits_of", "differing_bits", "plain_torch", "train_all"]

ROUNDS = 6  # of an epoch; 1, 2 and 3 of them divide it
WIDTH, CLASSES = 48, 10
SEED = 5
SCALED = "scaled"  # the loop with a GradScaler, which takes amp
CLIP = 0.05  # small enough to act in every update


@dataclass(frozen=True)
class Case:
    """What is trained, and how.

    Attributes:
        model: a name in ``MODELS``.
        rule: a name in ``RULES``.
        loop: a name in ``LOOPS``.
        logical: the number of logical workers.
        batch: rows of a batch.
        epochs: each has ``ROUNDS`` rounds.
        options: of the strategy, beside ``reproducible``.
        clip: a name in ``CLIPS``, or ``by_hand``, or nothing.
        schedule: a name in ``SCHEDULES``, or nothing.
        averages: keep an average of the weights.
        counts: the loss is a ``fleet.mean`` over rows of which some do not count.
        draws: layers and data draw numbers.
    """

    number: int = -1
    model: str = "conv"
    rule: str = "adamw"
    loop: str = "zero_last"
    logical: int = 4
    batch: int = 3
    epochs: int = 1
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    clip: str = ""
    schedule: str = ""
    averages: bool = False
    counts: bool = False
    draws: bool = True


# ---- models: three modules in a row, of which the second can be recomputed -------------------------------------------


class Noise(nn.Module):
    """Draws from all three libraries, as augmentation and stochastic layers do."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns ``x``, noisy while it trains."""
        if not self.training:
            return x
        scale = 1.0 + 0.1 * float(np.random.standard_normal()) + 0.1 * random.gauss(0.0, 1.0)
        return x * scale + 0.01 * torch.randn_like(x)


class Recurrent(nn.Module):
    """A GRU; returns its last output."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.GRU(8, 16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Returns (rows, 16) of (rows, 6, 8)."""
        out: Tensor = self.cells(x)[0][:, -1]
        return out


class Branches(nn.Module):
    """Uses one of two layers, as the batch says, and a third one never."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(32, 32)
        self.other = nn.Linear(32, 32)
        self.unused = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        """Returns a tensor like ``x``."""
        out: Tensor = self.one(x) if float(x.detach().sum()) > 0 else self.other(x)
        return out


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.second = nn.Linear(32, 32)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        """Returns a tensor like ``x``."""
        out: Tensor = self.second(torch.tanh(self.first(x)))
        return out


class Tokens(nn.Module):
    """An embedding of rounded inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Returns (rows, 48, 8) of (rows, 48)."""
        out: Tensor = self.table((x.float() * 4).long().clamp(-8, 7) + 8)
        return out


def _conv(drop: nn.Module) -> list[nn.Module]:
    first = nn.Sequential(nn.Unflatten(1, (3, 4, 4)), nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16))
    block = nn.Sequential(nn.ReLU(), drop, nn.Conv2d(16, 16, 3, padding=1, stride=2), nn.BatchNorm2d(16), nn.ReLU())
    return [first, block, nn.Sequential(nn.Flatten(), nn.Linear(64, CLASSES))]


def _mlp(drop: nn.Module) -> list[nn.Module]:
    block = nn.Sequential(nn.GELU(), drop, nn.Linear(32, 32), nn.LayerNorm(32), nn.Tanh())
    return [nn.Linear(WIDTH, 32), block, nn.Linear(32, CLASSES)]


def _attention(drop: nn.Module) -> list[nn.Module]:
    p = 0.1 if isinstance(drop, nn.Dropout) else 0.0
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=p, activation="gelu", batch_first=True)
    first = nn.Sequential(nn.Unflatten(1, (6, 8)), nn.Linear(8, 16))
    return [first, layer, nn.Sequential(nn.Flatten(), nn.Linear(96, CLASSES))]


def _recurrent(drop: nn.Module) -> list[nn.Module]:
    return [nn.Unflatten(1, (6, 8)), nn.Sequential(Recurrent(), drop), nn.Linear(16, CLASSES)]


def _branches(drop: nn.Module) -> list[nn.Module]:
    return [nn.Linear(WIDTH, 32), nn.Sequential(Branches(), drop, nn.Tanh()), nn.Linear(32, CLASSES)]


def _tied(drop: nn.Module) -> list[nn.Module]:
    return [nn.Linear(WIDTH, 32), nn.Sequential(Tied(), drop, nn.GroupNorm(4, 32)), nn.Linear(32, CLASSES)]


def _spectral(drop: nn.Module) -> list[nn.Module]:
    # Its forwards read and write buffers.
    block = nn.Sequential(spectral_norm(nn.Linear(32, 32)), drop, nn.Tanh())
    return [nn.Linear(WIDTH, 32), block, nn.Linear(32, CLASSES)]


def _tokens(drop: nn.Module) -> list[nn.Module]:
    block = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), drop, nn.RMSNorm(16))
    return [Tokens(), block, nn.Sequential(nn.Flatten(), nn.Linear(WIDTH * 16, CLASSES))]


MODELS = {
    "conv": _conv,
    "mlp": _mlp,
    "attention": _attention,
    "recurrent": _recurrent,
    "branches": _branches,
    "tied": _tied,
    "spectral": _spectral,
    "tokens": _tokens,
}


def net_of(case: Case) -> nn.Sequential:
    """Returns a new network; torch's generator decides its weights."""
    drop = nn.Dropout(0.2) if case.draws else nn.Identity()
    first, block, head = MODELS[case.model](drop)
    return nn.Sequential(first, block, nn.Sequential(Noise(), head) if case.draws else head)


# ---- data ------------------------------------------------------------------------------------------------------------


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Rows with labels; with ``draws`` each time with other noise."""

    def __init__(self, num_rows: int, draws: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(num_rows, WIDTH, generator=generator)
        self.y = torch.randint(0, CLASSES, (num_rows,), generator=generator)
        self.draws = draws

    def __len__(self) -> int:
        """Returns the number of rows."""
        return len(self.x)

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        """Returns a row and its label."""
        row = self.x[place]
        if self.draws:
            row = row + 0.1 * torch.randn_like(row) + 0.1 * random.gauss(0.0, 1.0)
        return row, self.y[place]


def rows_of(case: Case) -> Rows:
    """Returns rows for an epoch, whose last round is not full."""
    return Rows(case.logical * case.batch * (ROUNDS - 1) + 3, case.draws)


# ---- rules, clipping, schedules --------------------------------------------------------------------------------------

RULES: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, 0.01, eps=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, eps=1e-3, weight_decay=0.05),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.05, eps=1e-3),
    "fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    "muon": lambda p: fleet.optimizer.Muon(list(p), 0.02),
}
CLIPS = {
    "global": ClipGradByGlobalNorm(CLIP),
    "each": ClipGradByNorm(CLIP),
    "value": ClipGradByValue(CLIP / 10),
}
SCHEDULES: dict[str, Any] = {
    "step": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20, cycle_momentum=False),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0),
    "in_a_row": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
}


def optimizer_of(case: Case, net: nn.Module) -> torch.optim.Optimizer:
    """Returns the user's optimizer, with Fleet's clipping where the case has it."""
    return with_steps_before(RULES[case.rule](net.parameters()), CLIPS.get(case.clip))


# ---- the training ----------------------------------------------------------------------------------------------------


class Training:
    """A case in a job that it begins.

    Attributes:
        losses: of the rounds.
        forwards: of this process.
    """

    def __init__(self, case: Case) -> None:
        strategy = fleet.DistributedStrategy()
        strategy.update(case.options)
        strategy.reproducible = True
        strategy.reproducible_configs = {"logical_workers": case.logical}
        fleet.init(is_collective=True, strategy=strategy, log_level="ERROR")
        torch.manual_seed(SEED)
        self.case = case
        self.net = net_of(case)
        self.optimizer = fleet.distributed_optimizer(optimizer_of(case, self.net))
        self.model = fleet.distributed_model(self.net)
        self.scheduler = SCHEDULES[case.schedule](self.optimizer) if case.schedule else None
        if case.loop == SCALED:
            # In float16 the first update overflows, and is skipped.
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, backoff_factor=2.0**-24, growth_interval=1)
            self.scaler = fleet.distributed_scaler(scaler)
        self.average = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.7)) if case.averages else None
        data = rows_of(case)
        self.sampler = ElasticSampler(data, batch_size=case.batch, seed=1)
        self.loader = DataLoader(data, batch_size=case.batch, sampler=self.sampler)
        self.losses: list[float] = []
        self.forwards = 0

    def run(self) -> Training:
        """Trains all epochs."""
        for epoch in range(self.case.epochs):
            self.sampler.set_epoch(epoch)
            for x, y in self.sampler.batches(self.loader):
                self.turn(x, y)
        return self

    def turn(self, x: Tensor, y: Tensor) -> float | None:
        """Trains on the batch of one logical worker; returns the loss of the round that it ends."""
        loss = LOOPS[self.case.loop](self, x, y)
        value = fleet.update_loss(loss)
        if value is not None:
            self.losses.append(value)
        self._after_step(value)
        return value

    def _after_step(self, value: float | None) -> None:
        if self.case.schedule == "plateau":
            if value is not None:
                self.scheduler.step(value)
        elif self.scheduler is not None:
            self.scheduler.step()
        if self.average is not None:
            self.average.update_parameters(self.net)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Returns the loss of a batch."""
        self.forwards += 1
        out = self.model(x)
        if not self.case.counts:
            return F.cross_entropy(out, y)
        kept = (y > 3) if int(y.sum()) % 4 else torch.zeros_like(y, dtype=torch.bool)
        return fleet.mean((F.cross_entropy(out, y, reduction="none") * kept).sum(), kept.sum())

    def clip(self) -> None:
        """Clips as a loop does between ``backward()`` and ``step()``."""
        if self.case.clip == "torch":
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), CLIP)
        elif self.case.clip == "torch_value":
            torch.nn.utils.clip_grad_value_(self.net.parameters(), CLIP / 10)
        elif self.case.clip == "by_hand":
            gradients = [p.grad for p in self.net.parameters() if p.grad is not None]
            norm = torch.stack([g.float().norm() for g in gradients]).norm()
            for gradient in gradients:
                gradient.mul_((CLIP / (norm + 1e-6)).clamp(max=1.0).to(gradient.dtype))

    def bits(self) -> dict[str, Tensor]:
        """Returns the bytes of weights, buffers, optimizer state, averages, losses and the next random numbers."""
        state = {
            "weights": self.model.full_state_dict(),
            "optimizer": self.optimizer.full_state_dict(),
            "average": {} if self.average is None else self.average.state_dict(),
            "scheduler": {} if self.scheduler is None else _plain(self.scheduler.state_dict()),
            "losses": self.losses,
            "next draws": [torch.rand(2), float(np.random.random()), random.random()],
        }
        return bits_of(state)


def _zero_last(at: Training, x: Tensor, y: Tensor) -> Tensor:
    loss = at.loss(x, y)
    loss.backward()
    at.clip()
    at.optimizer.step()
    at.optimizer.zero_grad()
    return loss


def _zero_first(at: Training, x: Tensor, y: Tensor) -> Tensor:
    at.optimizer.zero_grad()
    loss = at.loss(x, y)
    loss.backward()
    at.clip()
    at.optimizer.step()
    return loss


def _fleet_eager(at: Training, x: Tensor, y: Tensor) -> Tensor:
    loss = at.loss(x, y)
    loss.backward()
    at.clip()
    at.optimizer.minimize(loss)
    at.model.clear_gradients()
    return loss


def _two_passes(at: Training, x: Tensor, y: Tensor) -> Tensor:
    loss = at.loss(x, y)
    (0.3 * loss).backward(retain_graph=True)
    (0.7 * loss).backward()
    at.clip()
    at.optimizer.step()
    at.optimizer.zero_grad()
    return loss


def _scaled(at: Training, x: Tensor, y: Tensor) -> Tensor:
    loss = at.loss(x, y)
    at.scaler.scale(loss).backward()
    at.scaler.unscale_(at.optimizer)
    at.clip()
    at.scaler.step(at.optimizer)
    at.scaler.update()
    at.optimizer.zero_grad()
    return loss


def _evaluates(at: Training, x: Tensor, y: Tensor) -> Tensor:
    at.model.eval()
    with torch.no_grad():
        at.model(x)
    at.model.train()
    return _zero_last(at, x, y)


LOOPS = {
    "zero_last": _zero_last,
    "zero_first": _zero_first,
    "fleet_eager": _fleet_eager,
    "two_passes": _two_passes,
    "evaluates": _evaluates,
    SCALED: _scaled,
}


def train_all(rank: int, world_size: int, cases: list[Case]) -> list[dict[str, Any]]:
    """Trains one case after the other in this process; returns the bits and forwards of each, or why it is refused."""
    torch.set_num_threads(2 if world_size == 1 else 1)  # the launcher sets one thread above one process alone
    found: list[dict[str, Any]] = []
    for case in cases:
        try:
            training = Training(case).run()
            found.append({"bits": training.bits(), "forwards": training.forwards, "losses": training.losses})
        except FleetError as error:
            found.append({"refused": f"{type(error).__name__}: {error}"})
        except Exception as error:
            raise AssertionError(f"{case}") from error
        end_of_draw()
    return found


# ---- bits ------------------------------------------------------------------------------------------------------------


def bits_of(state: Any, name: str = "") -> dict[str, Tensor]:
    """Returns the bytes of every value in ``state``, by its path."""
    if isinstance(state, Mapping):
        pairs = [(f"{name}/{key}", value) for key, value in state.items()]
    elif isinstance(state, list | tuple):
        pairs = [(f"{name}/{place}", value) for place, value in enumerate(state)]
    elif isinstance(state, Tensor):
        return {name: state.detach().contiguous().reshape(-1).view(torch.uint8).clone()}
    else:
        text = state.hex() if isinstance(state, float) else f"{state!r}"
        return {name: torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)}
    return {path: found for key, value in pairs for path, found in bits_of(value, key).items()}


def differing_bits(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> dict[str, int]:
    """Returns how many bits differ, by name, without those in which none does; -1 where shapes or names differ."""
    found = {}
    for name in sorted({*first, *second}):
        one, other = first.get(name), second.get(name)
        if one is None or other is None or one.shape != other.shape:
            found[name] = -1
        elif not torch.equal(one, other):
            found[name] = int(np.unpackbits(np.bitwise_xor(one.numpy(), other.numpy())).sum())
    return found


def _plain(state: Any) -> Any:
    """Returns a scheduler's state without functions, whose names are their addresses."""
    if isinstance(state, Mapping):
        return {key: _plain(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [_plain(value) for value in state]
    if isinstance(state, lr_scheduler.LRScheduler):
        return _plain(state.state_dict())
    return state if isinstance(state, int | float | str | Tensor | None) else type(state).__name__


# ---- the same updates in torch alone ---------------------------------------------------------------------------------


def plain_torch(case: Case) -> dict[str, Tensor]:
    """Returns the parameters after the same updates in plain torch: the gradients of all batches, added and divided."""
    torch.manual_seed(SEED)
    net = net_of(case)
    optimizer: torch.optim.Optimizer = RULES[case.rule](net.parameters())
    scheduler = SCHEDULES[case.schedule](optimizer) if case.schedule else None
    data = rows_of(case)
    for epoch in range(case.epochs):
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(1 + epoch)).tolist()
        for number in range(ROUNDS):
            for rank in range(case.logical):
                begin = (number * case.logical + rank) * case.batch
                rows = [order[place % len(data)] for place in range(begin, begin + case.batch)]
                F.cross_entropy(net(data.x[rows]), data.y[rows]).backward()
            for p in net.parameters():
                if p.grad is not None:
                    p.grad /= case.logical
            if case.clip == "torch":
                torch.nn.utils.clip_grad_norm_(net.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()
    return {name: p.detach().clone() for name, p in net.named_parameters()}
