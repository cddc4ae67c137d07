"""The ids of a batch: each distinct id is pulled and pushed once.

Example:
    >>> distinct, inverse = UniqueKeys()(np.array([5, 7, 5]))
    >>> distinct.tolist(), inverse.tolist()
    ([5, 7], [0, 1, 0])
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from fleet.errors import ConfigError
from fleet.ps.table.kernels.numba_cache import address_of, load_kernels
from fleet.ps.table.layout import Float32s, Int64s

Int32s = npt.NDArray[np.int32]
ROWS_AT_ONCE = 1 << 16


class UniqueKeys:
    """Finds the distinct keys of one batch after the other, reusing its memory; one thread at a time."""

    def __init__(self) -> None:
        self._bits = 0
        self._generation = 0
        self._seen = np.empty(0, np.int64)

    def __call__(self, keys: Int64s) -> tuple[Int64s, Int32s]:
        """Returns the distinct keys in order of first appearance, and the place among them of each key (int32)."""
        _check_array("keys", keys, np.int64, 1)
        n = len(keys)
        generation = self._begin(n, 1)
        keys = np.ascontiguousarray(keys)
        unique = np.empty(n, np.int64)
        inverse = np.empty(n, np.int32)
        count = load_kernels("id_kernels").unique_keys(
            address_of(keys), n, address_of(self._seen), self._bits, generation, address_of(unique), address_of(inverse)
        )
        return unique[:count], inverse

    def of_parts(self, parts: Sequence[Int64s]) -> list[tuple[Int64s, Int32s]]:
        """Returns for each array of keys what a call with it returns."""
        if not parts:
            return []
        ends = np.cumsum([len(part) for part in parts])
        unique, counts, inverse = self.of_joined(np.concatenate(parts), ends)
        found = []
        start = 0
        for end, count in zip(ends.tolist(), counts.tolist(), strict=True):
            found.append((unique[start : start + count], inverse[start:end]))
            start = end
        return found

    def of_joined(self, keys: Int64s, ends: Int64s) -> tuple[Int64s, Int64s, Int32s]:
        """Returns, of parts of ``keys`` that end at ``ends``, the distinct keys, their numbers and each key's place.

        The distinct keys of a part begin where the part does, and places count from there; what lies between the
        distinct keys of two parts has no meaning.
        """
        _check_array("keys", keys, np.int64, 1)
        generation = self._begin(int(np.diff(ends, prepend=0).max()), len(ends))
        unique = np.empty(len(keys), np.int64)
        counts = np.empty(len(ends), np.int64)
        inverse = np.empty(len(keys), np.int32)
        load_kernels("id_kernels").unique_keys_of_parts(
            address_of(keys), address_of(ends), len(ends), address_of(self._seen), self._bits, generation,
            address_of(unique), address_of(counts), address_of(inverse),
        )  # fmt: skip
        return unique, counts, inverse

    def _begin(self, n: int, count: int) -> int:
        """Makes room for ``n`` keys; returns the first of the ``count`` generations that the caller takes."""
        if n >= 2**31:
            raise ConfigError(f"a batch of {n} keys; it takes fewer than 2**31.")
        if 2**self._bits < 2 * n or self._bits == 0:
            self._bits = max(10, (2 * n - 1).bit_length())
            self._seen = np.zeros(2 * 2**self._bits, np.int64)
            self._generation = 0
        if self._generation + count >= 2**31:
            self._seen[:] = 0
            self._generation = 0
        first = self._generation + 1
        self._generation += count
        return first


class KeyPlaces:
    """Finds the places of keys in an array that only grows at its end.

    Example:
        >>> places, keys = KeyPlaces(), np.array([7, -3])
        >>> places.add(keys, 0)
        >>> places.find(np.array([-3, 4])).tolist()
        [1, -1]
    """

    def __init__(self) -> None:
        self._bits = 12
        self._entries = np.zeros(2 << self._bits, np.int64)

    def find(self, keys: Int64s) -> Int64s:
        """Returns the place of each key, -1 where it is unknown."""
        _check_array("keys", keys, np.int64, 1)
        keys = np.ascontiguousarray(keys)
        places = np.empty(len(keys), np.int64)
        find_places = load_kernels("id_kernels").find_places
        find_places(address_of(keys), len(keys), address_of(self._entries), self._bits, address_of(places))
        return places

    def add(self, every: Int64s, first: int) -> None:
        """Enters ``every[first:]``, distinct keys that are unknown; those before are known."""
        _check_array("keys", every, np.int64, 1)
        if 2 * len(every) > 1 << self._bits:
            self._bits = (4 * len(every)).bit_length()
            self._entries = np.zeros(2 << self._bits, np.int64)
            first = 0
        new = np.ascontiguousarray(every[first:])
        insert_places = load_kernels("id_kernels").insert_places
        insert_places(address_of(new), len(new), first, address_of(self._entries), self._bits)


def sum_by_key(keys: Int64s, gradients: Float32s) -> tuple[Int64s, Float32s, Int32s]:
    """Returns the distinct keys in order of first appearance, the sums of their rows, and each key's place.

    Args:
        keys: int64 [n].
        gradients: float32 [n, dim].
    """
    distinct, inverse = UniqueKeys()(keys)
    _check_array("gradients", gradients, np.float32, 2)
    if len(gradients) != len(keys):
        raise ConfigError(f"{len(gradients)} rows of gradients for {len(keys)} keys; each key takes one.")
    return distinct, _sums(gradients, inverse, len(distinct)), inverse


def sum_joined(keys: Int64s, ends: Int64s, gradients: Float32s) -> tuple[tuple[Int64s, Int64s], Float32s, Int32s]:
    """Returns for parts of ``keys`` what :func:`sum_by_key` returns for each, one part behind the other.

    The first item is the distinct keys and where those of each part end; an equal key of another part is another key.

    Args:
        keys: int64 [n].
        ends: int64 [parts], where the keys of each part end; there is one at least.
        gradients: float32 [n, dim].
    """
    unique, counts, inverse = UniqueKeys().of_joined(np.ascontiguousarray(keys), ends)
    sizes = np.diff(ends, prepend=0)
    new_ends = np.cumsum(counts)
    is_distinct = np.arange(len(keys)) < np.repeat(ends - sizes + counts, sizes)
    inverse += np.repeat(new_ends - counts, sizes).astype(np.int32)
    return (unique[is_distinct], new_ends), sum_rows(gradients, inverse, int(new_ends[-1])), inverse


def sum_rows(gradients: Float32s, inverse: Int32s, num_unique: int) -> Float32s:
    """Returns the sum of the gradient rows of each distinct key, float32 [num_unique, dim].

    Args:
        gradients: float32 [n, dim], one row per id of the batch.
        inverse: int32 [n] from :class:`UniqueKeys`.
        num_unique: how many distinct keys there are.
    """
    _check_array("gradients", gradients, np.float32, 2)
    _check_inverse(inverse, len(gradients), num_unique)
    return _sums(gradients, np.ascontiguousarray(inverse), num_unique)


def sum_bags(gradients: Float32s, starts: Int64s, inverse: Int32s, num_unique: int, is_mean: bool = False) -> Float32s:
    """Returns the sums of the gradients of the distinct keys of bags, float32 [num_unique, dim].

    The gradient of a bag counts for each of its keys, in their order; divided by their number if the bag is a mean.

    Args:
        gradients: float32 [bags, dim].
        starts: int64 [bags], where each bag begins in ``inverse``.
        inverse: int32 [n] from :class:`UniqueKeys`.
        num_unique: how many distinct keys there are.
        is_mean: each bag is the mean of its rows, not their sum.
    """
    _check_array("gradients", gradients, np.float32, 2)
    _check_array("starts", starts, np.int64, 1)
    _check_inverse(inverse, len(inverse), num_unique)
    ends = np.append(starts[1:], len(inverse))
    if len(starts) != len(gradients) or (len(starts) and (starts[0] < 0 or (ends < starts).any())):
        raise ConfigError(
            f"{len(gradients)} gradients of bags that start at {starts[:8]}, of {len(inverse)} keys; each bag takes a "
            "gradient and starts where the one before ends."
        )
    rows, first, places = (np.ascontiguousarray(array) for array in (gradients, starts, inverse))
    dim = gradients.shape[1]
    out = np.empty((num_unique, dim), np.float32)
    load_kernels("id_kernels").merge_bags(
        address_of(rows), address_of(first), address_of(ends), address_of(places), len(starts), dim, bool(is_mean),
        address_of(out), num_unique,
    )  # fmt: skip
    return out


def _sums(gradients: Float32s, inverse: Int32s, num_unique: int) -> Float32s:
    gradients = np.ascontiguousarray(gradients)
    num_rows, dim = gradients.shape
    out = np.empty((num_unique, dim), np.float32)
    merge_rows = load_kernels("id_kernels").merge_rows
    merge_rows(address_of(gradients), address_of(inverse), num_rows, dim, address_of(out), num_unique)
    return out


def mean_of(arrays: Sequence[Float32s], divisor: float) -> Float32s:
    """Returns the sum of float32 arrays [n], in the order given, over ``divisor``."""
    kept, sources = addressed(arrays)
    out = np.empty(len(kept[0]), np.float32)
    load_kernels("id_kernels").mean_of(address_of(sources), len(kept), len(out), float(divisor), address_of(out))
    return out


def copy_for_others(addresses: Sequence[int], lengths: Sequence[int], out: Float32s) -> None:
    """Copies float32 arrays, contiguous and alive, one behind the other to ``out``, which another process reads next.

    Raises:
        ConfigError: ``out`` has another length than all of them.
    """
    _check_array("values", out, np.float32, 1)
    if len(addresses) != len(lengths) or sum(lengths) != len(out) or not out.flags.c_contiguous:
        raise ConfigError(f"{len(addresses)} arrays of {sum(lengths)} numbers do not fill {len(out)} places in a row.")
    at, sizes = np.array(addresses, np.int64), np.array(lengths, np.int64)
    load_kernels("id_kernels").copy_for_others(address_of(at), address_of(sizes), len(at), address_of(out))


def addressed(arrays: Sequence[Float32s]) -> tuple[list[Float32s], Int64s]:
    """Returns float32 arrays of one length, contiguous, and their addresses, which are good while the first live.

    Raises:
        ConfigError: they are none, or of other types, or lengths.
    """
    for array in arrays:
        _check_array("values", array, np.float32, 1)
    kept = [np.ascontiguousarray(array) for array in arrays]
    if len({len(array) for array in kept}) != 1:
        raise ConfigError(f"arrays of {[len(array) for array in kept]} numbers have no mean.")
    return kept, np.array([address_of(array) for array in kept], np.int64)


def in_pieces(count: int) -> Iterator[Int64s]:
    """Yields the ids from 0 to ``count - 1``, at most :data:`ROWS_AT_ONCE` at a time: as many as one message takes."""
    for start in range(0, count, ROWS_AT_ONCE):
        yield np.arange(start, min(start + ROWS_AT_ONCE, count), dtype=np.int64)


def train_rows(
    weight: Float32s, places: Int64s, gradients: Float32s, learning_rate: float, touched: npt.NDArray[np.bool_]
) -> None:
    """Does ``weight[place] -= learning_rate * gradient`` for each place in turn, and sets ``touched[place]``.

    Args:
        weight: float32 [n, dim].
        places: int64 [k]; they may repeat.
        gradients: float32 [k, dim].
        learning_rate: of plain SGD.
        touched: bool [n].

    Raises:
        ConfigError: the arrays do not fit together, or a place is not below n.
    """
    _check_array("weights", weight, np.float32, 2)
    _check_array("places", places, np.int64, 1)
    n, dim = weight.shape
    if gradients.dtype != np.float32 or gradients.shape != (len(places), dim):
        raise ConfigError(f"gradients are {gradients.dtype} {gradients.shape}; they take float32 {len(places), dim}.")
    if touched.dtype != np.bool_ or touched.shape != (n,):
        raise ConfigError(f"touched is {touched.dtype} {touched.shape}; it takes bool ({n},).")
    held, rows = np.ascontiguousarray(places), np.ascontiguousarray(gradients)
    if not load_kernels("id_kernels").train_rows(
        address_of(weight), n, dim, address_of(held), len(held), address_of(rows), learning_rate, address_of(touched)
    ):
        raise ConfigError(f"places range from {places.min()} to {places.max()}; there are {n} rows.")


def _check_array(what: str, array: npt.NDArray[np.generic], dtype: type[np.generic], ndim: int) -> None:
    if array.dtype != dtype or array.ndim != ndim:
        raise ConfigError(
            f"{what} are {array.dtype} {array.shape}; they take {np.dtype(dtype)} of {ndim} "
            f"dimension{'s' if ndim > 1 else ''}."
        )


def _check_inverse(inverse: Int32s, n: int, num_unique: int) -> None:
    # The kernels index memory with these numbers.
    if inverse.dtype != np.int32 or inverse.shape != (n,):
        raise ConfigError(f"inverse is {inverse.dtype} {inverse.shape}; it takes int32 ({n},).")
    if n and not (int(inverse.min()) >= 0 and int(inverse.max()) < num_unique):
        raise ConfigError(
            f"inverse ranges from {inverse.min()} to {inverse.max()}; it takes places from 0 and below {num_unique}."
        )
