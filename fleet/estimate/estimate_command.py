"""``python -m fleet estimate``: the memory that training a module takes, without taking it; and servers for tables."""

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
tensors it makes have shapes and no memory. With --table or --tables: what tables of parameter servers take in memory
and on disk, and how many servers a rate needs; a server process is measured on this machine for some seconds."""


def run(argv: Sequence[str]) -> int:
    """Prints the estimate; returns 0, 1 when the strategy is refused, 2 when an argument is wrong."""
    parser = _parser()
    try:
        arguments = parser.parse_args(list(argv))
        if arguments.table or arguments.tables:
            return _run_tables(arguments)
        if arguments.model is None or not arguments.batch:
            raise ConfigError("give FILE:NAME and --batch for the memory of a model, or --table for tables of servers.")
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


def _run_tables(arguments: argparse.Namespace) -> int:
    """Prints what the tables take; returns 0."""
    from fleet.estimate.planned_tables import tables_of
    from fleet.estimate.table_report import Demand, report

    if arguments.model is not None or arguments.batch:
        raise ConfigError("--table is of servers, FILE:NAME and --batch of a worker's model: estimate one at a time.")
    memory = None if arguments.server_memory is None else round(1e9 * arguments.server_memory)
    demand = Demand(
        servers=arguments.servers,
        server_memory=memory,
        server_cores=arguments.server_cores,
        rate=arguments.rate,
        ids_per_sample=arguments.ids_per_sample,
        samples_per_step=arguments.samples_per_step,
    )
    print(report(tables_of(arguments.table or [], arguments.tables), demand))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=typed("estimate"), description=_ABOUT)
    parser.add_argument(
        "model", nargs="?", metavar="FILE:NAME", help="a class or function without arguments that makes the module"
    )
    parser.add_argument(
        "--batch",
        action="append",
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
    _add_flags_of_tables(parser.add_argument_group("tables of parameter servers"))
    return parser


def _add_flags_of_tables(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--table",
        action="append",
        metavar="KEY=VALUE,...",
        help="a table, such as dim=16,rule=adagrad,ids=20e6; repeat it",
    )
    group.add_argument("--tables", metavar="FILE", help="tables by name as YAML, such as ads: {dim: 16, ids: 20e6}")
    group.add_argument("--servers", type=int, metavar="N", help="number of servers (default: as many as it takes)")
    group.add_argument("--server-memory", type=float, metavar="GB", help="memory of a server, in 10^9 bytes")
    group.add_argument("--server-cores", type=int, default=4, metavar="N", help="cores of a server (default: 4)")
    group.add_argument("--rate", type=float, metavar="N", help="samples a second of all workers together")
    group.add_argument("--ids-per-sample", type=float, metavar="N", help="distinct ids of a sample in its batch")
    group.add_argument("--samples-per-step", type=int, default=256, metavar="N", help="a worker's batch (default: 256)")


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
