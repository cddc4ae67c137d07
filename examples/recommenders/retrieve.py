"""Answers over HTTP which items are nearest to a user, by two towers, while they are trained.

    curl -d '{"inputs": {"user": [7], "age": [3], "history": [15, 4], "history.offsets": [0]}, "k": 10}' \\
        http://127.0.0.1:8000/retrieve

answers ``{"items": [[...]], "scores": [[...]], "step": ..., "age_s": ..., "version": ...}``: for each user the items,
nearest first; the step of training that the items hold at least; the seconds since the newest changes in them were
pushed; and the version that readers were taken back to, null while they follow training. ``inputs`` are those of the
user tower: numbers without a point are ids. With ``"recall": true`` the answer says which part of the exact answer the
index has found.

EXPORT holds a program in ``user`` and one in ``item`` (``fleet.ps.export`` of each tower). The service needs neither
the servers nor the workers of the job.
"""

from __future__ import annotations

import argparse
import threading
import time
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from other_example import module_of_wide_and_deep
from torch import Tensor

from fleet.errors import FleetError
from fleet.ps import ItemIndex, Predictor, Reader

Batch = dict[str, Tensor]


class Catalogue:
    """What the item tower takes beside the rows: the columns of the items.

    Args:
        columns: of every item; the first one is the id.
    """

    def __init__(self, columns: dict[str, Tensor]) -> None:
        self.id, *_ = columns
        order = torch.argsort(columns[self.id])
        self.columns = {name: values[order] for name, values in columns.items()}

    @classmethod
    def read(cls, path: Path, names: list[str]) -> Catalogue:
        """Returns these columns of a Parquet file."""
        import pyarrow.parquet as pq

        table = pq.read_table(path, columns=names)
        return cls({name: torch.from_numpy(table[name].to_numpy().copy()) for name in names})

    def has(self, ids: Tensor) -> Tensor:
        """Returns which ids are items; the others were only looked up, as padding of a history is."""
        return torch.isin(ids, self.columns[self.id])

    def batch(self, ids: Tensor) -> Batch:
        """Returns the columns of these items."""
        places = torch.searchsorted(self.columns[self.id], ids)
        return {name: values[places] for name, values in self.columns.items()}


class Retrieval:
    """The user tower and the index of the items.

    Args:
        export: the folder of both programs.
        reader: of the rows; it stays open.
        catalogue: the columns of the items.
        table: of the items.
        kind: of the index.
    """

    def __init__(self, export: Path, reader: Reader, catalogue: Catalogue, table: str, kind: str) -> None:
        self.reader = reader
        self.catalogue = catalogue
        self.user_tower = Predictor(export / "user", reader)
        self.item_tower = Predictor(export / "item", reader)
        self.index = ItemIndex(reader, table, encode=self.encode, keep=self.keep, kind=kind)

    def encode(self, ids: Any, rows: Any) -> Tensor:
        """Returns the vectors of items."""
        found: Tensor = self.item_tower(self.catalogue.batch(torch.from_numpy(ids)))
        return found

    def keep(self, ids: Any) -> Tensor:
        """Returns which ids are items."""
        return self.catalogue.has(torch.from_numpy(ids))

    def answer(self, inputs: Batch, k: int, recall: bool = False) -> dict[str, Any]:
        """Returns what an answer over HTTP holds."""
        while True:
            version = self.reader.version
            if self.index.version != version:  # the reader was taken back, or released, and the index comes after it
                self.index.refresh()
            positions = self.index.position.values()  # before: newer items may come during the search
            vectors = self.user_tower(inputs)
            ids, scores = self.index.search(vectors, k)
            if self.index.version == self.reader.version == version:
                break
        found = scores > -torch.inf
        return {
            "items": [row[mask].tolist() for row, mask in zip(ids, found, strict=True)],
            "scores": [row[mask].tolist() for row, mask in zip(scores, found, strict=True)],
            "step": min(position.step for position in positions),
            "age_s": round(time.time() - min(position.pushed_at for position in positions), 3),
            "version": version and version.name,
            **({"recall": self.index.recall(vectors, k)} if recall else {}),
        }

    def respond(self, body: Any) -> dict[str, Any]:
        """Returns the answer to a request over HTTP."""
        inputs = {name: tensor_of(values) for name, values in body["inputs"].items()}
        return self.answer(inputs, body.get("k", 10), bool(body.get("recall")))

    def follow(self, every_s: float, stop: threading.Event) -> None:
        """Takes up newer programs, and in each fifth round rows of other tables that the item tower takes."""
        rounds = 0
        while not stop.wait(every_s):
            rounds += 1
            try:
                if self.item_tower.refresh() or rounds % 5 == 0:
                    self.index.rebuild()
                self.user_tower.refresh()
            except FleetError as error:
                print(f"the older towers stay: {error}", flush=True)


def tensor_of(values: Any) -> Tensor:
    """Returns numbers of JSON as a tensor; without any they are ids, as in the history of a new user."""
    return torch.tensor(values, dtype=torch.int64 if values == [] else None)


def main() -> None:
    """Serves until it is interrupted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("export", type=Path, metavar="DIR", help="the programs: folders user and item")
    parser.add_argument("rows", metavar="FOLDER", help="where the job publishes its rows")
    parser.add_argument("items", type=Path, metavar="FILE", help="the items, as Parquet: items.parquet of a shop")
    parser.add_argument(
        "--columns", nargs="+", default=["item", "category", "brand", "price"],
        help="of the file, as the item tower takes them; the first is the id (default: those of DSSM)",
    )  # fmt: skip
    parser.add_argument("--table", default="item", help="of the items (default: %(default)s)")
    parser.add_argument("--kind", choices=("exact", "ivf"), default="exact", help="of the index (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="(default: %(default)s; 0: any free one)")
    args = parser.parse_args()
    torch.set_num_threads(1)  # one user is too little work for more
    stop = threading.Event()
    with Reader(args.rows).follow(every_s=0.5) as reader:  # looks for a brake more often than the index does
        catalogue = Catalogue.read(args.items, args.columns)
        retrieval = Retrieval(args.export, reader, catalogue, args.table, args.kind)
        threading.Thread(target=retrieval.follow, args=(1.0, stop), daemon=True).start()
        handler = module_of_wide_and_deep("json_requests").answering("/retrieve", retrieval.respond)
        with retrieval.index.follow(every_s=0.5), ThreadingHTTPServer(("127.0.0.1", args.port), handler) as server:
            print(f"http://127.0.0.1:{server.server_port}/retrieve", flush=True)
            try:
                server.serve_forever()
            except KeyboardInterrupt:
                pass
            finally:
                stop.set()


if __name__ == "__main__":
    main()
