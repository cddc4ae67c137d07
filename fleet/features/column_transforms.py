"""Transforms of columns: Hash, Cross and Vocabulary make ids; Bucketize, Clip and Log read numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fleet.errors import ConfigError
from fleet.features.column import FeatureColumn, Transform, Words, check_integer, check_number
from fleet.ps.table.kernels.numba_cache import load_kernels

_MOST = 2**63 - 1
_FIRST, _LAST = -(2**63), 2**63 - 1  # of int64


def _mixing() -> Any:
    return load_kernels("mixing", "fleet.features", "feature transforms")


def _hashes(values: NDArray[Any] | Words, seed: int) -> NDArray[np.uint64]:
    """Returns the hash of each value, in their shape."""
    if isinstance(values, Words):
        # Each distinct word is hashed once.
        data = np.frombuffer(b"".join(values.words), np.uint8)
        ends = np.concatenate([[0], np.cumsum([len(word) for word in values.words])]).astype(np.int64)
        of_words = np.empty(len(values.words), np.uint64)
        _mixing().hash_words(data, ends, np.uint64(seed), of_words)
        return of_words[values.codes]
    # Narrow integers are widened with their sign: -1 has one hash, whatever the width of its column.
    keys = np.ascontiguousarray(values).view(np.uint64) if values.dtype.itemsize == 8 else values.astype(np.int64)
    found = np.empty(keys.size, np.uint64)
    _mixing().hash_ids(keys.reshape(-1), np.uint64(seed), found)
    return found.reshape(keys.shape)


def _check_hashing(call: str, num_buckets: int | None, seed: int) -> None:
    if num_buckets is not None:
        check_integer(f"{call}, num_buckets)", num_buckets, 1, _MOST)
    check_integer(f"{call}, seed)", seed, 0, _MOST)


def _ids(hashes: NDArray[np.uint64], num_buckets: int | None) -> NDArray[np.int64]:
    found = np.empty(hashes.size, np.int64)
    _mixing().fold(hashes.reshape(-1), num_buckets or 0, found)
    return found.reshape(hashes.shape)


@dataclass(frozen=True)
class Hash(Transform):
    """The id of a word or an integer: int64, the same in every process, on every machine and in every release.

    A word is hashed as the bytes of its UTF-8, by FNV-1a; both are finalized by SplitMix64. The integer 7 and the word
    "7" have different ids, and ``np.uint64`` above 2^63 those of the same 64 bits.

    Args:
        column: text or integers, or bags of them.
        num_buckets: ids are below it; ``None``: 63 bits, for ``fleet.SparseEmbedding``, which takes any id.
        out: the column to write; ``column`` itself if not given.
        seed: other ids for the same values.

    Raises:
        ConfigError: an argument is out of range.

    Example:
        >>> transforms = fleet.features.Transforms([fleet.features.Hash("site")])
        >>> transforms({"site": ["a.com", "b.com", "a.com"]})["site"].tolist()
        [2797975439799268765, 6315518910520570736, 2797975439799268765]
    """

    column: str
    num_buckets: int | None = None
    out: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        self._check_names()
        _check_hashing(f"Hash({self.column!r}", self.num_buckets, self.seed)

    def apply(self, columns: Sequence[FeatureColumn]) -> FeatureColumn:
        """Returns the ids."""
        (column,) = columns
        return FeatureColumn(_ids(_hashes(column.values, self.seed), self.num_buckets), column.ends)


@dataclass(frozen=True)
class Cross(Transform):
    """The ids of combinations, int64: one for each set of values that the columns have in a row.

    Where columns are bags, every combination of their values counts, the last column running fastest, and the output is
    a bag. The order of the columns matters.

    Args:
        columns: two or more columns of integers or text.
        out: the column to write.
        num_buckets, seed: as for :class:`Hash`.

    Raises:
        ConfigError: fewer than two columns, one of them twice, or a value out of range.
    """

    columns: Sequence[str]
    out: str
    num_buckets: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.columns, str) or len(self.columns) < 2 or len(set(self.columns)) < len(self.columns):
            raise ConfigError(f"Cross(columns={self.columns!r}): a list of two or more names, each once.")
        object.__setattr__(self, "columns", tuple(self.columns))
        self._check_names()
        _check_hashing(f"Cross({list(self.columns)}", self.num_buckets, self.seed)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the columns that it reads."""
        return tuple(self.columns)

    def apply(self, columns: Sequence[FeatureColumn]) -> FeatureColumn:
        """Returns the ids of all combinations."""
        first = columns[0]
        hashes = _hashes(first.values, self.seed)
        ends = first.ends
        for name, column in zip(self.columns[1:], columns[1:], strict=True):
            hashes, ends = self._crossed(hashes, ends, column, name)
        return FeatureColumn(_ids(hashes, self.num_buckets), ends)

    def _crossed(
        self, left: NDArray[np.uint64], left_ends: NDArray[np.int64] | None, column: FeatureColumn, name: str
    ) -> tuple[NDArray[np.uint64], NDArray[np.int64] | None]:
        right = _hashes(column.values, self.seed)
        plain = left_ends is None and column.ends is None
        if plain and left.shape != right.shape:
            raise ConfigError(f"{self!r:.200}: {name!r} has the shape {right.shape}, the ones before it {left.shape}.")
        # One value a row is a bag of one: the kernel crosses bags alone.
        ends = [
            np.arange((values.size if plain else len(values)) + 1) if given is None else given
            for values, given in ((left, left_ends), (right, column.ends))
        ]
        if len(ends[0]) != len(ends[1]) or (not plain and max(left.ndim, right.ndim) > 1):
            raise ConfigError(
                f"{self!r:.200}: {name!r} has {len(ends[1]) - 1} rows, the ones before it {len(ends[0]) - 1}; bags are "
                "crossed with bags and with one value a row."
            )
        counts = np.diff(ends[0]) * np.diff(ends[1])
        found = np.empty(int(counts.sum()), np.uint64)
        _mixing().cross_ids(left.reshape(-1), ends[0], right.reshape(-1), ends[1], found)
        if plain:
            return found.reshape(left.shape), None
        return found, np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def _word(value: Any) -> Any:
    """Returns text and integers in the form in which a vocabulary keeps them."""
    if isinstance(value, np.integer):
        return int(value)
    return value.decode() if isinstance(value, bytes) else value


