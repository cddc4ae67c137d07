"""Export of a model for serving: its dense part as a program of torch, whose inputs include the rows of its tables.

A folder that was exported to has, beside the tables of a save::

    export.json                  which lookups the model makes, and the names of the two files
    dense-xxxxxxxx.pt2           (rows, *inputs) -> the model's output
    ids-xxxxxxxx.pt2             (*inputs) -> the ids of each lookup

``rows`` is a tuple with the output of each embedding, in the order of the calls. ``export.json`` is replaced by one
rename, so that a process that serves the folder sees either the older program or the newer.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import secrets
import threading
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.fx.experimental._config
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map

from fleet.common.plain_files import create, replace_file
from fleet.errors import CheckpointError, ConfigError
from fleet.ps.embeddings.embedding import SparseEmbedding
from fleet.ps.embeddings.served_weight import WatchesWeight
from fleet.ps.publishing.versions import EXPORT
from fleet.ps.serving.batch_sizes import Batches, fixed_leaves, fixing_line, free_of_one, other_sizes, quiet, wrong_size

_FORMAT = 1
_TRACING = threading.Lock()  # torch traces one model at a time in a process, and fails in a second thread


@dataclass(frozen=True)
class RowsInput:
    """One lookup of an exported model, and so one of its inputs.

    Attributes:
        module: the embedding's name in the model.
        table: the table's name.
        dim: columns of a row.
        combiner, num_slots, separate_slots, padding_idx: as for ``fleet.SparseEmbedding``.
        num_embeddings: of an ``nn.Embedding``: ids are below it; ``None`` takes any id.
    """

    module: str
    table: str
    dim: int
    combiner: str = "none"
    num_slots: int = 1
    separate_slots: bool = False
    padding_idx: int | None = None
    num_embeddings: int | None = None

    def shape(self, ids: Tensor, offsets: Tensor | None) -> tuple[Any, ...]:
        """Returns the shape of the embedding's output for ``ids``."""
        if offsets is not None:
            bags = (offsets.shape[0],) if self.num_slots == 1 else (offsets.shape[0] // self.num_slots, self.num_slots)
            return (*bags, self.dim)
        return (*(ids.shape if self.combiner == "none" else ids.shape[:-1]), self.dim)


class _Calls:
    """The calls of a traced model's embeddings, and the rows that answer them."""

    def __init__(self) -> None:
        self.rows: Sequence[Tensor] | None = None  # None: zeros
        self.asked: list[tuple[Tensor, Tensor | None]] = []
        self.lookups: list[RowsInput] = []

    def begin(self, rows: Sequence[Tensor] | None) -> None:
        self.rows = rows
        self.asked = []
        self.lookups = []

    def answer(self, lookup: RowsInput, ids: Tensor, offsets: Tensor | None) -> Tensor:
        self.asked.append((ids, offsets))
        self.lookups.append(lookup)
        if self.rows is None:
            return torch.zeros(lookup.shape(ids, offsets))
        return self.rows[len(self.asked) - 1]


class _Slot(nn.Module):
    """Replaces an embedding in the traced copy of the model."""

    def __init__(self, calls: _Calls, lookup: RowsInput) -> None:
        super().__init__()
        self.calls = calls
        self.lookup = lookup

    def forward(self, ids: Any, offsets: Tensor | None = None, *, show: object = None, click: object = None) -> Tensor:
        """Returns the rows that are an input of the program."""
        if not isinstance(ids, Tensor):
            raise ConfigError(
                f"fleet.ps.export(): {self.lookup.module} is called with a {type(ids).__name__}; a program takes "
                "tensors. Call it with a tensor of ids, or with flat ids and offsets."
            )
        return self.calls.answer(self.lookup, ids, offsets)


class _Part(nn.Module):
    def __init__(self, model: nn.Module, calls: _Calls) -> None:
        super().__init__()
        self.model = model
        self.calls = calls


class _Dense(_Part):
    def forward(self, rows: tuple[Tensor, ...], *inputs: Any) -> Any:
        self.calls.begin(rows)
        return self.model(*inputs)


class _Ids(_Part):
    def forward(self, *inputs: Any) -> tuple[tuple[Tensor, ...], ...]:
        self.calls.begin(None)
        self.model(*inputs)
        return tuple((ids,) if offsets is None else (ids, offsets) for ids, offsets in self.calls.asked)


def export(model: nn.Module, example_inputs: Sequence[Any], folder: str | Path) -> Path:
    """Writes the dense part of ``model`` into ``folder`` as a program that takes the rows of its embeddings as inputs.

    :class:`fleet.ps.Predictor` runs it. The model stays as it is: a copy in evaluation mode is written, with the
    weights that this process has now. Of a model in training, one worker calls it; ``fleet.save_inference_model`` with
    ``example_inputs`` does that and writes the tables beside it.

    Args:
        model: the module, as built or as ``fleet.distributed_model`` returned it; or a part of a model in training,
            such as one tower of two. Every ``fleet.SparseEmbedding`` and ``nn.Embedding(sparse=True)`` in it becomes an
            input.
        example_inputs: a tuple of the arguments of a call: tensors of a batch of 2 or more samples. The program takes
            batches of any size that the model takes.
        folder: where; made when missing.

    Returns:
        The folder.

    Raises:
        ConfigError: the model or the inputs cannot be exported, or not for batches of other sizes; nothing is written,
            and the message says why.
        CheckpointError: the folder cannot be written; a program from before stays.

    Example:
        >>> ads = fleet.SparseEmbedding(4, name="ads", combiner="sum")
        >>> model = torch.nn.Sequential(ads, torch.nn.Linear(4, 1))
        >>> path = fleet.ps.export(model, (torch.tensor([[7, 8], [9, 0]]),), "exported")
        >>> sorted(file.name.split("-")[0] for file in path.iterdir())
        ['dense', 'export.json', 'ids']
    """
    programs, lookups = traced(model, example_inputs)
    target = Path(folder)
    names = {part: f"{part}-{secrets.token_hex(4)}.pt2" for part in programs}
    try:
        target.mkdir(parents=True, exist_ok=True)
        # The programs first, then the file that names them: a reader of the folder never meets half an export.
        for part, program in programs.items():
            with create(target / names[part]) as file:
                torch.export.save(program, file)
        body = json.dumps({**names, "lookups": [asdict(lookup) for lookup in lookups]}, sort_keys=True)
        before = [path for part in programs for path in target.glob(f"{part}-*.pt2") if path.name not in names.values()]
        checksum = zlib.crc32(body.encode())
        replace_file(target / EXPORT, json.dumps({"format": _FORMAT, "crc32": checksum, "export": body}))
    except OSError as error:
        raise CheckpointError(f"fleet.ps.export(): {target} cannot be written: {error}.") from error
    for path in sorted(before, key=os.path.getmtime)[: -len(programs)]:  # one older program may be about to be read
        path.unlink(missing_ok=True)
    return target


def traced(
    model: nn.Module, example_inputs: Sequence[Any]
) -> tuple[dict[str, torch.export.ExportedProgram], list[RowsInput]]:
    """Returns the programs of ``model``, by their part, and its lookups; for the arguments of :func:`export`.

    Raises:
        ConfigError: as :func:`export`.
    """
    inputs = checked_inputs(example_inputs)
    calls = _Calls()
    copied = _without_rows(model, calls)
    rows, lookups = _asked_rows(copied, calls, inputs)
    modules = {"dense": _Dense(copied, calls), "ids": _Ids(copied, calls)}

    def with_rows(batch: tuple[Any, ...]) -> dict[str, tuple[Any, ...]]:
        return {"dense": (_asked_rows(copied, calls, batch)[0], *batch), "ids": batch}

    def takes(batch: tuple[Any, ...]) -> bool:
        try:
            with_rows(batch)
        except Exception:  # of any kind: the model is the user's
            return False
        return True

    with torch.no_grad():
        output = modules["dense"](rows, *inputs)
    others = {samples: with_rows(batch) for samples, batch in other_sizes(inputs, output, takes).items()}
    arguments = {"dense": (rows, *inputs), "ids": inputs}
    programs = {}
    for part, module in modules.items():
        batches = {samples: batch[part] for samples, batch in others.items()}
        programs[part] = _program(part, module, arguments[part], batches, lookups)
    return programs, lookups


def checked_inputs(example_inputs: object) -> tuple[Any, ...]:
    """Returns the example inputs on the CPU; raises :class:`ConfigError` when a program cannot take them."""
    if not isinstance(example_inputs, tuple | list) or not example_inputs:
        raise ConfigError(
            f"fleet.ps.export(example_inputs={type(example_inputs).__name__}) takes a tuple of what the model is "
            "called with, such as (ids, dense)."
        )
    for leaf in tree_leaves(tuple(example_inputs)):
        if not isinstance(leaf, Tensor):
            raise ConfigError(
                f"fleet.ps.export(): an example input is {leaf!r:.100}; a program takes tensors. Lists of ids become a "
                "tensor of flat ids and one of offsets."
            )
        if leaf.ndim and leaf.shape[0] < 2:
            raise ConfigError(
                f"fleet.ps.export(): an example input has the shape {tuple(leaf.shape)}; give 2 samples or more, so "
                "that it shows which size is the batch's."
            )
    detached: tuple[Any, ...] = tree_map(lambda leaf: leaf.detach().cpu(), tuple(example_inputs))
    return detached


def _without_rows(model: nn.Module, calls: _Calls) -> nn.Module:
    """Returns a copy of ``model`` on the CPU, in evaluation mode, with a slot for each embedding with rows."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"fleet.ps.export(model={type(model).__name__}) takes a torch.nn.Module.")
    if isinstance(getattr(type(model), "module", None), property):
        model = cast("nn.Module", model.module)  # distributed_model wraps the module
    slots: dict[int, Any] = {}
    for name, module in model.named_modules():
        if (found := _lookup_of(name, module)) is not None:
            slots[id(module)] = _Slot(calls, found)
    if not slots:
        raise ConfigError(
            "fleet.ps.export(): the model has no fleet.SparseEmbedding and no nn.Embedding(sparse=True), so no rows to "
            "serve. torch.export.export and torch.export.save write a model without them."
        )
    if id(model) in slots:
        model = nn.Sequential(model)
    # deepcopy takes the slots for copies it has already made, so the rows of the embeddings are never copied.
    try:
        copied = copy.deepcopy(model, slots)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"fleet.ps.export(): the model cannot be copied: {error}") from error
    for parameter in copied.parameters():
        parameter.requires_grad_(False)
    return copied.cpu().eval()


def _lookup_of(name: str, module: nn.Module) -> RowsInput | None:
    name = name or "embedding"
    # A part of a trained model has names of its own; the tables keep those of the whole.
    served = module.served_table if isinstance(module, WatchesWeight) else None
    if isinstance(module, SparseEmbedding):
        return RowsInput(
            name, served or module.name or name, module.dim, module.combiner, module.num_slots, module.separate_slots,
            module.padding_idx,
        )  # fmt: skip
    if isinstance(module, nn.Embedding) and module.sparse:
        return RowsInput(name, served or name, module.embedding_dim, num_embeddings=module.num_embeddings)
    return None


def _asked_rows(
    traced: nn.Module, calls: _Calls, inputs: tuple[Any, ...]
) -> tuple[tuple[Tensor, ...], list[RowsInput]]:
    """Returns rows of the right shapes for the example, and the lookups.

    Raises:
        ConfigError: the model makes no lookup, or takes the ids of one from the rows of another.
    """
    # The first run, with rows of zeros, finds the ids and so the shapes of the rows.
    with torch.no_grad():
        calls.begin(None)
        traced(*inputs)
        asked = calls.asked
        lookups = calls.lookups
        shapes = [lookup.shape(ids, offsets) for lookup, (ids, offsets) in zip(lookups, asked, strict=True)]
        # A second run with other rows: ids that differ then depend on rows.
        calls.begin([torch.randn(shape) for shape in shapes])
        traced(*inputs)
    if not asked:
        raise ConfigError("fleet.ps.export(): with these example inputs the model looks up no rows.")
    if not all(torch.equal(one, other) for (one, _), (other, _) in zip(asked, calls.asked, strict=True)):
        raise ConfigError(
            "fleet.ps.export(): the ids of one lookup depend on the rows of another, which one exchange of rows per "
            "prediction cannot serve. Look both up from the inputs."
        )
    return tuple(torch.randn(shape) for shape in shapes), lookups


def _program(
    part: str, module: nn.Module, arguments: tuple[Any, ...], others: Batches, lookups: list[RowsInput]
) -> torch.export.ExportedProgram:
    """Returns a program that gives what ``module`` gives, on batches of ``others`` too.

    Raises:
        ConfigError: torch makes none.
    """
    auto = tree_map(lambda leaf: [torch.export.Dim.AUTO] * leaf.ndim, arguments)
    program = _traced_by_torch(part, module, arguments, auto)
    free_of_one(program, others)
    if (reason := wrong_size(module, program, others)) is None:
        return program
    # The other tracer takes len(x) and int(x.shape[0]) for sizes that vary; it knows less of Python.
    with contextlib.suppress(ConfigError):
        program = _traced_by_torch(part, module, arguments, auto, strict=True)
        free_of_one(program, others)
        if (reason := wrong_size(module, program, others)) is None:
            return program
    some = next(iter(others.values()), None)
    # With sizes that must vary, torch names the line that fixes one.
    varying = tree_map(_varying, arguments, some or arguments)
    line = fixing_line(lambda: _traced_by_torch(part, module, arguments, varying, strict=True))
    fixed = fixed_leaves(program, arguments, some)
    names = [name for name, is_fixed in zip(_names(part, arguments, lookups), fixed, strict=True) if is_fixed]
    reason = re.sub(r"\brows\[(\d+)\]", lambda found: f"(rows of {lookups[int(found[1])].module})", str(reason))
    reason = re.sub(r"\binputs_(\d+)", r"example_inputs[\1]", reason)
    raise ConfigError(f"fleet.ps.export(): {reason}.{_advice(names, line)}")


def _advice(names: list[str], line: str | None) -> str:
    where = (
        f" The example's size is fixed in {', '.join(names)} (a constant of as many values as the example has samples "
        "looks like a part of the batch: give another number of samples)."
    )
    return (
        where * bool(names)
        + f" It is fixed by {line}." * bool(line)
        + " Take sizes from tensors, as in torch.ones_like(ids, dtype=torch.float32), x.new_ones(x.shape[0]) and "
        "torch.arange(x.shape[0]). Compute all samples at once: a Python loop or branch over their number fixes it."
    )


def _varying(leaf: Tensor, other: Tensor) -> list[Any]:
    dims = torch.export.Dim
    if leaf is other:  # the model takes no other size
        return [dims.AUTO if dim else dims.DYNAMIC for dim in range(leaf.ndim)]
    return [dims.AUTO if size == new else dims.DYNAMIC for size, new in zip(leaf.shape, other.shape, strict=True)]


def _names(part: str, arguments: tuple[Any, ...], lookups: list[RowsInput]) -> list[str]:
    """Returns the user's names of the tensors in ``arguments``."""
    rows = [f"the rows of {lookup.module}" for lookup in lookups] if part == "dense" else []
    inputs = arguments[1:] if part == "dense" else arguments
    return rows + [f"example_inputs{keystr(path)}" for path, _ in tree_flatten_with_path(inputs)[0]]


def _traced_by_torch(
    part: str, module: nn.Module, arguments: tuple[Any, ...], dims: Any, *, strict: bool = False
) -> torch.export.ExportedProgram:
    def of_sizes(leaf: Tensor, kinds: list[Any]) -> dict[int, Any]:
        # A size of 1 stays 1: broadcasting over it is traced into the program.
        return {dim: kind for dim, (size, kind) in enumerate(zip(leaf.shape, kinds, strict=True)) if size != 1}

    shapes = tree_map(of_sizes, arguments, dims)
    named = {"rows": shapes[0], "inputs": shapes[1:]} if part == "dense" else {"inputs": shapes}
    # Without this a program refuses batches of 1, and no public setting of torch.export allows them.
    any_size = torch.fx.experimental._config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]
    try:
        with _TRACING, any_size, quiet() if strict else contextlib.nullcontext():
            return torch.export.export(module, arguments, dynamic_shapes=named, strict=strict)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"fleet.ps.export(): torch.export cannot trace the model: {type(error).__name__}: {reason}. A forward that "
            "branches on values of tensors is written with torch.cond or torch.where."
        ) from error
