"""Trains wide & deep or DeepFM on parameter servers with Fleet: ``train_torch.py`` and what roles need."""

from __future__ import annotations

from functools import partial

import torch
from data import Batch, batches_of, open_data
from evaluation import find_auc
from model import MODELS
from options import make_optimizer, training_options
from report import Report
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler

from fleet import fleet
from fleet.ps import Initializer

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NEW_ROWS = Initializer("normal", 0.0, 0.01)


def main() -> None:
    """Serves the rows, or trains; the first worker prints after each pass its loss and the AUC on the test samples."""
    parser = training_options(__doc__)
    parser.add_argument("--mode", choices=("sync", "async", "geo", "hybrid"), default="sync", help="(default: sync)")
    parser.add_argument("--k-steps", type=int, default=100, help="steps between exchanges of geo (default: 100)")
    parser.add_argument("--save", metavar="DIR", help="write the rows and the network here at the end")
    args = parser.parse_args()
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = args.mode in ("async", "geo")
    strategy.a_sync_configs = {"k_steps": args.k_steps if args.mode == "geo" else 0}
    if args.mode == "hybrid":  # the network stays with the workers, who average its gradients; rows as in sync
        strategy.hybrid_configs = {"dp_degree": fleet.PaddleCloudRoleMaker(is_collective=False).worker_num()}
    fleet.init(strategy=strategy)
    if fleet.is_server():  # it needs neither data nor model: the workers say which tables there are
        fleet.init_server()
        fleet.run_server()
        return
    torch.manual_seed(args.seed)

    data = open_data(args.data)
    sampler = DistributedSampler[int](data.train, fleet.worker_num(), fleet.worker_index(), seed=args.seed)
    train_loader = batches_of(data.train, sampler, args.batch_size, drop_last=True)
    test_loader = batches_of(data.test, SequentialSampler(data.test), 1024, drop_last=False)

    table = partial(fleet.SparseEmbedding, padding_idx=0, initializer=NEW_ROWS)
    model = MODELS[args.model](table, data.slots, data.num_dense, args.dim, args.layers).to(DEVICE)
    optimizer = fleet.distributed_optimizer(make_optimizer(args, model.parameters()), strategy)
    model = fleet.distributed_model(model)
    fleet.init_worker()

    report = Report(args, active=fleet.is_first_worker(), log=fleet.log)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        train_epoch(model, optimizer, train_loader, report)
        report.end_pass(epoch)
        fleet.barrier_worker()
        if fleet.is_first_worker():
            report.end_test(epoch, find_auc(model, test_loader, DEVICE), report.seconds())
    if args.save:
        fleet.save_persistables(args.save)
    fleet.stop_worker()


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
