"""The command line that all training scripts of this example share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from model import STAGES

# Digits are 8x8 images: 16 keeps the deepest feature map at 2x2. Photographs use the published size.
DEFAULT_IMAGE_SIZES = {"digits": 16}
PHOTO_SIZE = 224
# Below this size the published stem would leave nothing of the image.
LARGEST_SMALL_IMAGE = 64


def positive_int(text: str) -> int:
    """Returns ``text`` as a whole number of at least 1; argparse turns the error into a usage message."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is below 1")
    return value


def training_options(description: str) -> argparse.ArgumentParser:
    """Returns the parser of the shared options."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", default="digits", help="'digits', or a folder with one folder of images per class")
    parser.add_argument("--epochs", type=positive_int, default=8, help="passes over the training images")
    parser.add_argument("--batch-size", type=positive_int, default=32, help="images per step of each process")
    parser.add_argument("--depth", type=int, choices=list(STAGES), default=18, help="layers of the network")
    parser.add_argument("--width", type=positive_int, default=64, help="channels of the first stage; 64 as published")
    parser.add_argument(
        "--image-size", type=positive_int, help=f"pixels per side; unset: 16 for digits, {PHOTO_SIZE} for a folder"
    )
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate at the start; falls along a cosine")
    parser.add_argument("--momentum", type=float, default=0.9, help="momentum of SGD")
    parser.add_argument("--weight-decay", type=float, default=1e-4, help="L2 decay, coupled, of every parameter")
    parser.add_argument("--seed", type=int, default=0, help="decides the split, the start weights and the order")
    parser.add_argument("--num-workers", type=int, default=0, help="processes that decode images, per process")
    parser.add_argument("--log-every", type=positive_int, default=5, help="print every so many batches")
    parser.add_argument("--max-batches", type=positive_int, help="end each epoch after so many batches; a quick check")
    parser.add_argument("--history", metavar="FILE", help="write one JSON line per epoch here, for plot.py")
    return parser


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the parsed options with ``image_size`` and ``stem`` filled in."""
    args = parser.parse_args(arguments)
    if args.image_size is None:
        args.image_size = DEFAULT_IMAGE_SIZES.get(args.data, PHOTO_SIZE)
    args.stem = "small" if args.image_size <= LARGEST_SMALL_IMAGE else "imagenet"
    return args
