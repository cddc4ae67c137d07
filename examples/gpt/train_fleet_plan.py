"""Trains the plain model of ``train_torch.py`` on workers that share its layers: a plan says how they are divided."""

from __future__ import annotations

from functools import partial

import torch
from data import batches, open_text
from model import make_gpt, next_token_loss
from options import config_of, training_options
from report import Report
from sampling import sample
from schedule import warmup_cosine
from torch.optim.lr_scheduler import LambdaLR

from fleet import fleet


def main() -> None:
    """Trains, and prints the loss on the way and a sample at the end."""
    parser = training_options(__doc__)
    parser.add_argument("--strategy", metavar="FILE", required=True, help="YAML file with the mesh")
    args = parser.parse_args()
    strategy = fleet.DistributedStrategy.load(args.strategy)
    fleet.init(is_collective=True, strategy=strategy)
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = config_of(args)

    model = make_gpt(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr)
    optimizer = fleet.distributed_optimizer(optimizer)
    model = fleet.distributed_model(model)
    scheduler = LambdaLR(optimizer, partial(warmup_cosine, num_steps=args.steps))

    share = (fleet.data_rank(), fleet.data_replicas())
    rows = batches(open_text(args.data), args.steps, args.batch_size, args.length, args.seed, *share)
    report = Report(args, fleet.worker_num(), active=fleet.is_first_worker())
    for tokens, targets in report.steps(rows):
        tokens, targets = tokens.to(device), targets.to(device)
        loss = next_token_loss(model(tokens), targets)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        report.add(fleet.log({"loss": loss}, total_steps=args.steps)["loss"])
    if args.sample_bytes:
        report.line(sample(model, args.prompt, args.sample_bytes, args.length, seed=args.seed))


if __name__ == "__main__":
    main()
