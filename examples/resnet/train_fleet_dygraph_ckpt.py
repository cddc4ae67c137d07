"""Trains a ResNet with Fleet and survives a crash: after a restart it continues with the next epoch.

The first process of each node writes the checkpoint after every epoch. At the start only rank 0's file counts: every
process continues from it, so a new node needs no file. A run that was killed and restarted gives the same numbers as
an uninterrupted one.
"""

from __future__ import annotations

import os
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
    parser = training_options(__doc__, optimizers=("sgd",))
    parser.add_argument("--checkpoint", metavar="FILE", default="output/resnet.pdparams", help="(default: %(default)s)")
    args = parse(parser)
    fleet.init(is_collective=True)
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
    start_epoch = load_checkpoint(args.checkpoint, model, optimizer)
    optimizer = fleet.distributed_optimizer(optimizer)
    model = fleet.distributed_model(model)  # every rank now has rank 0's parameters and buffers

    report = Report(args, active=fleet.is_first_worker(), resume=start_epoch > 0)
    if start_epoch:
        report.line(f"Resuming after epoch {start_epoch - 1} of {args.checkpoint}")
    steps_per_epoch = report.num_batches(train_loader)
    factor = partial(warmup_cosine, num_steps=args.epochs * steps_per_epoch)
    for group in optimizer.param_groups:
        group["initial_lr"] = args.lr  # a scheduler needs it when it does not start at step 0
    scheduler = LambdaLR(optimizer, factor, last_epoch=start_epoch * steps_per_epoch - 1)
    accuracy = 0.0
    for epoch in range(start_epoch, args.epochs):
        torch.manual_seed(args.seed + epoch)  # the same random shifts, whether the run was interrupted or not
        sampler.set_epoch(epoch)
        train_epoch(epoch, model, optimizer, scheduler, train_loader, device, report)
        hits = find_hits(model, test_loader, device)[: len(range(rank, len(test), world_size))]
        accuracy = fleet.metrics.acc(hits.sum(), hits.size)
        fleet.log(report.end_epoch(fleet.util.all_reduce(report.sums), accuracy, optimizer.param_groups[0]["lr"]))
        save_checkpoint(args.checkpoint, model, optimizer, epoch)
    if start_epoch < args.epochs:
        report.line(f"Test accuracy: {accuracy:.5f} on {len(test)} images")


def train_epoch(
    epoch: int,
    model: fleet.FleetModel,
    optimizer: fleet.FleetOptimizer,
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
        optimizer.minimize(loss)  # Fleet's loop; step() and zero_grad() do the same
        scheduler.step()
        model.clear_gradients()
        report.add_batch(batch, loss, logits, labels)


def load_checkpoint(path: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Restores the model from rank 0's file, and the momentum on every rank; returns the epoch to start with."""
    start_epoch = 0
    if fleet.is_first_worker() and os.path.isfile(path):
        state = fleet.load(path)
        start_epoch = state.pop("epoch") + 1
        settings = optimizer.state_dict()["param_groups"]  # those of the command line, on every rank
        optimizer.load_state_dict({**state.pop("optimizer"), "param_groups": settings})
        model.load_state_dict(state)
    start_epoch = int(fleet.util.all_gather(start_epoch)[0])
    if start_epoch and fleet.worker_num() > 1:
        share_momentum(optimizer)
    return start_epoch


def share_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Gives every rank rank 0's momentum; with different momentum the parameters would diverge."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            momentum = optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
            torch.distributed.broadcast(momentum, src=0)


def save_checkpoint(path: str, model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> None:
    """Writes parameters, buffers, momentum and the number of the finished epoch to one file, as one dictionary."""
    state = {**model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
    if int(fleet.local_rank()) == 0:
        fleet.save(state, path)


if __name__ == "__main__":
    main()
