"""``python -m fleet.ps export FOLDER FILE:NAME``: a saved model as a program that takes its rows as inputs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fleet.common.python_file import object_in
from fleet.errors import CheckpointError, ConfigError

_ABOUT = """Writes the dense part of a model as a program of torch.export into FOLDER, beside the tables and the state
that fleet.save_inference_model wrote there; fleet.ps.Predictor runs it. The file is imported and NAME is called without
arguments, which runs the code in it: it returns the model and a tuple of example inputs of 2 samples or more."""
_STATE = "model.pt"


def run(argv: Sequence[str]) -> int:
    """Exports; returns 0, or 2 for a wrong call. Raises FleetError where there is nothing to export."""
    parser = argparse.ArgumentParser(prog="python -m fleet.ps export", description=_ABOUT)
    parser.add_argument("folder", metavar="FOLDER", help="a folder of fleet.save_inference_model")
    parser.add_argument("model", metavar="FILE:NAME", help="a function that returns (model, example_inputs)")
    parser.add_argument(
        "--state", metavar="FILE", help=f"the model's state_dict, as fleet.save wrote it (default: FOLDER/{_STATE})"
    )
    try:
        arguments = parser.parse_args(list(argv))
    except SystemExit as stop:
        return int(stop.code or 0)
    from fleet.ps.serving.export import export

    state = _state(Path(arguments.state or Path(arguments.folder) / _STATE))
    model, example_inputs = _model_and_inputs(arguments.model)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise CheckpointError(f"the state does not fit what {arguments.model} returns: {error}") from None
    export(model, example_inputs, arguments.folder)
    print(f"{arguments.folder}: a program of {len(state)} tensors, from {arguments.model}")
    return 0


def _state(path: Path) -> Any:
    import torch

    from fleet.ps.files.archive import check_archive
    from fleet.ps.files.row_file import open_plain

    with open_plain(path) as file:
        check_archive(file, str(path))
        file.seek(0)
        try:
            return torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:
            raise CheckpointError(f"{path}: torch cannot read this state: {error!s:.300}.") from error


def _model_and_inputs(place: str) -> tuple[Any, Any]:
    from torch import nn

    named = object_in(place)
    pair = named() if callable(named) and not isinstance(named, nn.Module) else named
    if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], nn.Module):
        raise ConfigError(
            f"{place} gave {type(pair).__name__}; it is a function without arguments that returns the model and a "
            "tuple of example inputs."
        )
    return pair
