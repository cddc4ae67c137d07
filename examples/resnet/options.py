"""The command line that all training scripts of this example share."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from model import STAGES

if TYPE_CHECKING:
    from torch.nn import Parameter
    from torch.optim import Optimizer

# Defaults that suit the data. Digits are 8x8 images: at 16 pixels the deepest feature map is still 2x2, and half the
# published width learns them in about a minute on two CPU cores.
DIGITS_DEFAULTS = {"image_size": 16, "width": 32}
FOLDER_DEFAULTS = {"image_size": 224, "width": 64}
# Up to this size, the published stem, which divides by 4, would leave too little of the image.
LARGEST_SMALL_IMAGE = 64


def positive_int(text: str) -> int:
    """Returns ``text`` as an integer of at least 1; argparse turns the error into a usage message."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is below 1")
    return value


def shown_default(name: str) -> str:
    """Returns the part of the help text that gives the default of ``name``."""
    return f"(default: {DIGITS_DEFAULTS[name]} for digits, {FOLDER_DEFAULTS[name]} as published for a folder)"


def training_options(description: str | None, optimizers: Sequence[str] = ("sgd", "adam")) -> argparse.ArgumentParser:
    """Returns the parser of the shared options; ``optimizers`` are those that the script can train with."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--data",
        default="digits",
        help="'digits', or a folder with one folder of images per class (default: %(default)s)",
    )
    parser.add_argument(
        "--epochs", type=positive_int, default=10, help="passes over the training images (default: %(default)s)"
    )
    parser.add_argument(
        "--batch-size", type=positive_int, default=32, help="images per step of each process (default: %(default)s)"
    )
    parser.add_argument(
        "--depth", type=int, choices=list(STAGES), default=18, help="layers of the network (default: %(default)s)"
    )
    parser.add_argument("--width", type=positive_int, help="channels of the first stage " + shown_default("width"))
    parser.add_argument("--image-size", type=positive_int, help="pixels per side " + shown_default("image_size"))
    parser.add_argument(
        "--lr",
        type=float,
        default=0.1,
        help="highest learning rate; rises for a fifth of the run, then falls (default: %(default)s)",
    )
    parser.add_argument(
        "--optimizer",
        choices=optimizers,
        default="sgd",
        help="update rule; adam takes no --momentum and no --weight-decay (default: %(default)s)",
    )
    parser.add_argument("--momentum", type=float, default=0.9, help="momentum of SGD (default: %(default)s)")
    parser.add_argument(
        "--weight-decay", type=float, default=1e-4, help="L2 decay, coupled, of every parameter (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="decides the split, the start weights and the order (default: %(default)s)"
    )
    parser.add_argument(
        "--num-workers", type=int, default=0, help="processes that decode images, per process (default: %(default)s)"
    )
    parser.add_argument(
        "--log-every", type=positive_int, default=5, help="batches between printed lines (default: %(default)s)"
    )
    parser.add_argument("--max-batches", type=positive_int, help="end each epoch after this many batches")
    parser.add_argument("--history", metavar="FILE", help="write one JSON line per epoch here, for plot.py")
    return parser


def make_optimizer(args: argparse.Namespace, parameters: Iterable[Parameter]) -> Optimizer:
    """Returns the optimizer that ``--optimizer`` names."""
    import torch

    if args.optimizer == "adam":
        return torch.optim.Adam(parameters, args.lr)
    return torch.optim.SGD(parameters, args.lr, args.momentum, weight_decay=args.weight_decay)


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the parsed options, with ``image_size`` and ``width`` for the data and ``stem`` for the image size."""
    args = parser.parse_args(arguments)
    for name, value in (DIGITS_DEFAULTS if args.data == "digits" else FOLDER_DEFAULTS).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.stem = "small" if args.image_size <= LARGEST_SMALL_IMAGE else "imagenet"
    return args