def _check_words(counts: Counter[Any]) -> None:
    """Raises ConfigError unless the words are all text or all integers."""
    for word, count in counts.items():
        if not isinstance(word, str | int) or isinstance(word, bool):
            raise ConfigError(
                f"Vocabulary.build: {word!r:.80} is {count} of the {counts.total()} values; a vocabulary is of text or "
                "of integers. Leave missing values out, or give them a word of their own, in requests too."
            )
    if len({isinstance(word, str) for word in counts}) > 1:
        raise ConfigError("Vocabulary.build: some values are text and some integers; 7 and '7' are different words.")


@dataclass(frozen=True)
class Vocabulary(Transform):
    """The place of a word or integer in a list, int64; those that are not in it get ``num_oov`` ids behind it.

    Ids are below ``len(words) + num_oov``, as ``nn.Embedding`` takes them.

    Args:
        column: text or integers, or bags of them.
        words: the list, each once: all text or all integers.
        out: the column to write; ``column`` itself if not given.
        num_oov: how many ids unknown values share, by their hash.

    Raises:
        ConfigError: a word twice, words of two kinds, or none.

    Example:
        >>> words = fleet.features.Vocabulary.build(["b", "a", "b", "c"], min_count=1, max_size=2)
        >>> transforms = fleet.features.Transforms([fleet.features.Vocabulary("tag", words)])
        >>> transforms({"tag": ["a", "b", "z"]})["tag"].tolist()
        [1, 0, 2]
    """

    column: str
    words: Sequence[str] | Sequence[int]
    out: str | None = None
    num_oov: int = 1

    def __post_init__(self) -> None:
        self._check_names()
        check_integer(f"Vocabulary({self.column!r}, num_oov)", self.num_oov, 1, _MOST)
        words = () if isinstance(self.words, str) else tuple(self.words)
        kinds = {type(word) for word in words}
        if kinds not in ({str}, {int}) or len(set(words)) < len(words):
            raise ConfigError(
                f"Vocabulary({self.column!r}, words={self.words!r:.80}): a list of text, or of integers, each once."
            )
        if kinds == {int}:
            for word in words:
                check_integer(f"Vocabulary({self.column!r}, words)", word, -_MOST - 1, _MOST)
        object.__setattr__(self, "words", words)

    @staticmethod
    def build(values: Iterable[Any], *, min_count: int = 1, max_size: int | None = None) -> list[Any]:
        """Returns the words of a column, the most frequent first, equally frequent ones in their own order.

        Args:
            values: text or integers; an array, a tensor, or any iterable.
            min_count: rarer ones are left out.
            max_size: of the list at most.

        Raises:
            ConfigError: a value is neither text nor an integer, such as None or not-a-number, or some are text and some
                integers.
        """
        check_integer("Vocabulary.build(min_count)", min_count, 1, _MOST)
        if max_size is not None:
            check_integer("Vocabulary.build(max_size)", max_size, 1, _MOST)
        array: Any = values
        listed = array.reshape(-1).tolist() if hasattr(array, "reshape") else values
        try:
            counts = Counter(map(_word, listed))
        except TypeError:
            raise ConfigError("Vocabulary.build: some values are lists; give the words of all rows in one.") from None
        _check_words(counts)
        ordered = sorted(counts.items(), key=lambda one: (-one[1], one[0]))
        return [word for word, count in ordered if count >= min_count][:max_size]

    @cached_property
    def _places(self) -> dict[bytes, int]:
        return {word.encode(): place for place, word in enumerate(self.words) if isinstance(word, str)}

    @cached_property
    def _sorted(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        words = np.array(self.words, np.int64)
        order = np.argsort(words)
        return order, words[order]

    def apply(self, columns: Sequence[FeatureColumn]) -> FeatureColumn:
        """Returns the places."""
        (column,) = columns
        values = column.values
        is_text = isinstance(self.words[0], str)
        codes = values.codes if isinstance(values, Words) else values
        if not codes.size:  # an empty list has no kind
            return FeatureColumn(np.empty(codes.shape, np.int64), column.ends)
        if is_text != isinstance(values, Words):
            kind = "text" if is_text else "integers"
            raise ConfigError(f"Vocabulary({self.column!r}): its words are {kind}, the column is {column.kind}.")
        unknown = len(self.words) + _ids(_hashes(values, 0), self.num_oov)
        if isinstance(values, Words):
            places = self._places
            found = np.array([places.get(word, -1) for word in values.words], np.int64)[values.codes]
        else:
            order, words = self._sorted
            at = np.minimum(np.searchsorted(words, values), len(words) - 1)
            found = np.where(words[at] == values, order[at], -1)
        return FeatureColumn(np.where(found >= 0, found, unknown), column.ends)


@dataclass(frozen=True)
class Bucketize(Transform):
    """The number of the bucket that a value falls into, int64: how many of the boundaries are not above it.

    As ``torch.bucketize(right=True)`` and ``numpy.searchsorted(side="right")``; not-a-number is in the last bucket.
    Integers are compared as such, exactly above 2^53 too.

    Args:
        column: numbers, or bags of them.
        boundaries: ascending; n boundaries make the buckets 0 to n.
        out: the column to write; ``column`` itself if not given.

    Raises:
        ConfigError: no boundary, or they do not ascend.

    Example:
        >>> transforms = fleet.features.Transforms([fleet.features.Bucketize("age", [18, 30])])
        >>> transforms({"age": [17, 18, 44]})["age"].tolist()
        [0, 1, 2]
    """

    takes: ClassVar[tuple[str, ...]] = ("int", "float")

    column: str
    boundaries: Sequence[float]
    out: str | None = None

    def __post_init__(self) -> None:
        self._check_names()
        object.__setattr__(self, "boundaries", tuple(self.boundaries))
        for boundary in self.boundaries:
            check_number(f"Bucketize({self.column!r}, boundaries): {boundary!r}", boundary)
        if not self.boundaries or list(self.boundaries) != sorted(set(self.boundaries)):
            raise ConfigError(f"Bucketize({self.column!r}, boundaries={self.boundaries}): they ascend, one or more.")

    def apply(self, columns: Sequence[FeatureColumn]) -> FeatureColumn:
        """Returns the buckets."""
        (column,) = columns
        assert not isinstance(column.values, Words)
        # Integers against integers: float64, which searchsorted would compare in, rounds above 2^53.
        if column.kind == "int":
            least = [math.ceil(boundary) for boundary in self.boundaries]  # integers not below a boundary begin there
            below = sum(edge <= _FIRST for edge in least)
            edges = np.array([edge for edge in least if _FIRST < edge <= _LAST], np.int64)
            found = below + np.searchsorted(edges, column.values.astype(np.int64, copy=False), side="right")
        else:
            found = np.searchsorted(np.array([*map(_float_from, self.boundaries)]), column.values, side="right")
        return FeatureColumn(np.asarray(found, np.int64), column.ends)


def _float_from(boundary: float) -> float:
    """Returns the smallest float64 that is not below ``boundary``."""
    near = float(boundary)
    return near if near >= boundary else math.nextafter(near, math.inf)


@dataclass(frozen=True)
class Clip(Transform):
    """Values limited to a range; not-a-number stays. Integers become int64, other numbers float32.

    Args:
        column: numbers, or bags of them.
        low, high: the range, ends included; ``None``: no limit on that side.
        out: the column to write; ``column`` itself if not given.

    Raises:
        ConfigError: no limit at all, or ``low`` above ``high``.
    """

    takes: ClassVar[tuple[str, ...]] = ("int", "float")
    gives: ClassVar[str | None] = None

    column: str
    low: float | None = None
    high: float | None = None
    out: str | None = None

    def __post_init__(self) -> None:
        self._check_names()
        for name, value in (("low", self.low), ("high", self.high)):
            if value is not None:
                check_number(f"Clip({self.column!r}, {name})", value)
        if (self.low is None and self.high is None) or (
            self.low is not None and self.high is not None and self.low > self.high
        ):
            raise ConfigError(f"Clip({self.column!r}, low={self.low}, high={self.high}): low is at most high, or one.")

    def apply(self, columns: Sequence[FeatureColumn]) -> FeatureColumn:
        """Returns the values in the range."""
        (column,) = columns
        values = column.values
        assert not isinstance(values, Words)
        if column.kind == "int":
            low = _FIRST if self.low is None else max(int(np.ceil(self.low)), _FIRST)
            high = _LAST if self.high is None else min(int(np.floor(self.high)), _LAST)
            if low > high:
                raise ConfigError(f"{self!r}: column {self.column!r} holds integers, and none lies in the range.")
            return FeatureColumn(np.clip(values.astype(np.int64, copy=False), low, high), column.ends)
        clipped = np.clip(values, self.low, self.high)
        return FeatureColumn(clipped.astype(values.dtype, copy=False), column.ends)


@dataclass(frozen=True)
class Log(Transform):
    """``log(max(x, 0) + offset)``, float32: for counts before a network; values below 0 count as 0.

    Computed in float64 and rounded once. Not-a-number stays not-a-number.

    Args:
        column: numbers, or bags of them.
        offset: above 0.
        out: the column to write; ``column`` itself if not given.

    Raises:
        ConfigError: ``offset`` is 0 or below.
    """

    takes: ClassVar[tuple[str, ...]] = ("int", "float")
    gives: ClassVar[str | None] = "float"

    column: str
    offset: float = 1.0
    out: str | None = None

    def __post_init__(self) -> None:
        self._check_names()
        check_number(f"Log({self.column!r}, offset)", self.offset)
        if self.offset <= 0:
            raise ConfigError(
                f"Log({self.column!r}, offset={self.offset}): it is above 0, or 0 would have no logarithm."
            )

    def apply(self, columns: Sequence[FeatureColumn]) -> FeatureColumn:
        """Returns the logarithms."""
        (column,) = columns
        assert not isinstance(column.values, Words)
        positive = np.maximum(column.values.astype(np.float64), 0.0)
        return FeatureColumn(np.log(positive + self.offset).astype(np.float32), column.ends)
