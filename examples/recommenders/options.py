"""The command line, and the configuration of a model."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from feeds import Sampling
from tables import LocalTable
from torch import nn

import fleet

HERE = Path(__file__).parent
NAMES = ("deepfm", "dcn", "din", "esmm", "mmoe", "dssm", "word2vec", "sasrec")
MODES = ("sync", "async", "geo", "hybrid")
_KEYS = {
    "model",
    "tables",
    "sampling",
    "batch_size",
    "epochs",
    "optimizer",
    "modes",
    "k_steps",
    "max_staleness",
    "shrink",
}
_RULES: dict[str, Callable[..., torch.optim.Optimizer]] = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}


def positive_int(text: str) -> int:
    """Returns ``text`` as an integer of at least 1; argparse turns the error into a usage message."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is below 1")
    return value


def training_options(description: str | None) -> argparse.ArgumentParser:
    """Returns the parser of the options."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", choices=NAMES, required=True, help="which model")
    parser.add_argument("--mode", choices=MODES, default="sync", help="of the servers (default: %(default)s)")
    parser.add_argument("--torch", action="store_true", help="plain torch in this process, without servers")
    parser.add_argument(
        "--workers", type=positive_int, help="with --torch: workers whose batches make one step (default: 2)"
    )
    parser.add_argument("--data", help="what to train on, as sources.py names it (default: a small simulated shop)")
    parser.add_argument("--config", metavar="FILE", help="settings (default: configs/MODEL.yaml)")
    parser.add_argument("--epochs", type=positive_int, help="passes over the data (default: as configured)")
    parser.add_argument("--batch-size", type=positive_int, help="rows per step of a worker (default: as configured)")
    parser.add_argument("--max-batches", type=positive_int, help="end each pass after this many batches")
    parser.add_argument(
        "--seed", type=int, default=0, help="decides the start weights and the order (default: %(default)s)"
    )
    parser.add_argument("--history", metavar="FILE", help="append one JSON line here at the end, for plot.py")
    parser.add_argument("--save", metavar="DIR", help="write tables and program here, for fleet.ps.Predictor")
    return parser


def parse_options(description: str | None, words: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the options of the command line, or of ``words``; what would be ignored ends the program."""
    parser = training_options(description)
    args = parser.parse_args(words)
    if args.workers is not None and not args.torch:
        parser.error("--workers goes with --torch: --worker_num of fleet.launch sets the workers of a job.")
    args.workers = args.workers or 2
    return args


def read_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the settings of the model in its mode.

    ``modes`` of a file overrides its other settings in the mode of that name; the command line overrides both.
    """
    path = Path(args.config) if args.config else HERE / "configs" / f"{args.model}.yaml"
    found = _read_yaml(path)
    settings = {"tables": {}, "sampling": {}, "k_steps": 100, "max_staleness": -1, "shrink": False, **found}
    settings |= settings.pop("modes", {}).get(args.mode, {})
    if unknown := sorted(settings.keys() - _KEYS):
        raise SystemExit(f"{path}: {unknown} are no settings; there are {sorted(_KEYS)}.")
    if args.torch and (args.save or settings["shrink"]):
        raise SystemExit("--torch has no servers: --save and shrink need them.")
    for name in ("epochs", "batch_size"):
        if getattr(args, name) is not None:
            settings[name] = getattr(args, name)
    settings["sampling"] = Sampling(**settings["sampling"])
    return settings


def _read_yaml(path: Path) -> dict[str, Any]:
    rule = "--config takes a YAML file of settings, such as a copy of one in " + str(HERE / "configs")
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SystemExit(f"--config {str(path)!r} cannot be read: {error}. {rule}.") from None
    if not isinstance(found, dict):
        raise SystemExit(f"--config {str(path)!r} holds no settings, but {type(found).__name__}. {rule}.")
    return found


def make_optimizer(settings: Mapping[str, Any], net: nn.Module) -> torch.optim.Optimizer:
    """Returns the optimizer of the settings, with a group for the rows and one for the rest."""
    rule, rate, table_rate = (settings[name] for name in ("name", "lr", "table_lr"))
    tables = [module.weight for module in net.modules() if isinstance(module, fleet.SparseEmbedding | LocalTable)]
    own = {id(weight) for weight in tables}
    rest = [parameter for parameter in net.parameters() if id(parameter) not in own and parameter.requires_grad]
    groups: list[dict[str, Any]] = [{"params": tables, "lr": table_rate}]
    if rest:
        groups.append({"params": rest, "lr": rate})
    return _RULES[rule](groups, lr=rate)
