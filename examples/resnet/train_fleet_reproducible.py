"""Trains a ResNet whose losses and weights have the same bits on 1 to 8 workers, also when their number changes.

Eight logical workers train for ever; the processes of the job host them. Started again after a crash, or by an elastic
job with more or fewer workers, the run goes on from its last checkpoint. ``demo_resizes.py`` shows it.
"""

from __future__ import annotations

import hashlib
from argparse import Namespace
from functools import partial
from pathlib import Path

import torch
from data import open_data
from evaluation import find_hits
from model import ResNet
from options import make_optimizer, parse, positive_int, training_options
from report import Report
from schedule import warmup_cosine
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler

from fleet import fleet

CONFIG = Path(__file__).parent / "configs" / "reproducible.yaml"


def parsed() -> Namespace:
    """Returns the options of the command."""
    parser = training_options(__doc__)
    parser.add_argument("--strategy", metavar="FILE", help="YAML file of options (default: configs/reproducible.yaml)")
    parser.add_argument("--checkpoint", metavar="FOLDER", default="output/reproducible", help="(default: %(default)s)")
    parser.add_argument(
        "--save-every", type=positive_int, default=10, help="updates between two checkpoints (default: %(default)s)"
    )
    args = parse(parser)
    if args.max_batches:
        parser.error("--max-batches: this script trains on whole epochs; lower --epochs.")
    return args


def main() -> None:
    """Trains, prints the loss of updates, and at the end the test accuracy and a digest of all bits."""
    args = parsed()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    strategy = fleet.DistributedStrategy.load(args.strategy or str(CONFIG))
    torch.manual_seed(args.seed)
    fleet.init(is_collective=True, strategy=strategy)
    rank, world_size = fleet.worker_index(), fleet.worker_num()

    train, test, class_names = open_data(args.data, args.image_size, args.seed)
    loading = {"batch_size": args.batch_size, "num_workers": args.num_workers}
    sampler = fleet.elastic.ElasticSampler(train, batch_size=args.batch_size, seed=args.seed, drop_last=True)
    train_loader = DataLoader(train, **loading, sampler=sampler)
    test_loader = DataLoader(test, **loading, sampler=DistributedSampler(test, world_size, rank, shuffle=False))

    model = ResNet(args.depth, len(class_names), stem=args.stem, width=args.width).to(device)
    optimizer = fleet.distributed_optimizer(make_optimizer(args, model.parameters()))
    model = fleet.distributed_model(model)

    num_steps = args.epochs * len(train_loader)  # updates, on any number of workers
    scheduler = LambdaLR(optimizer, partial(warmup_cosine, num_steps=num_steps))
    saved = {"data": sampler, "every": args.save_every}
    checkpoint = fleet.elastic.Checkpoint(args.checkpoint, model, optimizer, scheduler, **saved)
    report = Report(args, active=fleet.is_first_worker(), resume=checkpoint.resume())
    for epoch in range(checkpoint.epoch, args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for images, labels in sampler.batches(train_loader):
            images, labels = images.to(device), labels.to(device)
            loss = cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if (value := fleet.update_loss(loss)) is not None:  # the last batch of an update
                report.add_update(checkpoint.step, num_steps, value, world_size)
    checkpoint.save(epoch=args.epochs)
    checkpoint.close()
    hits = find_hits(model, test_loader, device)[: len(range(rank, len(test), world_size))]
    report.line(f"Test accuracy: {fleet.metrics.acc(hits.sum(), hits.size):.5f} on {len(test)} images")
    report.line(f"Weights and optimizer state: {fingerprint(model, optimizer)}")


def fingerprint(model: fleet.FleetModel, optimizer: fleet.FleetOptimizer) -> str:
    """Returns a digest of all bits of parameters, buffers and optimizer state; every worker calls it."""
    digest = hashlib.sha256()
    tensors = list(model.full_state_dict().values())
    states = optimizer.full_state_dict()["state"]
    for place in sorted(states):
        tensors += [value for _, value in sorted(states[place].items())]
    for tensor in tensors:
        digest.update(torch.as_tensor(tensor).cpu().contiguous().view(-1).numpy().tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    main()
