"""InvertedLists: vectors in lists around centroids, by faiss; a search compares the lists nearest to the query."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet.common.extras import install_line
from fleet.errors import ConfigError
from fleet.ps.table.layout import Float32s, Int64s

_FEWEST_OF_LIST = 39  # vectors; with fewer k-means finds no good centroid, and faiss warns
_SAMPLE_OF_LIST = 64  # vectors that train a centroid
_FEWEST = 10_000
_PROBED_PART = 8


def import_faiss(call: str) -> Any:
    """Returns the package faiss; raises :class:`ConfigError` where it is absent."""
    try:
        import faiss
    except ImportError:
        raise ConfigError(
            f'{call} needs the package faiss; {install_line("retrieval")}, or use kind="exact".'
        ) from None
    return faiss


def count_lists(vectors: int, nlist: int | None) -> int:
    """Returns how many lists serve best, 0 where comparing all vectors does.

    Args:
        vectors: how many there are.
        nlist: what the user asks for; ``None``: twice the square root of ``vectors``, from 10,000 vectors up.
    """
    if nlist is None:
        return 0 if vectors < _FEWEST else int(2 * vectors**0.5)
    return nlist if vectors >= _FEWEST_OF_LIST * nlist else 0


class InvertedLists:
    """Trained on the vectors that it holds.

    Args:
        vectors: float32 [n, dim].
        nlist: how many lists.
        nprobe: how many lists a query is compared with; ``None``: an eighth, at least 8.
    """

    def __init__(self, vectors: Float32s, nlist: int, nprobe: int | None) -> None:
        self._faiss = import_faiss('fleet.ps.ItemIndex(kind="ivf")')
        metric = self._faiss.METRIC_INNER_PRODUCT
        self._centroids = self._faiss.IndexFlatIP(vectors.shape[1])  # the lists do not own it
        self._lists = self._faiss.IndexIVFFlat(self._centroids, vectors.shape[1], nlist, metric)
        self._lists.cp.max_points_per_centroid = _SAMPLE_OF_LIST
        self._nprobe = min(nlist, nprobe or max(8, nlist // _PROBED_PART))
        self._lists.train(vectors)
        self._lists.add(vectors)

    def nearest(self, queries: Float32s, k: int, live: NDArray[np.bool_]) -> Iterator[Int64s]:
        """Yields for each query up to ``k`` places of vectors that ``live`` allows."""
        allowed = self._faiss.IDSelectorBitmap(np.packbits(live, bitorder="little"))
        ways = self._faiss.SearchParametersIVF(sel=allowed, nprobe=self._nprobe)
        _, places = self._lists.search(queries, min(k, len(live)), params=ways)
        for row in places:
            yield row[row >= 0]
