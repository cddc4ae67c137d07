"""The MultiSlot text form: parses lines into samples and formats samples as lines.

A line is one sample. For each slot, in the order of ``use_var``, it holds the number of values and then the values,
separated by spaces::

    3 1926 8 17 1 1          slots words (3 ids) and label (1 id)

With ``parse_ins_id`` the line begins with ``1 ID``; with ``parse_content``, ``1 CONTENT`` follows; neither contains
spaces. Runs of spaces and tabs count as one; a line may end in CR LF. Ids are integers from -2**63 to 2**64 - 1,
stored in 64 bits, so 2**64 - 1 reads as -1. Floats are decimals, ``nan`` or ``inf``, rounded to float64 and then to
float32. Zeros are ordinary values.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fleet.dataset.samples import Column, Ints, Samples, empty_samples
from fleet.dataset.slots import Slot
from fleet.errors import ConfigError, FleetError
from fleet.ps.table.kernels.numba_cache import load_kernels

_COUNT = re.compile(rb"[+-]?[0-9]{1,18}")
_INT = re.compile(rb"[+-]?[0-9]+")
_FLOAT = re.compile(rb"[+-]?(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?|nan|inf|infinity)", re.IGNORECASE)
_TEXT_KIND, _INT_KIND, _FLOAT_KIND = 0, 1, 2  # as in the kernels
_DTYPES = (np.dtype(np.uint8), np.dtype(np.int64), np.dtype(np.float32))
_FLOAT32_MAX = float(np.finfo(np.float32).max)
_SHOWN = 40


@dataclass(frozen=True)
class TextForm:
    """The format of a line: sample id and content where requested, then the slots in order.

    ``whole_batches`` is Fleet's ``input_type=1``: a line is a batch, and a slot holds its rows one after another.
    """

    slots: tuple[Slot, ...]
    parse_ins_id: bool = False
    parse_content: bool = False
    whole_batches: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the fields of a line, in order."""
        return (*["ins_id"] * self.parse_ins_id, *["content"] * self.parse_content, *(slot.name for slot in self.slots))

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """Kind of each field: 0 text, 1 integers, 2 floats."""
        texts = [_TEXT_KIND] * self.first_slot
        return (*texts, *(_FLOAT_KIND if slot.is_float else _INT_KIND for slot in self.slots))

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """How many values each field must have; 0 for any number."""
        return (*[0] * self.first_slot, *(slot.width for slot in self.slots))

    @property
    def dtypes(self) -> tuple[np.dtype[Any], ...]:
        """Dtypes of the columns."""
        return tuple(_DTYPES[kind] for kind in self.kinds)

    @property
    def first_slot(self) -> int:
        """Index of the column of the first slot."""
        return self.parse_ins_id + self.parse_content


def parse(data: bytes, form: TextForm, name: str, first_line: int = 1) -> Samples:
    """Returns the samples in ``data``, whole lines of the file ``name`` that begin at its line ``first_line``.

    Raises:
        ConfigError: a malformed line; the message names file, line and slot. Or numba cannot compile the parser.
    """
    if not data:
        return empty_samples(form.dtypes)
    if data[-1:] != b"\n":  # the kernel looks for the end of a line, never for the end of the data
        data += b"\n"
    return _parse_compiled(data, form, name, first_line)


