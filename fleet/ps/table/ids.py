"""What a worker does with the ids of a batch: each distinct id is pulled and pushed once.

Example:
    >>> distinct, inverse = UniqueKeys()(np.array([5, 7, 5]))
    >>> distinct.tolist(), inverse.tolist()
    ([5, 7], [0, 1, 0])
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fleet.errors import ConfigError
from fleet.ps.table import reference as twins
from fleet.ps.table.kernels.numba_cache import kernels_work
from fleet.ps.table.layout import Float32s, Int64s
from fleet.ps.table.partition import ROUTINGS, check_num_servers, servers_of_keys

Int32s = npt.NDArray[np.int32]


class UniqueKeys:
    """Finds the distinct keys of one batch after the other, reusing its memory; one thread at a time.

    Args:
        use_kernels: as in :class:`fleet.ps.SparseTable`.
    """

    def __init__(self, *, use_kernels: bool | None = None) -> None:
        self._use_kernels = kernels_work() if use_kernels is None else use_kernels
        self._bits = 0
        self._generation = 0
        self._seen = np.empty(0, np.int64)

    def __call__(self, keys: Int64s) -> tuple[Int64s, Int32s]:
        """Returns the distinct keys in order of first appearance, and the place among them of each key (int32)."""
        _check_array("keys", keys, np.int64, 1)
        n = len(keys)
        if n >= 2**31:
            raise ConfigError(f"a batch of {n} keys; it takes fewer than 2**31.")
        if not self._use_kernels:
            return twins.unique_keys(keys)
        from fleet.ps.table.kernels import id_kernels as kernels

        if 2**self._bits < 2 * n or self._bits == 0:
            self._bits = max(10, (2 * n - 1).bit_length())
            self._seen, self._generation = np.zeros(2 * 2**self._bits, np.int64), 0
        self._generation += 1
        if self._generation == 2**31:
            self._seen[:], self._generation = 0, 1
        keys = np.ascontiguousarray(keys)
        unique, inverse = np.empty(n, np.int64), np.empty(n, np.int32)
        count = kernels.unique_keys(
            _address(keys), n, _address(self._seen), self._bits, self._generation, _address(unique), _address(inverse)
        )
        return unique[:count], inverse


class KeyPlaces:
    """Finds the places of keys in an array that only grows at its end; needs the kernels.

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
        from fleet.ps.table.kernels import id_kernels as kernels

        _check_array("keys", keys, np.int64, 1)
        keys, places = np.ascontiguousarray(keys), np.empty(len(keys), np.int64)
        kernels.find_places(_address(keys), len(keys), _address(self._entries), self._bits, _address(places))
        return places

    def add(self, every: Int64s, first: int) -> None:
        """Enters ``every[first:]``, distinct keys that are unknown; those before are known."""
        from fleet.ps.table.kernels import id_kernels as kernels

        _check_array("keys", every, np.int64, 1)
        if 2 * len(every) > 1 << self._bits:
            self._bits = (4 * len(every)).bit_length()
            self._entries, first = np.zeros(2 << self._bits, np.int64), 0
        new = np.ascontiguousarray(every[first:])
        kernels.insert_places(_address(new), len(new), first, _address(self._entries), self._bits)


def merge_gradients(
    gradients: Float32s, inverse: Int32s, num_unique: int, *, use_kernels: bool | None = None
) -> Float32s:
    """Returns the sum of the gradient rows of each distinct key, float32 [num_unique, dim].

    Args:
        gradients: float32 [n, dim], one row per id of the batch.
        inverse: int32 [n] from :class:`UniqueKeys`.
        num_unique: how many distinct keys there are.
    """
    _check_array("gradients", gradients, np.float32, 2)
    _check_inverse(inverse, len(gradients), num_unique)
    if not (kernels_work() if use_kernels is None else use_kernels):
        return twins.merge_gradients(gradients, inverse, num_unique)
    from fleet.ps.table.kernels import id_kernels as kernels

    gradients, inverse = np.ascontiguousarray(gradients), np.ascontiguousarray(inverse)
    out = np.empty((num_unique, gradients.shape[1]), np.float32)
    kernels.merge_rows(
        _address(gradients), _address(inverse), len(gradients), gradients.shape[1], _address(out), num_unique
    )
    return out


def expand_rows(
    rows: Float32s, inverse: Int32s, out: Float32s | None = None, *, use_kernels: bool | None = None
) -> Float32s:
    """Returns float32 [n, dim] whose line i is ``rows[inverse[i]]``, written to ``out`` where given."""
    _check_array("rows", rows, np.float32, 2)
    shape = (len(inverse), rows.shape[1])
    _check_inverse(inverse, len(inverse), len(rows))
    if out is None:
        out = np.empty(shape, np.float32)
    elif out.shape != shape or out.dtype != np.float32 or not out.flags.c_contiguous:
        raise ConfigError(f"out is {out.dtype} {out.shape}; it takes C-contiguous float32 {shape}.")
    if not (kernels_work() if use_kernels is None else use_kernels):
        return twins.expand_rows(rows, inverse, out)
    from fleet.ps.table.kernels import id_kernels as kernels

    rows, inverse = np.ascontiguousarray(rows), np.ascontiguousarray(inverse)
    kernels.expand_rows(_address(rows), _address(inverse), len(inverse), rows.shape[1], _address(out))
    return out


def split_keys(
    keys: Int64s, num_servers: int, routing: str = "range", *, use_kernels: bool | None = None
) -> tuple[Int32s, Int64s]:
    """Returns the input places grouped by server in stable order, and the bounds of the groups.

    The ids of server s are ``keys[order[bounds[s] : bounds[s + 1]]]``. ``routing`` as in
    :func:`fleet.ps.servers_of_keys`.
    """
    _check_array("keys", keys, np.int64, 1)
    check_num_servers(num_servers)
    if not (kernels_work() if use_kernels is None else use_kernels):
        return twins.split_keys(servers_of_keys(keys, num_servers, routing), num_servers)
    if routing not in ROUTINGS:
        raise ConfigError(f"the routing {routing!r} does not exist; one of {list(ROUTINGS)}.")
    from fleet.ps.table.kernels import id_kernels as kernels

    keys = np.ascontiguousarray(keys)
    servers, order = np.empty(len(keys), np.int32), np.empty(len(keys), np.int32)
    bounds = np.empty(num_servers + 1, np.int64)
    kernels.split_keys(
        _address(keys),
        len(keys),
        num_servers,
        int(routing == "modulo"),
        _address(servers),
        _address(order),
        _address(bounds),
    )
    return order, bounds


def _address(array: npt.NDArray[np.generic]) -> int:
    return int(array.__array_interface__["data"][0])


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
            f"inverse reaches from {inverse.min()} to {inverse.max()}; it takes places below {num_unique}."
        )
