"""Predictor: an exported model that takes its rows from a Reader."""

from __future__ import annotations

import json
import logging
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_unflatten

from fleet.errors import CheckpointError, ConfigError
from fleet.ps.files.row_file import open_plain
from fleet.ps.publishing.versions import EXPORT, READ_AHEAD, Version
from fleet.ps.serving.export import RowsInput
from fleet.ps.serving.reader import Reader
from fleet.ps.serving.saved_rows import is_save

_MOST_BYTES = 1 << 26
_TRIES = 20
_LOADING = threading.Lock()  # torch reads one program at a time in a process, and fails in a second thread


@dataclass(frozen=True, slots=True)
class _Program:
    text: bytes
    lookups: tuple[RowsInput, ...]
    dense: Callable[..., Any]
    ids: Callable[..., Any]
    takes: str  # its inputs, for messages


class Predictor:
    """Runs an exported model with the newest rows of ``reader``.

    A call may come from any thread. The rows of one lookup are of one state of the reader; the rows of several tables
    may be of two states that follow each other. While the reader is at a version, by ``version=`` or a brake, the
    program is the one that was marked with it, ``fleet.mark_version(model=...)``, of several the one in a folder of the
    same name as ``folder``; no prediction mixes its rows with newer ones. A version without a program is used with that
    of ``folder``, which is logged. After a release the newest program is taken up. Programs run code: load them from
    folders that you trust.

    Args:
        folder: where :func:`fleet.ps.export` wrote.
        reader: where the rows come from; ``None`` reads the tables that were saved beside the program.

    Raises:
        CheckpointError: the folder has no program, or a damaged one.
        ConfigError: the reader's tables are not those of the model, or ``reader`` is no reader.

    Example:
        >>> predictor = fleet.ps.Predictor("export", fleet.ps.Reader("rows").follow())    # doctest: +SKIP
        >>> probability = torch.sigmoid(predictor(ids, dense))                             # doctest: +SKIP
    """

    def __init__(self, folder: str | Path, reader: Reader | None = None) -> None:
        if reader is not None and not isinstance(reader, Reader):
            raise ConfigError(
                f"fleet.ps.Predictor(reader={reader!r:.100}) takes a fleet.ps.Reader, as in "
                'Predictor("model", fleet.ps.Reader("rows").follow()), or None for the saved rows.'
            )
        self._folder = Path(folder)
        self._refreshing = threading.Lock()
        program = _newest(self._folder)
        if reader is None and not is_save(self._folder):
            raise ConfigError(
                f"fleet.ps.Predictor({str(folder)!r}): there are no tables beside the program. Give it the rows, as in "
                f'Predictor({str(folder)!r}, fleet.ps.Reader("rows").follow()).'
            )
        self.reader = Reader(self._folder) if reader is None else reader
        self._program = self._checked(program)
        self._of_versions: dict[Version, _Program | None] = {}
        self._is_at_version = False

    @property
    def lookups(self) -> tuple[RowsInput, ...]:
        """The lookups of the model, in the order of its calls."""
        return self._program.lookups

    def __call__(self, *inputs: Any) -> Any:
        """Returns the model's output for ``inputs``, which are shaped as the example was, with any number of samples.

        Raises:
            ConfigError: an id is outside an ``nn.Embedding``, or the program cannot take these inputs.
            PSError: the reader's Redis, or one of its servers, does not answer.
        """
        with torch.inference_mode():
            while True:
                version = self.reader.version
                program = self._program_of(version)  # read once: another thread may put a newer one there
                asked = _run(program, program.ids, inputs)
                rows = [self._rows(lookup, *one) for lookup, one in zip(program.lookups, asked, strict=True)]
                if self.reader.version == version:  # otherwise a brake came between two lookups
                    return _run(program, program.dense, inputs, tuple(rows))

    def refresh(self) -> bool:
        """Takes up a newer program from the folder; returns whether there was one. The reader is not refreshed.

        The programs of the newest versions are read as well, so that a brake finds them ready.

        Raises:
            CheckpointError: the newer one is damaged; the older one stays.
            ConfigError: the reader's tables are not those of the newer one; the older one stays.
        """
        with self._refreshing:
            is_newer = _text(self._folder) != self._program.text
            if is_newer:
                self._program = self._checked(_newest(self._folder))
            self._read_ahead()
            return is_newer

    def _read_ahead(self) -> None:
        current = self.reader.version
        with suppress(CheckpointError, ConfigError):  # said when such a version is used
            newest = [version for version in self.reader.versions[-READ_AHEAD:] if version.model]
            kept = {version: self._of_versions[version] for version in self._of_versions if version == current}
            for version in newest:
                known = self._of_versions
                kept[version] = known[version] if version in known else self._read_version(version)
            self._of_versions = kept

    def _program_of(self, version: Version | None) -> _Program:
        if version is None:
            if self._is_at_version:  # released: the newest rows go with the newest program
                self.refresh()
                self._is_at_version = False
            return self._program
        self._is_at_version = True
        programs = self._of_versions
        if version not in programs:
            with self._refreshing:
                programs = self._of_versions
                if version not in programs:
                    programs = self._of_versions = {**programs, version: self._read_version(version)}
        return programs[version] or self._program

    def _read_version(self, version: Version) -> _Program | None:
        folder = self.reader.program_of(version)
        if folder is not None:
            part = folder / self._folder.resolve().name
            source = part if part.is_dir() else folder
            return self._program if _text(source) == self._program.text else self._checked(_newest(source))
        logging.getLogger("FLEET").warning(
            "fleet.ps.Predictor(%r): version %r was marked without a program (model=), so its rows are used with the "
            "program of that folder. Put the program of the version there.", str(self._folder), version.name,
        )  # fmt: skip
        return None

    def _rows(self, lookup: RowsInput, ids: Tensor, offsets: Tensor | None = None) -> Tensor:
        count = lookup.num_embeddings
        if count is not None and ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < count):
            raise ConfigError(f"{lookup.module} has {count} rows; ids range from {int(ids.min())} to {int(ids.max())}.")
        return self.reader.lookup_bags(
            lookup.table, ids, offsets, combiner=lookup.combiner, num_slots=lookup.num_slots,
            separate_slots=lookup.separate_slots, padding_idx=lookup.padding_idx,
        )  # fmt: skip

    def _checked(self, program: _Program) -> _Program:
        tables = self.reader.tables
        for lookup in program.lookups:
            if tables.get(lookup.table, lookup.dim) != lookup.dim:
                raise ConfigError(
                    f"fleet.ps.Predictor: {lookup.module} takes {lookup.dim} columns of table {lookup.table!r}; the "
                    f"reader's rows have {tables[lookup.table]}. The program and the rows are of different models."
                )
        return program


