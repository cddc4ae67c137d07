"""FeatureColumn: the values of one feature in a batch; Transform: the base of all transforms."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fleet.errors import ConfigError

NUMBERS = "iuf"  # kinds of dtypes


@dataclass(frozen=True, slots=True)
class Words:
    """Text: the distinct words, as UTF-8, and which of them each value is.

    Attributes:
        words: each once.
        codes: int64, of any shape.
    """

    words: Sequence[bytes]
    codes: NDArray[np.int64]

    @classmethod
    def of(cls, name: str, values: Any) -> Words:
        """Returns an array of text in this form; raises ConfigError where a value is neither text nor bytes."""
        array = np.asarray(values, object)
        known: dict[Any, int] = {}
        codes = np.fromiter((known.setdefault(value, len(known)) for value in array.flat), np.int64, array.size)
        # Each distinct value is looked at once; columns of text repeat few words.
        wrong = next((value for value in known if not isinstance(value, str | bytes)), b"")
        if not isinstance(wrong, str | bytes):
            if not any(isinstance(value, str | bytes) for value in known):
                raise _no_numbers(name, known)
            raise ConfigError(
                f"fleet.features: column {name!r} holds {wrong!r:.80}; a column of text holds str or bytes only. Fill "
                "missing values with a word of their own."
            )
        try:
            words = [value.encode() if isinstance(value, str) else value for value in known]
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"fleet.features: column {name!r} holds {error.object!a:.80}, which is no Unicode text: half of a "
                "surrogate pair has no UTF-8. Give its bytes, or text without it."
            ) from None
        return cls(words, codes.reshape(array.shape))


def _no_numbers(name: str, values: Iterable[object]) -> ConfigError:
    """Returns the error for a column of objects that are no text."""
    odd = [value for value in values if not _is_number(value)]
    if not odd:
        return ConfigError(
            f"fleet.features: column {name!r} holds numbers as Python objects. Give it their dtype, as by "
            "values.astype(np.float32)."
        )
    return ConfigError(
        f"fleet.features: column {name!r} holds {odd[0]!r:.80}, which is no number of 64 bits, and no text. Fill "
        "missing values with a number of their own."
    )


def _is_number(value: object) -> bool:
    if isinstance(value, int | np.integer):
        return -(1 << 63) <= int(value) < 1 << 64
    return isinstance(value, float | np.floating)


@dataclass(frozen=True, slots=True)
class FeatureColumn:
    """One feature.

    Attributes:
        values: numbers [n, ...] or text; of a bag the values of all rows, one after the other.
        ends: int64 [n + 1]: of a bag, where each row begins, and the end; None: one entry of ``values`` a row.
    """

    values: NDArray[Any] | Words
    ends: NDArray[np.int64] | None = None

    @property
    def kind(self) -> str:
        """One of ``"text"``, ``"int"`` and ``"float"``."""
        if isinstance(self.values, Words):
            return "text"
        return "float" if self.values.dtype.kind == "f" else "int"

    @property
    def num_rows(self) -> int:
        """How many rows the batch has by this column."""
        if self.ends is not None:
            return len(self.ends) - 1
        values = self.values.codes if isinstance(self.values, Words) else self.values
        return len(values) if values.ndim else 1


def of_one_width(values: NDArray[Any]) -> NDArray[Any]:
    """Returns numbers as every source gives them alike: floating-point ones as float32, uint64 as the same 64 bits."""
    if values.dtype.kind == "f":
        return values.astype(np.float32, copy=False)
    if values.dtype == np.uint64:
        return np.ascontiguousarray(values).view(np.int64)
    return values


class Transform:
    """The base of transforms: it declares the columns that it reads and the column that it writes.

    Subclasses are frozen dataclasses; their fields are saved.
    """

    takes: ClassVar[tuple[str, ...]] = ("text", "int")  # kinds of columns
    gives: ClassVar[str | None] = "int"  # None: the kind of its input

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the columns that it reads."""
        return (str(getattr(self, "column")),)  # noqa: B009 - a field of the subclasses

    @property
    def output(self) -> str:
        """The name of the column that it writes."""
        out = getattr(self, "out")  # noqa: B009
        return self.inputs[0] if out is None else str(out)

    def apply(self, columns: Sequence[FeatureColumn]) -> FeatureColumn:
        """Returns the output for the inputs, whose kinds were checked."""
        raise NotImplementedError

    def to_fields(self) -> dict[str, Any]:
        """Returns the fields for :meth:`from_fields`, made of JSON's types."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}

    @classmethod
    def from_fields(cls, found: Mapping[str, Any]) -> Transform:
        """Returns the transform that :meth:`to_fields` described; raises ConfigError for another field or value."""
        names = {field.name for field in fields(cls)}  # type: ignore[arg-type]
        if set(found) != names:
            wrong = sorted(set(found) ^ names)
            raise ConfigError(f"fleet.features: a saved {cls.__name__} has or lacks {wrong}: another release wrote it.")
        return cls(**found)

    def _check_names(self) -> None:
        column = getattr(self, "column", "")
        out = getattr(self, "out")  # noqa: B009 - a field of the subclasses
        wrong = [name for name in (column, "" if out is None else out) if not isinstance(name, str)]
        for name in (*wrong, *self.inputs, self.output):
            if not isinstance(name, str) or not name or name.endswith(".offsets"):
                raise ConfigError(
                    f"{self!r:.200}: a column's name is {name!r}; it is text that is not empty and does not end with "
                    "'.offsets', which holds where the rows of a bag begin."
                )


def check_integer(what: str, value: object, least: int, most: int) -> None:
    """Raises ConfigError unless ``value`` is an integer of the range."""
    if type(value) is not int or not least <= value <= most:
        raise ConfigError(f"{what}={value!r}: it is an integer from {least} to {most}.")


def check_number(what: str, value: object) -> None:
    """Raises ConfigError unless ``value`` is a finite number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not -sys.float_info.max <= value <= sys.float_info.max:  # type: ignore[operator]
        raise ConfigError(f"{what}={value!r}: it is a finite number.")
