"""The command line that all training scripts of this example share."""

from __future__ import annotations

import argparse
from dataclasses import fields

from model import GptConfig


def positive_int(text: str) -> int:
    """Returns ``text`` as an integer of at least 1; argparse turns the error into a usage message."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is below 1")
    return value


def training_options(description: str | None) -> argparse.ArgumentParser:
    """Returns the parser of the shared options."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--data", default="python", help="'python', the language's reference, or a folder of text files")
    add("--steps", type=positive_int, default=200, help="updates")
    add("--batch-size", type=positive_int, default=16, help="rows of a step, over all workers")
    add("--length", type=positive_int, default=64, help="bytes of a row")
    add("--hidden", type=positive_int, default=128, help="values of a token between blocks")
    add("--layers", type=positive_int, default=4, help="blocks")
    add("--heads", type=positive_int, default=4, help="query heads")
    add("--kv-heads", type=positive_int, default=2, help="key and value heads")
    add("--positions", choices=("rotary", "learned"), default="rotary", help="how a token knows its place")
    add("--norm", choices=("rms", "layer"), default="rms", help="RMSNorm or LayerNorm")
    add("--activation", choices=("swiglu", "gelu"), default="swiglu", help="of the feed-forward network")
    add("--lr", type=float, default=5e-3, help="highest learning rate; rises for a tenth of the run, then falls")
    add("--seed", type=int, default=0, help="decides the start weights, the rows and the sample")
    add("--log-every", type=positive_int, default=25, help="steps between printed lines")
    add("--prompt", default="The statement", help="what the sample begins with")
    add("--sample-bytes", type=int, default=200, help="length of the sample; 0 prints none")
    add("--history", metavar="FILE", help="write one JSON line per step here, for plot.py")
    return parser


def config_of(args: argparse.Namespace) -> GptConfig:
    """Returns the model that the command line describes."""
    given = {field.name: getattr(args, field.name) for field in fields(GptConfig) if hasattr(args, field.name)}
    return GptConfig(**given)
