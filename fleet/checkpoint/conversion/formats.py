"""The formats of checkpoints: each is one module of :mod:`fleet.checkpoint.readers`, and is found there.

[Note: A format]
A module of ``readers`` has ``FORMAT``, a call of :class:`Format` with literals, and the functions ``recognises(path)``
and ``open_state(path, asked)``. If ``FORMAT.to`` is set it also has ``write_state(state, target)``, which takes the
size of a file as well if ``FORMAT.shard_bytes`` is set. ``FORMAT`` is read from the source without an import, so that
``--help`` lists the formats without torch; a module is imported when its format is tried. The first format by
``order`` that recognises a source reads it.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleet.checkpoint import readers
from fleet.errors import CheckpointError

if TYPE_CHECKING:
    from fleet.checkpoint.conversion.whole_state import WholeState


@dataclass(frozen=True)
class Format:
    """The declared data of a format.

    Attributes:
        order: formats of a lower order are tried first.
        title: its name in ``--help``, in the plural; empty where the format is only refused.
        mark: the file that every folder of the format has, if there is such a file.
        folder: how an error describes its folders, after "a folder with".
        file: how an error describes its files.
        to: its name for ``--to``; empty where it is not written.
        suffixes: of targets that are written in this format without ``--to``.
        has_numbers: whether its optimizers may have numbers for their parameters.
        renames: whether ``open_state`` applies the names of ``asked`` itself.
        is_bare: whether a target holds the tensors of one entry and nothing else.
        shard_bytes: size of a target's files unless the user gives another; 0 where a target is never divided.
        commits: whether ``write_state`` takes remote addresses, and leaves nothing behind when it fails.
        module: the module that has it.
    """

    order: int
    title: str = ""
    mark: str = ""
    folder: str = ""
    file: str = ""
    to: str = ""
    suffixes: tuple[str, ...] = ()
    has_numbers: bool = False
    renames: bool = False
    is_bare: bool = False
    shard_bytes: int = 0
    commits: bool = False
    module: str = ""

    def load(self) -> Any:
        """Returns the module, imported."""
        return import_module(self.module)


@dataclass(frozen=True)
class Asked:
    """The user's choices for a source.

    Attributes:
        key: the entry for the tensors of a source without entries; ``None`` for the usual one.
        names: new names of parameters, each with its name in the source.
        in_order: whether the numbers of an optimizer follow the order of the model's parameters.
    """

    key: str | None = None
    names: Mapping[str, str] | None = None
    in_order: bool = False


def known_formats() -> list[Format]:
    """Returns the formats of all modules of ``readers``, in their order; imports none of them."""
    files = [path for folder in readers.__path__ for path in Path(folder).glob("*.py") if path.stem != "__init__"]
    return sorted(map(_declared, files), key=lambda one: (one.order, one.module))


@cache
def _declared(path: Path) -> Format:
    """Returns the ``FORMAT`` that a module declares. Raises TypeError where it declares none."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.Assign) or ast.unparse(node.targets[0]) != "FORMAT":
            continue
        if isinstance(node.value, ast.Call):
            given: dict[str, Any] = {f"{one.arg}": ast.literal_eval(one.value) for one in node.value.keywords}
            return Format(**given, module=f"{readers.__name__}.{path.stem}")
    raise TypeError(f"{path} lacks FORMAT = Format(...), which every module of {readers.__name__} declares.")


def open_state(
    path: str, key: str | None = None, names: Mapping[str, str] | None = None, in_order: bool = False
) -> WholeState:
    """Returns the state in ``path``, in any of the known formats.

    Args:
        path: a file, a folder, or the address of a remote Fleet checkpoint.
        key: the entry to select; the new entry for the tensors of a source without entries.
        names: new names of parameters, each with its name in ``path``.
        in_order: the numbers of a torch optimizer without names follow the order of the model's parameters.

    Raises:
        CheckpointError: it is of none of the formats, which the message lists, is damaged, or does not have ``key`` or
            a tensor of ``names``.
    """
    from fleet.checkpoint.conversion.whole_state import check_key

    if key is not None:
        check_key(key, "--key")
    found = _format_of(path)
    state: WholeState = found.load().open_state(path.removeprefix("file://"), Asked(key, names, in_order))
    if in_order and not (found.has_numbers and "optimizer" in [kind for kind, _ in state.kinds.values()]):
        raise CheckpointError(
            f"--in-order: {path} ({state.kind}) has no optimizer with numbers for parameters. Omit it."
        )
    if not state.is_bare and key is not None:
        state = state.only(key)
    return state if names is None or found.renames else state.renamed(names)


def _format_of(path: str) -> Format:
    local = path.removeprefix("file://")
    if not local:
        raise CheckpointError(f"{path!r} names nothing. Name a file, a folder, or the address of a remote checkpoint.")
    formats = known_formats()
    if found := next((one for one in formats if one.load().recognises(local)), None):
        return found
    if not os.path.lexists(local):
        raise CheckpointError(f"{path} does not exist.")
    folders = [one.folder for one in formats if one.folder]
    looked_for = [f"a folder with {', '.join(folders)}", *(one.file for one in formats if one.file)]
    raise CheckpointError(
        f"{path} is no checkpoint that is known here. Looked for: {'; '.join(looked_for)}.{_nearby(local, formats)}"
    )


def _nearby(path: str, formats: list[Format]) -> str:
    """Returns a hint where a folder above the checkpoint was named."""
    if not os.path.isdir(path):
        return ""
    marks = [one.mark for one in formats if one.mark]
    inner = sorted(one.name for one in Path(path).iterdir() if any((one / mark).is_file() for mark in marks))
    return f" Did you mean {Path(path) / inner[-1]}?" if inner else ""
