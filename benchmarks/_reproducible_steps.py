"""One worker of ``reproducible_bits.py``: updates of an example's model with ``strategy.reproducible``.

Arguments: ``resnet`` or ``gpt``, the number of updates, the updates between two saves of the bits, a folder.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

from fleet import fleet

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / sys.argv[1])]
from tests.helpers.reproducible_training import bits_of  # noqa: E402

LOGICAL, BATCH = 8, 2
LENGTH = 32


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Rows of bytes, and the bytes that follow them."""

    def __init__(self, text: Tensor) -> None:
        self.text = text

    def __len__(self) -> int:
        return (len(self.text) - 1) // LENGTH

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        row = self.text[place * LENGTH : (place + 1) * LENGTH + 1].long()
        return row[:-1], row[1:]


def resnet() -> tuple[Any, Any, Any, Any]:
    """Returns data, model, optimizer and the loss of a batch as ``examples/resnet`` has them, narrower."""
    from data import open_data
    from model import ResNet
    from options import make_optimizer, parse, training_options

    train, _, names = open_data("digits", 8, 0)
    net = ResNet(18, len(names), stem="small", width=4)
    optimizer = make_optimizer(parse(training_options(None), ["--lr", "0.02"]), net.parameters())
    return train, net, optimizer, cross_entropy


def gpt() -> tuple[Any, Any, Any, Any]:
    """Returns the same of ``examples/gpt``, smaller."""
    from data import open_text
    from model import GptConfig, make_gpt, next_token_loss

    net = make_gpt(GptConfig(hidden=32, layers=2, length=LENGTH))
    return Windows(open_text("python")), net, torch.optim.AdamW(net.parameters(), 5e-3), next_token_loss


def warmup(step: int, num_steps: int) -> float:
    """Returns the factor of the learning rate: it rises for a tenth of the run and then falls."""
    return min((step + 1) / (0.1 * num_steps), 1.1 - step / num_steps)


def save(path: str, model: Any, optimizer: Any, losses: list[float], forwards: int) -> None:
    """Writes the bits, and how many forwards each worker ran."""
    counted = [int(count) for count in fleet.util.all_gather(forwards)]
    state = {"weights": model.state_dict(), "optimizer": optimizer.state_dict(), "losses": losses}
    if fleet.is_first_worker():
        fleet.save({"bits": bits_of(state), "forwards": counted, "loss": losses[-1]}, path)


def main() -> None:
    """Trains; saves every so many updates."""
    name, num, every, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    strategy = fleet.DistributedStrategy()
    strategy.reproducible = True
    strategy.reproducible_configs = {"logical_workers": LOGICAL}
    fleet.init(is_collective=True, strategy=strategy)
    torch.manual_seed(0)
    data, net, optimizer, loss_of = {"resnet": resnet, "gpt": gpt}[name]()
    optimizer = fleet.distributed_optimizer(optimizer)
    model = fleet.distributed_model(net)
    scheduler = LambdaLR(optimizer, partial(warmup, num_steps=num))
    sampler = fleet.elastic.ElasticSampler(data, batch_size=BATCH, seed=1)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    losses: list[float] = []
    forwards = epoch = 0
    while len(losses) < num:
        sampler.set_epoch(epoch)
        epoch += 1
        for x, y in sampler.batches(loader):
            loss = loss_of(model(x), y)
            forwards += 1
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            value = fleet.update_loss(loss)
            if value is None:
                continue
            losses.append(value)
            if len(losses) % every == 0:
                save(f"{folder}/{len(losses)}", model, optimizer, losses, forwards)
            if len(losses) == num:
                break


if __name__ == "__main__":
    main()
