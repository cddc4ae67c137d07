"""The command line that both training scripts share, and the optimizers it names."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.nn import Parameter
    from torch.optim import Optimizer

LEARNING_RATES = {"sgd": 0.1, "adagrad": 0.02}


def positive_int(text: str) -> int:
    """Returns ``text`` as an integer of at least 1; argparse turns the error into a usage message."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is below 1")
    return value


def training_options(description: str | None) -> argparse.ArgumentParser:
    """Returns the parser of the shared options."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--data",
        default="flights",
        help="'flights', or a file or folder of files in Criteo's format (default: %(default)s)",
    )
    parser.add_argument(
        "--model", choices=("wide_deep", "deepfm"), default="wide_deep", help="the network (default: %(default)s)"
    )
    parser.add_argument("--dim", type=positive_int, default=10, help="values of an embedding (default: %(default)s)")
    parser.add_argument(
        "--layers",
        type=positive_int,
        nargs="+",
        default=[400, 400, 400],
        metavar="SIZE",
        help="sizes of the hidden layers (default: 400 400 400)",
    )
    parser.add_argument("--epochs", type=positive_int, default=3, help="passes over the data (default: %(default)s)")
    parser.add_argument(
        "--batch-size", type=positive_int, default=256, help="samples per step of each process (default: %(default)s)"
    )
    parser.add_argument(
        "--optimizer", choices=list(LEARNING_RATES), default="sgd", help="update rule (default: %(default)s)"
    )
    parser.add_argument("--lr", type=float, help="learning rate (default: 0.1 with sgd, 0.02 with adagrad)")
    parser.add_argument(
        "--seed", type=int, default=0, help="decides the start weights and the order (default: %(default)s)"
    )
    parser.add_argument("--max-batches", type=positive_int, help="end each pass after this many batches")
    parser.add_argument("--history", metavar="FILE", help="write one JSON line per pass here, for plot.py")
    return parser


def make_optimizer(args: argparse.Namespace, parameters: Iterable[Parameter]) -> Optimizer:
    """Returns the optimizer that ``--optimizer`` names; both update only the rows that a batch has used."""
    import torch

    rate = LEARNING_RATES[args.optimizer] if args.lr is None else args.lr
    if args.optimizer == "sgd":
        return torch.optim.SGD(parameters, rate)
    return torch.optim.Adagrad(parameters, rate)
