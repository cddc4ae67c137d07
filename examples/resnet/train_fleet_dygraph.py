"""Trains a ResNet on many processes with Fleet: ``train_torch.py`` and a few lines more (run ``diff`` on the two)."""

from __future__ import annotations

from functools import partial

import torch
from data import Sample, open_data
from evaluation import find_hits
from model import ResNet
from options import make_optimizer, parse, training_options
from report import Report
from schedule import warmup_cosine
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler

from fleet import fleet


def main() -> None:
    """Trains, and prints the accuracy on the test images after each epoch and at the end."""
    parser = training_options(__doc__)
    parser.add_argument("--strategy", metavar="FILE", help="YAML file of DistributedStrategy options")
    args = parse(parser)
    strategy = fleet.DistributedStrategy.load(args.strategy) if args.strategy else None
    fleet.init(is_collective=True, strategy=strategy)
    rank, world_size = fleet.worker_index(), fleet.worker_num()
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    train, test, class_names = open_data(args.data, args.image_size, args.seed)
    loading = {"batch_size": args.batch_size, "num_workers": args.num_workers}
    sampler: DistributedSampler[int] = DistributedSampler(train, world_size, rank, seed=args.seed)
    train_loader = DataLoader(train, **loading, drop_last=True, sampler=sampler)
    test_loader = DataLoader(test, **loading, sampler=DistributedSampler(test, world_size, rank, shuffle=False))

    model = ResNet(args.depth, len(class_names), stem=args.stem, width=args.width).to(device)
    optimizer = make_optimizer(args, model.parameters())
    optimizer = fleet.distributed_optimizer(optimizer)
    model = fleet.distributed_model(model)

    report = Report(args, active=fleet.is_first_worker())
    num_steps = args.epochs * report.num_batches(train_loader)
    scheduler = LambdaLR(optimizer, partial(warmup_cosine, num_steps=num_steps))
    accuracy = 0.0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        train_epoch(epoch, model, optimizer, scheduler, train_loader, device, report)
        hits = find_hits(model, test_loader, device)[: len(range(rank, len(test), world_size))]
        accuracy = fleet.metrics.acc(hits.sum(), hits.size)
        sums = fleet.util.all_reduce(report.sums)
        report.end_epoch(sums, accuracy, optimizer.param_groups[0]["lr"])
        fleet.log({"loss": sums[0] / sums[3], "test_acc1": accuracy}, total_steps=num_steps)
    report.line(f"Test accuracy: {accuracy:.5f} on {len(test)} images")


def train_epoch(
    epoch: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: LambdaLR,
    loader: DataLoader[Sample],
    device: torch.device,
    report: Report,
) -> None:
    """Makes one pass over the training images of this process."""
    model.train()
    for batch, (images, labels) in report.batches(loader, epoch):
        images, labels = images.to(device), labels.to(device)
        logits = model(images)
        loss = cross_entropy(logits, labels)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        report.add_batch(batch, loss, logits, labels)


if __name__ == "__main__":
    main()
