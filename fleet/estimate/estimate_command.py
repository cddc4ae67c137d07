"""``python -m fleet estimate FILE:NAME``: the memory that training a module takes, without taking it."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from fleet.common.command_text import typed
from fleet.common.python_file import object_in
from fleet.errors import ConfigError, OptionWarning, did_you_mean

_ABOUT = """Prints the memory that one worker takes to train a module: parameters, gradients, optimizer state,
activations and communication. The file is imported and NAME is called without arguments, which runs the code in it;
tensors it makes have shapes and no memory."""


def run(argv: Sequence[str]) -> int:
    """Prints the estimate; returns 0, 1 when the strategy is refused, 2 when an argument is wrong."""
    parser = _parser()
    try:
        arguments = parser.parse_args(list(argv))
        batch = _batch(arguments.batch, arguments.dtype)
    except SystemExit as stop:
        return int(stop.code or 0)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    from fleet.estimate.memory import estimate_memory
    from fleet.strategies._declare.strategy_plan import problems

    try:
        strategy = _strategy(arguments.strategy)
        refused = problems(strategy, arguments.world_size)
        if refused:
            print("\n".join(str(error) for error in refused), file=sys.stderr)
            return 1
        estimate_memory(
            object_in(arguments.model),
            batch,
            strategy,
            optimizer=arguments.optimizer,
            world_size=arguments.world_size,
            device=arguments.device,
            file=sys.stdout,
        )
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=typed("estimate"), description=_ABOUT)
    parser.add_argument(
        "model", metavar="FILE:NAME", help="a class or function without arguments that makes the module"
    )
    parser.add_argument(
        "--batch",
        action="append",
        required=True,
        metavar="SIZES",
        help="shape of an input, such as 32,3,224,224; again for each further input",
    )
    parser.add_argument(
        "--dtype", action="append", metavar="DTYPE", help="type of the inputs, or one for each (default: float32)"
    )
    parser.add_argument("--strategy", metavar="FILE", help="strategy as YAML, or as protobuf text (.prototxt)")
    parser.add_argument("--optimizer", default="momentum", help="sgd, momentum, adam or adamw (default: momentum)")
    parser.add_argument("--world-size", type=int, default=2, metavar="N", help="number of workers (default: 2)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where it is to run (default: cpu)")
    return parser


def _batch(shapes: list[str], dtypes: list[str] | None) -> list[Any]:
    """Returns shape and type of each input."""
    import torch

    names = dtypes or ["float32"]
    if len(names) not in (1, len(shapes)):
        raise ConfigError(f"--dtype was given {len(names)} times for {len(shapes)} inputs; once, or once for each.")
    found = []
    for place, text in enumerate(shapes):
        try:
            sizes = tuple(int(size) for size in text.split(","))
        except ValueError:
            sizes = (-1,)
        if min(sizes) < 0:
            raise ConfigError(f"--batch {text!r}: it is the sizes of one input with commas, such as 32,3,224,224.")
        name = names[place if len(names) > 1 else 0]
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            known = [n for n in dir(torch) if isinstance(getattr(torch, n), torch.dtype)]
            raise ConfigError(
                f"--dtype {name!r} is no type of torch, such as float32 or int64.{did_you_mean(name, known)}"
            )
        found.append((sizes, dtype))
    return found


def _strategy(path: str | None) -> Any:
    from fleet.options import DistributedStrategy

    strategy = DistributedStrategy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OptionWarning)  # python -m fleet explain lists them
        if path is not None and path.endswith((".prototxt", ".pbtxt", ".textproto")):
            strategy.load_from_prototxt(path)
        elif path is not None:
            strategy = DistributedStrategy.load(path)
    return strategy