def _newest(folder: Path) -> _Program:
    for _ in range(_TRIES):
        text = _text(folder)
        try:
            return _read(folder, text)
        except CheckpointError:
            if text == _text(folder):  # not because a newer export has removed these files
                raise
    raise CheckpointError(f"{folder}: programs are replaced faster than they can be read.")


def _text(folder: Path) -> bytes:
    path = folder / EXPORT
    if not path.exists():
        raise CheckpointError(
            f"{folder}: no exported program here ({EXPORT} is absent). Write one with fleet.ps.export(), "
            "fleet.save_inference_model(example_inputs=...) or python -m fleet.ps export."
        )
    with open_plain(path) as file:
        return file.read(_MOST_BYTES)


def _read(folder: Path, text: bytes) -> _Program:
    path = folder / EXPORT
    try:
        outer = json.loads(text)
        body = outer["export"]
        if outer["format"] != 1 or zlib.crc32(body.encode()) != outer["crc32"]:
            raise ValueError("a wrong checksum, or another format")
        inner: Mapping[str, Any] = json.loads(body)
        # Fields that a later release has added to the same format are left out.
        names = {field.name for field in fields(RowsInput)}
        lookups = tuple(RowsInput(**{k: v for k, v in one.items() if k in names}) for one in inner["lookups"])
        files = [folder / Path(inner[part]).name for part in ("dense", "ids")]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: not what fleet.ps.export wrote ({error!s:.200}). Export again.") from None
    (dense, _), (ids, takes) = (_loaded(file) for file in files)
    return _Program(text, lookups, dense, ids, takes)


def _loaded(path: Path) -> tuple[Callable[..., Any], str]:
    """Returns a program, and the description of its inputs."""
    with open_plain(path):  # refuses links; torch takes a path alone
        pass
    try:
        with _LOADING:
            exported = torch.export.load(path)
        names = exported.graph_signature.user_inputs
        inputs = [node.meta["val"] for node in exported.graph.nodes if node.op == "placeholder" and node.name in names]
        arguments, _ = tree_unflatten(inputs, exported.call_spec.in_spec)
        return exported.module(), _described(arguments)
    except Exception as error:
        raise CheckpointError(f"{path}: torch cannot read this program: {error!s:.300}. Export again.") from error


def _run(program: _Program, part: Callable[..., Any], inputs: tuple[Any, ...], *rows: Any) -> Any:
    """Returns the output of a part of the program; raises ConfigError where it cannot take the inputs."""
    try:
        return part(*rows, *inputs)
    except (AssertionError, RuntimeError, TypeError, ValueError, IndexError) as error:
        line = str(error).partition("\n")[0]
        reason = "" if "tree spec" in line else f" {line:.200}"  # of tree specs the user knows nothing
        raise ConfigError(
            f"fleet.ps.Predictor: the program cannot take these inputs: {_described(inputs)}. It was exported for "
            f"{program.takes} (another letter, another size) and takes tensors of such shapes and types.{reason}"
        ) from error


def _described(inputs: Sequence[Any]) -> str:
    """Returns types and shapes, a letter for each size that may vary, such as ``int64 [a, 2], float32 [a, 4]``."""
    letters: dict[str, str] = {}

    def size(value: Any) -> str:
        return str(value) if type(value) is int else letters.setdefault(str(value), chr(ord("a") + len(letters) % 26))

    def described(value: Any) -> str:
        if isinstance(value, Tensor):
            return f"{str(value.dtype).removeprefix('torch.')} [{', '.join(map(size, value.shape))}]"
        if isinstance(value, Mapping):
            return f"{{{', '.join(f'{key!r}: {described(one)}' for key, one in value.items())}}}"
        if isinstance(value, tuple | list) and any(isinstance(one, Tensor | Mapping) for one in value):
            return f"{type(value).__name__} of ({', '.join(map(described, value))})"
        return type(value).__name__

    return ", ".join(map(described, inputs)) or "nothing"
