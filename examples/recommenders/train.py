"""Trains one of the models on parameter servers, or with --torch in plain torch in one process.

python -m fleet.launch --server_num=1 --worker_num=2 examples/recommenders/train.py --model din --mode sync
python examples/recommenders/train.py --model din --torch
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from evaluation import evaluate
from feeds import Feed, check_data, held_out, inputs_of, moved
from models import MODELS
from models.parts import Vectors
from options import make_optimizer, parse_options, read_settings
from report import Report
from sources import open_data
from tables import Tables

from fleet import fleet, ps

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHOP = "simulated:users=4000,items=3000,days=5,impressions=300000"


def main() -> None:
    """Runs this process's part."""
    args = parse_options(__doc__)
    settings = read_settings(args)
    if args.torch:
        train_alone(args, settings)
    else:
        train_on_servers(args, settings)


def train_on_servers(args: argparse.Namespace, settings: dict[str, Any]) -> None:
    """Serves the rows, or trains; the first worker prints."""
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = args.mode in ("async", "geo")
    if args.mode == "async":
        strategy.a_sync_configs = {"max_staleness": settings["max_staleness"]}
    if args.mode == "geo":
        strategy.a_sync_configs = {"k_steps": settings["k_steps"]}
    if args.mode == "hybrid":  # the network stays with the workers, who average its gradients; rows as in sync
        strategy.hybrid_configs = {"dp_degree": fleet.PaddleCloudRoleMaker(is_collective=False).worker_num()}
    fleet.init(strategy=strategy)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    folder = open_shop(args.data)
    net = make_net(args, settings, folder).to(DEVICE)
    optimizer = fleet.distributed_optimizer(make_optimizer(settings["optimizer"], net), strategy)
    model = fleet.distributed_model(net)
    fleet.init_worker()
    feed = make_feed(args, settings, folder, net, None)
    report = Report(args, active=fleet.is_first_worker(), total=fleet.util.all_reduce)
    batches = fleet.prefetch(feed)
    for epoch in range(settings["epochs"]):
        feed.begin(epoch)
        net.train()
        for batch in batches:
            batch = moved(batch, DEVICE)
            loss = net.loss(model(batch), batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            report.add(loss.item())
        report.end_pass(epoch)
        fleet.barrier_worker()
        if settings["shrink"]:
            fleet.shrink()
    report.end(evaluate(net, folder, DEVICE))
    if args.save:
        save(net, folder, Path(args.save))
    fleet.stop_worker()


def train_alone(args: argparse.Namespace, settings: dict[str, Any]) -> None:
    """Trains in plain torch: each step takes the batches that the workers of a job would have.

    Their losses are averaged, and added for geo: there all that each worker has learned reaches the servers over time.
    """
    folder = open_shop(args.data)
    net = make_net(args, settings, folder).to(DEVICE)
    optimizer = make_optimizer(settings["optimizer"], net)
    feeds = [make_feed(args, settings, folder, net, (number, args.workers)) for number in range(args.workers)]
    report = Report(args)
    share = 1.0 if args.mode == "geo" else 1 / args.workers
    for epoch in range(settings["epochs"]):
        for feed in feeds:
            feed.begin(epoch)
        net.train()
        for batches in zip(*feeds, strict=True):
            there = [moved(batch, DEVICE) for batch in batches]
            loss = torch.stack([net.loss(net(batch), batch) for batch in there]).sum()
            (share * loss).backward()
            optimizer.step()
            optimizer.zero_grad()
            report.add(loss.item() / len(there))
        report.end_pass(epoch)
    fleet.init(is_collective=True)  # fleet.metrics takes the workers of a job: here, this process
    report.end(evaluate(net, folder, DEVICE))


def open_shop(given: str | None) -> Path:
    """Returns the folder of the data; without one, a small shop is simulated, once."""
    try:
        return open_data(SHOP if given is None else given)
    except OSError as error:
        raise SystemExit(f"--data {given!r} cannot be read: {error}.") from None
    except ValueError as error:
        raise SystemExit(str(error)) from None


def make_net(args: argparse.Namespace, settings: dict[str, Any], folder: Path) -> Any:
    """Returns the model, with the same weights in every process; ends the script where the data does not suit it."""
    torch.manual_seed(args.seed)
    tables = Tables(settings["tables"], local=args.torch)
    net = MODELS[args.model](tables, **settings["model"])
    tables.check()
    try:
        check_data(args.model, net, folder)
    except ValueError as error:
        raise SystemExit(f"--data {args.data or SHOP}: {error}") from None
    return net


def make_feed(
    args: argparse.Namespace, settings: dict[str, Any], folder: Path, net: Any, share: tuple[int, int] | None
) -> Feed:
    """Returns the batches of this worker, or of worker ``share``."""
    made = (args.model, folder, inputs_of(net), settings["sampling"], settings["batch_size"], args.seed)
    return Feed(*made, args.max_batches, share)


def save(net: Any, folder: Path, target: Path) -> None:
    """Writes the tables and the program; of a model that ranks all items, one for users and one for items."""
    batch = next(iter(held_out(folder, inputs_of(net))))

    def example(part: Any) -> tuple[dict[str, torch.Tensor]]:
        return ({name: batch[name] for name in part.INPUTS},)

    if hasattr(net, "INPUTS"):
        fleet.save_inference_model(dirname=str(target), example_inputs=example(net))
        return
    fleet.save_inference_model(dirname=str(target))
    if fleet.is_first_worker():
        for side in ("user", "item"):
            part = Vectors(net, side)
            ps.export(part, example(part), target / side)


if __name__ == "__main__":
    main()
