"""samples-seen-twice: the last worker's range is moved back to be as long as the others', and overlaps with theirs."""

import math

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from fleet import fleet

BATCH = 8


def my_range(total):
    """Returns whole batches for this worker; the last worker starts earlier so that it has as many."""
    length = math.ceil(total / fleet.worker_num() / BATCH) * BATCH
    start = max(0, min(fleet.worker_index() * length, total - length))
    return range(start, min(start + length, total))


def main():
    fleet.init(is_collective=True)
    torch.manual_seed(17)
    words = torch.randint(0, 100, (40, 12))
    data = TensorDataset(words, (words.float().mean(1) > 50).float())
    loader = DataLoader(Subset(data, my_range(len(data))), batch_size=BATCH)
    bag, head = nn.EmbeddingBag(100, 8), nn.Linear(8, 1)
    net = nn.Sequential(bag, head)
    optimizer = fleet.distributed_optimizer(torch.optim.Adagrad(net.parameters(), lr=0.1))
    model = fleet.distributed_model(net)
    for _ in range(2):
        for ids, label in loader:
            loss = nn.functional.binary_cross_entropy_with_logits(model(ids).squeeze(1), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()
