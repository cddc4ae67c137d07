"""Deltas for tests of readers, and the rows that they leave."""

from __future__ import annotations

import numpy as np

from fleet.ps.publishing.delta import Delta, RowsDelta, Sink, decode, encode
from fleet.ps.table.partition import servers_of_keys

DIM = 3
IDS = np.arange(-400, 400)


class Chain:
    """Writes deltas of table ``ads`` to a sink, and keeps what a reader must find.

    Args:
        sink: where they go.
        servers: how many servers hold the table.
        encoding: the sink's, which rounds the rows.
        seed: of the rows and ids.
    """

    def __init__(self, sink: Sink, servers: int = 1, encoding: str = "float32", seed: int = 0) -> None:
        self.sink, self.servers, self.encoding = sink, servers, encoding
        self.rows: dict[int, np.ndarray] = {}
        self.step = 0
        self._watermarks = [0] * servers
        self._random = np.random.default_rng(seed)

    def write(self, changed: int = 40, deleted: int = 5, *, whole: bool = False) -> None:
        """Writes one delta of every server."""
        self.step += 1
        for server in range(self.servers):
            mine = IDS[servers_of_keys(IDS, self.servers) == server]
            picked = self._random.permutation(mine)[: changed + deleted]
            keys, gone = np.sort(picked[:changed]), picked[changed:]
            values = self._random.normal(size=(len(keys), DIM)).astype(np.float32)
            whole = whole or self.step == 1
            gone = gone[:0] if whole else gone
            self.put(server, keys, values, gone, whole=whole)

    def put(self, server: int, keys: np.ndarray, values: np.ndarray, gone: np.ndarray, *, whole: bool = False) -> None:
        """Writes one delta of one server."""
        previous = self._watermarks[server]
        self._watermarks[server] = previous + 10
        rows = RowsDelta("ads", keys, values, gone)
        self.sink.write(
            Delta(
                "shop", server, self.servers, "00000001-a", previous, previous + 10, self.step, 100.0 + self.step,
                whole, (rows,),
            )
        )  # fmt: skip
        if whole:
            owner = dict(zip(IDS.tolist(), servers_of_keys(IDS, self.servers).tolist(), strict=True))
            self.rows = {key: row for key, row in self.rows.items() if owner[key] != server}
        stored = decode(*encode(values, self.encoding))
        self.rows.update(zip(keys.tolist(), stored, strict=True))
        for key in gone.tolist():
            self.rows.pop(key, None)

    def check(self, rows: np.ndarray, found: np.ndarray) -> None:
        """Fails unless ``rows`` and ``found`` of a lookup of :data:`IDS` are what the deltas left."""
        assert set(IDS[found].tolist()) == self.rows.keys()
        assert not rows[~found].any()
        for key, row in zip(IDS[found].tolist(), rows[found], strict=True):
            assert row.tobytes() == self.rows[key].tobytes(), key
