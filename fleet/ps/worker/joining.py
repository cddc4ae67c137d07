"""How a worker joins the job: worker 0 gives initial values, the others wait for them, and a worker that comes back
goes on after its last step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fleet.errors import ConfigError, PSError
from fleet.ps.client.client import Client
from fleet.ps.client.client_config import ONCE
from fleet.ps.client.shards import Gradient, Keys, TableMap
from fleet.ps.embeddings.served_embedding import ServedEmbedding
from fleet.ps.worker.dense_part import DensePart
from fleet.ps.worker.table_plan import SparsePart, TablePlan

_POLL_S = 0.05


def give_initial_values(client: Client, plan: TablePlan, connect: Callable[[int], Client]) -> None:
    """Gives the servers the parameters that they lack; those from a save or from training stay.

    Rows come first and dense values last: a worker that finds dense values finds the rows, too.

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


def check_same_mode(client: Client, mode: str, staleness: int | None) -> None:
    """Raises ConfigError unless the servers of ``client`` serve workers that train in ``mode`` with ``staleness``."""
    theirs, bound = (client.welcomes()[0][name] for name in ("mode", "staleness"))
    if (theirs, bound) != ("sync" if mode == "sync" else "async", staleness):
        raise ConfigError(
            f"this worker trains in mode {mode!r} with max_staleness {staleness}, and the parameter servers in mode "
            f"{theirs!r} with {bound}. Call distributed_optimizer() with the same strategy on servers and workers, "
            "before fleet.init_server()."
        )


def check_nothing_lost(facts: Sequence[Mapping[str, Any]]) -> None:
    """Raises PSError where a server was started again without its tables while others have steps of this job.

    Tables made anew there would go on with the first rows, beside those that were trained.
    """
    trained = any(fact["applied_step"] or any(worker["clock"] for worker in fact["workers"]) for fact in facts)
    lost = [index for index, fact in enumerate(facts) if not fact["tables"]]
    if trained and lost:
        raise PSError(
            f"parameter server(s) {lost} came back without tables, and the others have steps of this job: they kept no "
            "state (journal level 0, or another folder). Restart the job, servers too, from its last saved model."
        )


def rejoin(client: Client, state: Mapping[str, Any] | None = None) -> None:
    """Makes ``client`` continue at the right step and barriers.

    Without a checkpoint it continues where the others are: after the last barrier that the servers know. With one it
    passes the later barriers again, at once, because the others have passed them. Where the servers know fewer (new
    servers that loaded a save), the count continues from theirs, which all workers see. So does the count of steps: in
    sync mode a pull waits for the steps before it, and new servers will never get those.

    Args:
        client: open.
        state: what ``client.state_dict()`` was at the checkpoint.
    """
    own = client.state_dict()
    holds_barriers = slice(None if client.staleness is not None else 1)
    welcomes = client.welcomes()[holds_barriers]
    known = [welcome["barriers"] for welcome in welcomes]
    saved = {} if state is None else dict(state["barriers"])
    passed = {
        name: max(own["barriers"].get(name, 0), min(int(numbers.get(name, 0)) for numbers in known))
        for name in {*own["barriers"], *saved, *(name for numbers in known for name in numbers)}
    }
    if state is not None:
        passed = {name: min(number, int(saved.get(name, 0))) for name, number in passed.items()}
    merged = {**own, **(state or {}), "barriers": passed}
    had = max(max(int(welcome["clock"]), int(welcome["applied_step"])) for welcome in client.welcomes())
    client.load_state_dict({**merged, "step": min(int(merged["step"]), max(had, own["step"]))})
