"""Initial values: what worker 0 gives the servers at the start, and what the other workers wait for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from fleet.errors import PSError
from fleet.ps.client.client import Client
from fleet.ps.client.client_config import ONCE
from fleet.ps.client.shards import Gradient, Keys, TableMap
from fleet.ps.worker.dense_part import DensePart
from fleet.ps.worker.served_embedding import ServedEmbedding
from fleet.ps.worker.table_plan import SparsePart, TablePlan

_POLL_S = 0.05


def give_initial_values(client: Client, plan: TablePlan, connect: Callable[[int], Client]) -> None:
    """Gives the servers the parameters that they lack; what they have from a save or from training stays.

    Rows come first and dense values last: whoever finds dense values finds the rows, too.

    Args:
        client: worker 0's.
        plan: the tables.
        connect: returns an open client on the channel with the given number.
    """
    facts = client.stat()
    for table in plan.sparse:
        served = [module for module in table.modules if isinstance(module, ServedEmbedding)]
        if served:
            empty = not sum(fact["tables"][str(table.table_id)]["rows"] for fact in facts)
            _give_rows(table, served[0], empty, connect)
    unset = [part for part in plan.dense if not _is_set(facts, part)]
    if unset:
        client.wait(client.set_dense({part.table_id: part.values() for part in unset}))


def _give_rows(table: SparsePart, module: ServedEmbedding, empty: bool, connect: Callable[[int], Client]) -> None:
    giver = connect(ONCE + table.table_id)
    try:
        given = [int(welcome["last"]) for welcome in giver.welcomes()]
        if not any(given) and not empty:
            return  # the rows are those of a save
        pieces = module.initial_rows()
        if given == _pieces_of_servers(giver.tables[table.table_id], [ids for ids, _ in pieces]):
            return
        for ids, rows in pieces:
            giver.wait(giver.add({table.table_id: Gradient(ids, rows)}))
        giver.flush()
    finally:
        giver.close()


def _pieces_of_servers(place: TableMap, pieces: Sequence[Keys]) -> list[int]:
    """Returns, per server, how many of ``pieces`` have rows for it."""
    shares = [[len(ids[own]) > 0 for own in place.split(ids)] for ids in pieces]
    return [sum(share) for share in zip(*shares, strict=True)]


def wait_for_values(client: Client, plan: TablePlan) -> None:
    """Waits until every dense table has values; raises PSError when worker 0 gives none within the deadline."""
    deadline = time.monotonic() + client.config.deadline_s
    while not all(_is_set(facts, part) for facts in [client.stat()] for part in plan.dense):
        if time.monotonic() > deadline:
            raise PSError(
                f"worker 0 has not given the servers the first parameters within {client.config.deadline_s:g} s. "
                "Is it running? Look at its log and restart it: it continues where it stopped."
            )
        time.sleep(_POLL_S)


def _is_set(facts: list[dict[str, Any]], part: DensePart) -> bool:
    return all(fact["tables"][str(part.table_id)]["is_set"] for fact in facts)