def _parse_compiled(data: bytes, form: TextForm, name: str, first_line: int) -> Samples:
    kernels = load_kernels("kernels", "fleet.dataset", "datasets")
    parse_block = kernels.parse_block
    text = np.frombuffer(data, np.uint8)
    shape = (data.count(b"\n"), len(form.kinds))
    starts = np.empty(shape, np.int64)
    counts = np.empty(shape, np.int64)
    numbers = np.empty(len(data) // 2 + 1, np.int64)  # a value takes two characters at least, itself and a space
    kinds = np.array(form.kinds, np.int64)
    widths = np.array(form.widths, np.int64)
    room = 1 << 12
    code = 2
    # Few texts have many unusual numbers: the block is parsed again with more room instead of reserving it for all.
    while code == 2:
        hard = np.empty((room, 4), np.int64)
        lines, num_hard, code = parse_block(text, kinds, widths, form.whole_batches, starts, counts, numbers, hard)
        room *= 8
    hard = hard[:num_hard]
    _read_hard(data, form, numbers, hard[hard[:, 3] < lines * len(form.kinds)], name, first_line)
    if code:
        # The plain parser refuses the line with file, line and slot in the message.
        parse_plain(data.split(b"\n", lines + 1)[lines] + b"\n", form, name, first_line + lines)
        raise FleetError(
            f"{name}, line {first_line + lines}: the compiled parser refuses a line that the plain one reads. This is "
            "a mistake in fleet.dataset; please report it with the line."
        )
    columns = []
    for index, dtype in enumerate(form.dtypes):
        offsets = np.zeros(lines + 1, np.int64)
        np.cumsum(counts[:, index], out=offsets[1:])
        is_float = form.kinds[index] == _FLOAT_KIND
        values = np.empty(int(offsets[-1]), np.int32 if is_float else dtype)
        source = text if form.kinds[index] == _TEXT_KIND else numbers
        kernels.copy_runs(source, np.ascontiguousarray(starts[:, index]), offsets, values)
        columns.append(Column(values.view(dtype), offsets))
    return Samples(tuple(columns))


def _read_hard(data: bytes, form: TextForm, numbers: Ints, hard: Ints, name: str, first_line: int) -> None:
    """Parses the numbers that the kernel left to Python."""
    for place, start, stop, at in hard.tolist():
        line, field = divmod(at, len(form.kinds))
        reader = _FieldReader(form, field, f"{name}, line {first_line + line}")
        if form.kinds[field] == _INT_KIND:
            numbers[place] = reader.read_int(data[start:stop])
        else:
            numbers[place] = int(np.float32(reader.read_float(data[start:stop])).view(np.int32))


def parse_plain(data: bytes, form: TextForm, name: str, first_line: int = 1) -> Samples:
    """The same as :func:`parse` in plain Python: the reference for the compiled parser, which also names errors."""
    columns: list[list[Any]] = [[] for _ in form.kinds]
    offsets: list[list[int]] = [[0] for _ in form.kinds]
    lines = data.split(b"\n")
    for number, line in enumerate(lines if lines[-1] else lines[:-1], start=first_line):
        words = line.split()
        at = 0
        for field, kind in enumerate(form.kinds):
            reader = _FieldReader(form, field, f"{name}, line {number}")
            found = words[at + 1 : at + 1 + reader.read_count(words, at)]
            at += 1 + len(found)
            if kind == _TEXT_KIND:
                columns[field].extend(found[0])
            else:
                columns[field].extend(map(reader.read_int if kind == _INT_KIND else reader.read_float, found))
            offsets[field].append(len(columns[field]))
        if at < len(words):
            raise ConfigError(
                f"{name}, line {number}: {len(words) - at} values more than its {len(form.kinds)} fields, beginning "
                f"with {_shown(words[at])}. use_var must name all slots of a line, in order."
            )
    arrays = zip(columns, offsets, form.dtypes, strict=True)
    return Samples(tuple(Column(np.array(each, dtype), np.array(ends, np.int64)) for each, ends, dtype in arrays))


@dataclass(frozen=True)
class _FieldReader:
    """Reads the words of one field of one line; its errors name file, line and slot."""

    form: TextForm
    field: int
    where: str

    def read_count(self, words: Sequence[bytes], at: int) -> int:
        """Returns how many values follow."""
        if at >= len(words):
            raise self._error("the line ends where the number of its values should be", "Each line holds every slot")
        word = words[at]
        if not _COUNT.fullmatch(word):
            raise self._error(f"{_shown(word)} is where the number of its values should be", "Write it before them")
        count = int(word)
        if count < 1:
            raise self._error(f"it has {count} values", "A slot has at least one; pad it in the data generator")
        kind = self.form.kinds[self.field]
        width = self.form.widths[self.field]
        if kind == _TEXT_KIND and count != 1:
            raise self._error(f"it has {count} values", "It must be one word without spaces; write 1 before it")
        if width and (count % width if self.form.whole_batches else count != width):
            rule = f"a multiple of {width}" if self.form.whole_batches else str(width)
            raise self._error(
                f"it has {count} values", f"Its shape requires {rule}; a slot of varying length needs lod_level=1"
            )
        if len(words) - at - 1 < count:
            raise self._error(f"{count} values are announced and {len(words) - at - 1} follow", "The two must be equal")
        return count

    def read_int(self, word: bytes) -> int:
        """Returns the 64 bits of an integer as a signed integer."""
        if not _INT.fullmatch(word):
            raise self._error(f"{_shown(word)} is not an integer", "A slot of decimals needs dtype='float32'")
        # int() refuses thousands of digits with a text of its own; numbers above 64 bits are refused alike below.
        value = int(word) if len(word) < 100 else 1 << 99
        if not -(1 << 63) <= value < 1 << 64:
            raise self._error(f"{_shown(word)} does not fit in 64 bits", "Map such ids to 64 bits in the generator")
        return value - (1 << 64) if value >= 1 << 63 else value

    def read_float(self, word: bytes) -> float:
        """Returns the float32 nearest to a decimal's float64, as a float."""
        if not _FLOAT.fullmatch(word):
            raise self._error(f"{_shown(word)} is not a number", "Write decimals such as 0.5 or 1e-3")
        value = float(word)
        with np.errstate(over="ignore", under="ignore"):
            single = float(np.float32(value))
        if abs(single) > _FLOAT32_MAX and b"i" not in word.lower():
            raise self._error(f"{_shown(word)} is too large for float32", f"The largest is {_FLOAT32_MAX:g}")
        return single

    def _error(self, what: str, rule: str) -> ConfigError:
        name = self.form.names[self.field]
        return ConfigError(
            f"{self.where}: slot {name!r} (field {self.field + 1} of {len(self.form.kinds)}): {what}. {rule}."
        )


def _shown(word: bytes) -> str:
    text = word.decode("utf-8", "replace")
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")


def write_text(samples: Samples, form: TextForm) -> bytes:
    """Returns lines that :func:`parse` reads back as equal samples; float32 has nine digits."""
    lines = []
    for index in range(len(samples)):
        words: list[str] = []
        for column, kind in zip(samples.columns, form.kinds, strict=True):
            values = column.values[column.offsets[index] : column.offsets[index + 1]]
            if kind == _TEXT_KIND:
                words += ["1", values.tobytes().decode("utf-8")]
            else:
                number = "{:.9g}" if kind == _FLOAT_KIND else "{}"
                words += [str(len(values)), *map(number.format, values.tolist())]
        lines.append(" ".join(words) + "\n")
    return "".join(lines).encode()
