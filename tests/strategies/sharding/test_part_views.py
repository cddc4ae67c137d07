"""Operations on shards give what they give on the whole, and what is written into views of shards arrives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fleet
from tests.helpers.workers import run_workers
from tests.strategies.sharding.test_sharding import options
from tests.strategies.sharding.test_sharding_states import error_of

SHAPE = (7, 6)  # rows that two workers do not divide evenly


def other() -> Tensor:
    """Returns a plain tensor that every worker has alike."""
    return torch.arange(42.0).view(SHAPE) / 10


READ: dict[str, Callable[[Any], Any]] = {
    "mse_loss": lambda t: F.mse_loss(t, other()),
    "l1_loss": lambda t: F.l1_loss(t, other()),
    "huber_loss": lambda t: F.huber_loss(t, other()),
    "smooth_l1_loss": lambda t: F.smooth_l1_loss(t, other()),
    "soft_margin_loss": lambda t: F.soft_margin_loss(t, torch.sign(other())),
    "binary_cross_entropy": lambda t: F.binary_cross_entropy(torch.sigmoid(t), torch.sigmoid(other())),
    "with_logits": lambda t: F.binary_cross_entropy_with_logits(t, torch.sigmoid(other())),
    "cross_entropy": lambda t: F.cross_entropy(t, torch.arange(7) % 6),
    "conv1d": lambda t: F.conv1d(t[None], torch.ones(2, 7, 3)),
    "cosine_similarity": lambda t: F.cosine_similarity(t.flatten(), other().flatten(), dim=0),
    "einsum": lambda t: torch.einsum("ij,ij->", t, other()),
    "flatten": lambda t: t.flatten(),
    "view": lambda t: t.view(6, 7),
    "mask": lambda t: t[other() > 2],
    "list": lambda t: t[[0, 2]],
    "row": lambda t: t[3],
    "last row": lambda t: t[-1],
    "rows": lambda t: t[2:5],
    "column": lambda t: t[:, 2],
    "of the transposed": lambda t: t.T[:, 3],
    "unbind": lambda t: t.unbind(0)[5],
    "chunk": lambda t: t.chunk(3)[1],
    "split": lambda t: t.split([1, 4, 2])[1],
    "iteration": lambda t: torch.stack([row for row in t]),  # noqa: C416 (the elements of a tensor)
    "quantile": lambda t: t.quantile(0.5),
    "nonzero": lambda t: (t > 0).nonzero().sum(),
    "allclose": lambda t: torch.tensor(torch.allclose(t, t)),
    "unique": lambda t: torch.unique(t),
    "renorm": lambda t: torch.renorm(t, 2, 0, 0.1),
    "kron": lambda t: torch.kron(t, other()),
    "unfold": lambda t: t.unfold(0, 2, 1),
    "dot": lambda t: torch.dot(t.reshape(-1), other().reshape(-1)),
    "parameters_to_vector": lambda t: torch.nn.utils.parameters_to_vector([t]),
    "mean": lambda t: t.mean(),
    "var": lambda t: t.var(0),
    "svd": lambda t: torch.linalg.svdvals(t),
}
WRITE: dict[str, Callable[[Any], Any]] = {
    "row": lambda t: t[0].zero_(),
    "last row": lambda t: t[-1].fill_(3.0),
    "rows": lambda t: t[0:3].mul_(2),
    "steps": lambda t: t[::2].zero_(),
    "assigned rows": lambda t: t.__setitem__(slice(1, 4), 0),
    "assigned tensor": lambda t: t.__setitem__(slice(0, 2), t[3:5].clone()),
    "assigned row": lambda t: t.__setitem__(0, t[1]),
    "assigned element": lambda t: t.__setitem__((1, 2), 4.0),
    "assigned by mask": lambda t: t.__setitem__(other() > 2, 0),
    "assigned by list": lambda t: t.__setitem__([0, 6], 1.0),
    "assigned column": lambda t: t.__setitem__((..., 0), 0),
    "narrow": lambda t: t.narrow(0, 1, 2).mul_(5),
    "split": lambda t: [piece.mul_(n) for n, piece in enumerate(t.split(2))],
    "chunk": lambda t: t.chunk(2)[1].mul_(2),
    "data": lambda t: t.data[1:3].zero_(),
    "detached": lambda t: t.detach()[1:3].mul_(0),
    "column": lambda t: t[:, 1].zero_(),
    "columns": lambda t: t[:, 1:3].mul_(3),
    "element": lambda t: t[1, 2].fill_(4.0),
    "view": lambda t: t.view(7, 3, 2)[1].zero_(),
    "view of a view": lambda t: t[1:5][1].view(-1)[2:4].zero_(),
    "transposed": lambda t: t.T[:, 1].zero_(),
    "with a new dimension": lambda t: t[None][0, 2].zero_(),
    "unbind": lambda t: t.unbind(0)[4].zero_(),
    "iteration": lambda t: [row.mul_(n) for n, row in enumerate(t)],
    "index_fill_": lambda t: t.index_fill_(0, torch.tensor([3, 5]), 0.0),
    "index_add_": lambda t: t.index_add_(0, torch.tensor([3]), torch.ones(1, 6)),
    "index_copy_": lambda t: t.index_copy_(0, torch.tensor([3]), torch.ones(1, 6)),
    "scatter_": lambda t: t.scatter_(0, torch.zeros(1, 6, dtype=torch.long), 5.0),
    "clamp_": lambda t: t[2:6].clamp_(-0.01, 0.01),
    "tril_": lambda t: t.tril_(),
    "renorm_": lambda t: t.renorm_(2, 0, 0.1),
    "foreach": lambda t: torch._foreach_mul_([t[0], t[1]], 2.0),
    "two rows in turn": lambda t: (lambda a, b: (a.zero_(), b.mul_(2)))(t[0], t[1]),
}
MIXED = {"index_add_", "index_copy_", "scatter_", "assigned by mask", "index_fill_"}  # plain tensors meet the shard


def gradient_of(stage: int) -> Any:
    """Returns an exchanged gradient of 7 rows."""
    fleet.init(is_collective=True, strategy=options(2, stage=stage))
    torch.manual_seed(0)
    net = torch.nn.Linear(6, 7)
    fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.1))
    model: Any = fleet.distributed_model(net)
    (model(other()) ** 2).mean().backward()
    return next(iter(model.parameters())).grad


def apart(found: Any, expected: Tensor) -> float:
    """Returns the largest difference of a result, whole or not, from the expected one."""
    whole = found.full_tensor() if hasattr(found, "full_tensor") else found
    assert whole.shape == expected.shape
    return float((whole.double() - expected.double()).abs().max())


def differences(rank: int, world_size: int) -> dict[str, float]:
    """Returns how far each operation is from the same on a plain tensor."""
    found = {}
    part = gradient_of(2)
    start = part.full_tensor().clone()
    for name, read in READ.items():
        found[f"read {name}"] = apart(read(part), read(start.clone()))
    for stage in (2, 3):
        part = gradient_of(stage)
        for name, write in WRITE.items():
            if stage == 3 and name in MIXED:
                continue
            expected = start.clone()
            write(expected)
            with torch.no_grad():
                part.to_local().copy_(start.chunk(2)[rank])
            write(part)
            found[f"stage {stage}, write {name}"] = apart(part, expected)
    return found


def test_operations_on_shards_are_those_on_the_whole() -> None:
    for found in run_workers(differences, 2, backend=None):
        assert len(found) == len(READ) + 2 * len(WRITE) - len(MIXED)
        assert {name: value for name, value in found.items() if not value < 1e-5} == {}


def refused(rank: int, world_size: int) -> list[str]:
    """Returns the errors of what would need the rows of other workers, or would be lost."""
    part = gradient_of(2)
    return [error_of(part.numpy), error_of(part.tolist), error_of(lambda: part.view(-1)[3:9].zero_())]


@pytest.mark.filterwarnings("ignore")
def test_what_cannot_arrive_is_refused() -> None:
    for found in run_workers(refused, 2, backend=None):
        for text in found[:2]:
            assert "of a sharded tensor would need the rows of other workers" in text
        assert "was flattened, and the result was written into" in found[2]
