"""What no table trains: buffers, and parameters that no optimizer moves.

Each worker has its own, and a save has those of worker 0.
"""

from __future__ import annotations

import io
import warnings
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fleet.common.plain_files import replacing
from fleet.errors import CheckpointError, OptionWarning
from fleet.ps.files.archive import check_archive, check_parts
from fleet.ps.files.row_file import open_plain

FILE = "buffers.pt"  # in a save


class Untrained:
    """The buffers of some modules, as far as their ``state_dict`` has them, and the parameters in no table.

    Args:
        models: the users' modules.
        trained: ids of the parameters that tables hold.
    """

    def __init__(self, models: Sequence[nn.Module], trained: set[int]) -> None:
        self._models = models
        self._trained = trained

    def names(self) -> list[str]:
        """Returns the names of the tensors, buffers first."""
        return [name.partition("/")[2] for name in self._tensors()]

    def digest(self) -> int:
        """Returns a number that is the same on workers with the same tensors."""
        found = 0
        for tensor in self._tensors().values():
            found = zlib.crc32(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), found)
        return found

    def write(self, dirname: str) -> None:
        """Writes the tensors into a save, and removes those of an earlier one where there are none."""
        path = Path(dirname) / FILE
        tensors = {name: tensor.cpu() for name, tensor in self._tensors().items()}
        if not tensors:
            path.unlink(missing_ok=True)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            torch.save(tensors, file)

    def read(self, dirname: str, read_file: Callable[[Path, str], bytes | None]) -> dict[str, Tensor]:
        """Returns the tensors of a save; none where it has none.

        Args:
            dirname: the save's folder.
            read_file: returns a file's bytes; where it is absent, it says its second argument and returns ``None``.

        Raises:
            CheckpointError: they are damaged, or those of another model.
        """
        path = Path(dirname) / FILE
        own = self._tensors()
        data = read_file(path, "buffers and frozen parameters stay as they are" if own else "")
        if data is None:
            return {}
        found = read_state_file(f"{path}", data)
        wanted = {name: tensor.shape for name, tensor in own.items()}
        there = {name: value.shape if isinstance(value, Tensor) else None for name, value in found.items()}
        if there != wanted:
            names = {*there, *wanted}
            first = min(str(name) for name in names if there.get(name) is None or there[name] != wanted.get(name))
            both = f"{_shown(there.get(first))} there and {_shown(wanted.get(first))} here"
            raise CheckpointError(
                f"{path}: saved from another model: {first.partition('/')[2]!r} is {both}. Load a save of this "
                "model. Nothing was loaded."
            )
        return found

    @torch.no_grad()
    def assign(self, found: dict[str, Tensor]) -> None:
        """Copies the tensors of a save into those of the models."""
        for name, tensor in self._tensors().items() if found else ():
            tensor.copy_(found[name])

    def _tensors(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for number, model in enumerate(self._models):
            for prefix, module in model.named_modules():
                for name, buffer in module.named_buffers(recurse=False):
                    if name not in module._non_persistent_buffers_set:
                        found[f"{number}/{prefix}.{name}" if prefix else f"{number}/{name}"] = buffer.detach()
        for number, model in enumerate(self._models):
            for name, parameter in model.named_parameters():
                if id(parameter) not in self._trained:
                    found[f"{number}/{name}"] = parameter.detach()
        return found


def warn_unlike(call: str, names: Sequence[str]) -> None:
    """Warns that the workers which save have other values in some of ``names``."""
    shown = "some of " * (len(names) > 1) + ", ".join(names[:4]) + f" and {len(names) - 4} more" * (len(names) > 4)
    warnings.warn(
        f"{call}: the workers have other values in {shown}: on parameter servers each one has its own buffers, such as "
        "the statistics of batch norm, and frozen parameters. The save has worker 0's. To save the mean, give it to "
        "all workers before: buffer.copy_(torch.as_tensor(fleet.all_reduce(buffer.numpy())) / fleet.worker_num()).",
        OptionWarning,
        stacklevel=5,
    )


def read_local_file(path: Path, absent: str, notify: Callable[[str], None]) -> bytes | None:
    """Returns the bytes of the file; where it is absent, it says the consequence and returns ``None``.

    Raises:
        CheckpointError: the file cannot be read.
    """
    try:
        if path.exists():
            with open_plain(path) as file:
                return file.read()
    except OSError as error:
        text = f"{error}" if isinstance(error, CheckpointError) else f"{error}."
        raise CheckpointError(f"{text} Nothing was loaded.") from error
    if absent:
        notify(f"{path} is absent: {absent}")
    return None


def read_state_file(label: str, data: bytes) -> dict[Any, Any]:
    """Returns the dictionary that ``torch.save`` has written; no code of it runs.

    Raises:
        CheckpointError: the data is damaged, or something else.
    """
    try:
        check_archive(io.BytesIO(data), label)
        check_parts(io.BytesIO(data), label)
        state = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
        if not isinstance(state, dict):
            raise CheckpointError(f"{label} is not a state, which is a dictionary.")
    except CheckpointError as error:
        raise CheckpointError(f"{error} Nothing was loaded.") from error
    except Exception as error:
        raise CheckpointError(f"{label} is damaged, or not a state of this package. Nothing was loaded.") from error
    return state


def _shown(shape: torch.Size | None) -> str:
    return "absent" if shape is None else f"of shape {list(shape)}"
