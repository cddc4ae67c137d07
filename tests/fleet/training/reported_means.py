"""Losses that public reports found wrong on several workers: their plain means, and fleet.mean in their place.

A script for ``python -m fleet verify``: its arguments are the name of a report and ``plain`` or ``mean``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fleet import fleet

ROWS, TOKENS, SYMBOLS = 4, 12, 16  # rows of a worker in an update
Terms = list[tuple[Tensor, Tensor, float]]  # the sum of a loss, what it counts, and its factor


@dataclass(frozen=True)
class Report:
    """A loop that was reported.

    Attributes:
        source: the report.
        passes: backward passes of an update.
        terms: of the loss.
        divide: what the reported loop makes of a sum, its count and the share of the pass in the update.
    """

    source: str
    passes: int
    terms: Callable[[Tensor, Tensor], Terms]
    divide: Callable[[Tensor, Tensor, float], Tensor]


def masked(losses: Tensor, labels: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor, float]:
    """Returns the term of ``losses`` where ``labels`` count."""
    mask = labels != -100
    return (losses * mask).sum(), mask.sum(), factor


def entropy(out: Tensor, labels: Tensor) -> Tensor:
    """Returns the cross entropy of each token, 0 where none is wanted."""
    return F.cross_entropy(out.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)


def next_tokens(out: Tensor, labels: Tensor) -> Terms:
    """Supervised fine-tuning: the tokens of the answers count."""
    return [masked(entropy(out, labels), labels)]


def policy(out: Tensor, labels: Tensor) -> Terms:
    """A policy gradient with one advantage for each row."""
    advantages = torch.linspace(-1, 1, labels.shape[1]) * (labels.clamp(min=0) - 7)
    return [masked(advantages * entropy(out, labels), labels)]


def policy_near_reference(out: Tensor, labels: Tensor) -> Terms:
    """A policy gradient, and the distance from a reference in the same sum."""
    far = entropy(out, labels)
    return [masked(-(-far).exp() + 0.05 * (far.neg().exp() + far - 1), labels)]


def distilled(out: Tensor, labels: Tensor) -> Terms:
    """The distance of each token's distribution from that of a teacher."""
    teacher = F.one_hot(labels.clamp(min=0), SYMBOLS) * 0.8 + 0.2 / SYMBOLS
    return [masked(F.kl_div(out.log_softmax(-1), teacher, reduction="none").sum(-1), labels)]


def two_heads(out: Tensor, labels: Tensor) -> Terms:
    """The next token, and with it the one after that, which fewer tokens have."""
    later = F.pad(labels[:, 2:], (0, 2), value=-100)
    return [masked(entropy(out, labels), labels), masked(entropy(out, later), later, 0.3)]


REPORTS = {
    "sft": Report("PrimeIntellect-ai/prime-rl#1961", 1, next_tokens, lambda total, count, share: total / count),
    # All rows of a worker are packed into one, whose mean is taken.
    "packed": Report("vllm-project/speculators#942", 1, distilled, lambda total, count, share: total / (count + 1e-5)),
    # The mean over the tokens of a micro-batch, weighted by its share of the rows of the update.
    "rows": Report("verl-project/verl#5641", 4, policy, lambda total, count, share: total / count * share),
    "tokens": Report(
        "huggingface/trl#3231", 1, policy_near_reference, lambda total, count, share: total / count.clamp(min=1)
    ),
    "grpo": Report(
        "allenai/open-instruct#1161",
        4,
        policy_near_reference,
        lambda total, count, share: total / count * share,
    ),
    "teacher": Report("modelscope/ms-swift#10165", 2, distilled, lambda total, count, share: total / count * share),
    "heads": Report("NVIDIA/Megatron-LM#7498", 1, two_heads, lambda total, count, share: total / count * share),
    "accumulated": Report(
        "huggingface/transformers#34191", 2, next_tokens, lambda total, count, share: total / count * share
    ),
}


def dataset() -> TensorDataset:
    """Returns tokens and labels, of which each row has as many as were drawn for it."""
    draws = torch.Generator().manual_seed(3)
    tokens = torch.randint(SYMBOLS, (6 * 2 * ROWS, TOKENS), generator=draws)
    labels = torch.randint(SYMBOLS, tokens.shape, generator=draws)
    lengths = torch.randint(3, TOKENS + 1, (len(tokens), 1), generator=draws)
    return TensorDataset(tokens, labels.masked_fill(torch.arange(TOKENS) >= lengths, -100))


def network() -> nn.Sequential:
    """Returns the model, the same on every worker."""
    torch.manual_seed(2)
    return nn.Sequential(nn.Embedding(SYMBOLS, 8), nn.Tanh(), nn.Linear(8, SYMBOLS))


def train(name: str, form: str) -> Any:
    """Trains as the report says, or with fleet.mean; returns the model."""
    report = REPORTS[name]
    data = dataset()
    sampler: DistributedSampler[Any] = DistributedSampler(data, fleet.worker_num(), fleet.worker_index(), shuffle=False)
    net = network()
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.5))
    model = fleet.distributed_model(net)
    loader = DataLoader(data, batch_size=ROWS // report.passes, sampler=sampler)
    for number, (x, y) in enumerate(loader, 1):
        terms = report.terms(model(x), y)
        if form == "plain":
            means = [factor * report.divide(total, count, 1 / report.passes) for total, count, factor in terms]
        else:
            means = [factor * fleet.mean(total, count) for total, count, factor in terms]
        sum(means[1:], means[0]).backward()
        if number % report.passes == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model


if __name__ == "__main__":
    fleet.init(is_collective=True)
    train(*sys.argv[1:])
