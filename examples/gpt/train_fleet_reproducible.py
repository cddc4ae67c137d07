"""Trains a small GPT on logical workers: its losses and weights have the same bits on any number of processes."""

from __future__ import annotations

from functools import partial

import torch
from data import batches, open_text
from model import make_gpt, next_token_loss
from options import config_of, positive_int, training_options
from report import Report
from sampling import sample
from schedule import warmup_cosine
from torch.optim.lr_scheduler import LambdaLR

from fleet import fleet


def main() -> None:
    """Trains, and prints the loss on the way and a sample at the end."""
    parser = training_options(__doc__)
    parser.add_argument("--logical-workers", type=positive_int, default=8, help="at least as many as processes")
    args = parser.parse_args()
    strategy = fleet.DistributedStrategy()
    strategy.reproducible = True
    strategy.reproducible_configs = {"logical_workers": args.logical_workers}
    torch.manual_seed(args.seed)
    fleet.init(is_collective=True, strategy=strategy)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = config_of(args)

    model = make_gpt(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr)
    optimizer = fleet.distributed_optimizer(optimizer)
    model = fleet.distributed_model(model)
    scheduler = LambdaLR(optimizer, partial(warmup_cosine, num_steps=args.steps))

    text = open_text(args.data)
    shares = [
        batches(text, args.steps, args.batch_size, args.length, args.seed, rank, args.logical_workers)
        for rank in range(args.logical_workers)
    ]
    report = Report(args, fleet.worker_num(), active=fleet.is_first_worker())
    for update in report.steps(zip(*shares, strict=True)):
        for rank in fleet.elastic.logical_ranks():
            tokens, targets = (rows.to(device) for rows in update[rank])
            loss = next_token_loss(model(tokens), targets)
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            value = fleet.update_loss(loss)
            if value is not None:  # the last batch of an update
                report.add(value)
    state = model.full_state_dict(keep=fleet.is_first_worker())
    if args.sample_bytes and fleet.is_first_worker():
        plain = make_gpt(config)
        plain.load_state_dict(state)
        report.line(sample(plain, args.prompt, args.sample_bytes, args.length, seed=args.seed))


if __name__ == "__main__":
    main()
