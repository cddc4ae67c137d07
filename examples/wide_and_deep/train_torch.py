"""Trains wide & deep or DeepFM in one process, in plain torch; ``train_fleet_ps.py`` does it on parameter servers."""

from __future__ import annotations

from functools import partial

import torch
from data import Batch, batches_of, open_data
from evaluation import find_auc
from model import MODELS, HashedEmbedding
from options import make_optimizer, training_options
from report import Report
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM_BUCKETS = 1 << 20


def main() -> None:
    """Trains, and prints after each pass its loss and the AUC on the test samples."""
    parser = training_options(__doc__)
    args = parser.parse_args()
    torch.manual_seed(args.seed)

    data = open_data(args.data)
    train_loader = batches_of(data.train, RandomSampler(data.train), args.batch_size, drop_last=True)
    test_loader = batches_of(data.test, SequentialSampler(data.test), 1024, drop_last=False)

    table = partial(HashedEmbedding, NUM_BUCKETS)
    model = MODELS[args.model](table, data.slots, data.num_dense, args.dim, args.layers).to(DEVICE)
    optimizer = make_optimizer(args, model.parameters())

    report = Report(args)
    for epoch in range(args.epochs):
        train_epoch(model, optimizer, train_loader, report)
        report.end_pass(epoch)
        report.end_test(epoch, find_auc(model, test_loader, DEVICE), report.seconds())


def train_epoch(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Batch], report: Report) -> None:
    """Makes one pass over the training samples of this process."""
    model.train()
    for batch in report.batches(loader):
        ids, dense, labels = (part.to(DEVICE) for part in batch)
        loss = binary_cross_entropy_with_logits(model(ids, dense), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        report.add_batch(loss, len(labels))


if __name__ == "__main__":
    main()
