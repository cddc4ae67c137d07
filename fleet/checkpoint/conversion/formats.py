"""Which program wrote a file or a folder, and the one way to read each as a whole state."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path

from fleet.checkpoint.commit import read_index
from fleet.checkpoint.conversion.torch_tree import state_of_tree
from fleet.checkpoint.conversion.whole_state import WholeState, check_key, fleet_state
from fleet.checkpoint.index import INDEX
from fleet.checkpoint.readers.dcp import METADATA, dcp_state
from fleet.checkpoint.readers.hugging_face import WEIGHTS_INDEX, hugging_face_state
from fleet.checkpoint.readers.torch_file import is_torch_file, torch_state
from fleet.checkpoint.storage import is_remote, open_folder
from fleet.errors import CheckpointError

_NUMBERED = ("a file of torch.save", "a checkpoint of torch.distributed.checkpoint")
_PADDLE_KIND = "a Paddle file"
_LOOKED_FOR = (
    f"a folder with {INDEX} (Fleet), {METADATA} (torch.distributed.checkpoint), {WEIGHTS_INDEX} or one .safetensors "
    "file (Hugging Face); a .safetensors file or the index of several; a file of torch.save; a .pdparams file (Paddle)"
)


def open_state(
    path: str, key: str | None = None, names: Mapping[str, str] | None = None, in_order: bool = False
) -> WholeState:
    """Returns the state in ``path``, of whichever format it is.

    Args:
        path: a file, a folder, or the address of a remote Fleet checkpoint.
        key: of a source with entries, the one to take; of another, the entry that its tensors become.
        names: names of parameters that the state shall have, and what each is called in ``path``.
        in_order: the numbers of a torch optimizer without names follow the order of the model's parameters.

    Raises:
        CheckpointError: it is of none of the formats, which the message lists, is damaged, or does not have ``key`` or
            a tensor of ``names``.
    """
    if key is not None:
        check_key(key, "--key")
    state = _opened(path, key, names, in_order)
    if in_order and (state.kind not in _NUMBERED or "optimizer" not in [kind for kind, _ in state.kinds.values()]):
        raise CheckpointError(
            f"--in-order: {path} ({state.kind}) has no optimizer with numbers for parameters. Omit it."
        )
    if not state.is_bare and key is not None:
        state = state.only(key)
    return state if names is None or state.kind == _PADDLE_KIND else state.renamed(names)


def _opened(path: str, key: str | None, names: Mapping[str, str] | None, in_order: bool) -> WholeState:
    if not path.removeprefix("file://"):
        raise CheckpointError(f"{path!r} names nothing. Name a file, a folder, or the address of a remote checkpoint.")
    local = Path(path.removeprefix("file://"))
    if is_remote(path) or (local / INDEX).is_file():
        folder = open_folder(path)
        return fleet_state(folder, read_index(folder))
    if local.is_dir():
        if (local / METADATA).is_file():
            return dcp_state(local, key, in_order)
        if any(local.glob("[0-9][0-9][0-9]/part-*")):
            raise CheckpointError(
                f"{path} holds tables of Paddle's parameter server. Load them into tables of fleet.ps in a script, by "
                "fleet.checkpoint.load_paddle_table() and paddle_dense()."
            )
        if (local / WEIGHTS_INDEX).is_file() or list(local.glob("*.safetensors")):
            return hugging_face_state(local, key)
    elif local.is_file():
        if local.name.endswith(".safetensors.index.json") or _is_safetensors(local):
            return hugging_face_state(local, key)
        if is_torch_file(local):
            return torch_state(local, key, in_order)
        if _is_cut_off(local):
            raise CheckpointError(
                f"{path} begins as a file of torch.save and was cut off: the list of its parts, which ends such a "
                "file, is missing. Copy it again, or take an earlier one."
            )
        if local.suffix == ".pdparams":
            from fleet.checkpoint.paddle_files.paddle_state import paddle_state

            return state_of_tree(paddle_state(local, names), path, _PADDLE_KIND, key)
        if local.suffix == ".pdopt":
            raise CheckpointError(
                f"{path} holds an optimizer's state, which belongs to the parameters in its .pdparams file. Convert "
                "that one, and load this one in the script by fleet.checkpoint.paddle_optimizer_state()."
            )
    if not os.path.lexists(local):
        raise CheckpointError(f"{path} does not exist.")
    raise CheckpointError(f"{path} is no checkpoint that is known here. Looked for: {_LOOKED_FOR}.{_nearby(local)}")


def _is_safetensors(path: Path) -> bool:
    with open(path, "rb") as file:
        start = file.read(9)
    return path.suffix == ".safetensors" or (len(start) == 9 and start[8:] == b"{" and start[4:8] == bytes(4))


def _is_cut_off(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(4) == b"PK\x03\x04" and not zipfile.is_zipfile(path)


def _nearby(path: Path) -> str:
    """Returns a hint where a folder above the checkpoint was named."""
    if not path.is_dir():
        return ""
    marks = (INDEX, METADATA, WEIGHTS_INDEX)
    inner = sorted(one.name for one in path.iterdir() if any((one / mark).is_file() for mark in marks))
    return f" Did you mean {path / inner[-1]}?" if inner else ""
