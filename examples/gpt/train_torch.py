"""Trains a small GPT in one process, in plain torch. ``train_fleet_hybrid.py`` is the same on a mesh of processes."""

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


def main() -> None:
    """Trains, and prints the loss on the way and a sample at the end."""
    parser = training_options(__doc__)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = config_of(args)

    model = make_gpt(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr)
    scheduler = LambdaLR(optimizer, partial(warmup_cosine, num_steps=args.steps))

    rows = batches(open_text(args.data), args.steps, args.batch_size, args.length, args.seed)
    report = Report(args)
    for tokens, targets in report.steps(rows):
        tokens, targets = tokens.to(device), targets.to(device)
        loss = next_token_loss(model(tokens), targets)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        report.add(loss.item())
    if args.sample_bytes:
        report.line(sample(model, args.prompt, args.sample_bytes, args.length, seed=args.seed))


if __name__ == "__main__":
    main()
