"""Samples that several workers have, and epochs in one order, from records made by hand."""

import random
from pathlib import Path
from typing import Any

import pytest

from fleet.verify.data_findings import data_findings
from fleet.verify.paired_runs import Run

LOADER = {"kind": "loader", "key": "a.py:1#1", "iterable": False, "samples": 16, "length": 2, "batch_size": 4}


def record(epochs: list[list[int]], sampler: str = "DistributedSampler", planned: int = 8) -> list[dict[str, Any]]:
    replicas = 2 if sampler == "DistributedSampler" else None
    facts = {**LOADER, "sampler": sampler, "planned": planned, "replicas": replicas, "shuffles": True}
    batches = [
        {"kind": "batch", "key": "a.py:1#1", "round": i, "indices": e, "samples": e, "rows": [f"row {s}" for s in e]}
        for i, e in enumerate(epochs, 1)
    ]
    return [facts, *batches]


def causes(*workers: list[dict[str, Any]]) -> list[str]:
    one = [{**LOADER, "sampler": "DistributedSampler", "planned": 16, "replicas": 1, "shuffles": True}]
    many = Run(folder=Path("many"), records=list(workers))
    return [found.cause for found in data_findings(many, Run(folder=Path("one"), records=[one]), range(len(workers)))]


def test_parts_in_new_orders_are_right() -> None:
    assert causes(record([[0, 2, 4], [4, 3, 2]]), record([[1, 3, 5], [5, 0, 1]])) == []


def test_what_is_wrong_is_named() -> None:
    alike = record([[0, 1, 2]], "RandomSampler", 16)
    assert causes(alike, alike) == ["no-distributed-sampler"]
    assert causes(record([[0, 1, 2, 3]]), record([[2, 3, 4, 5]])) == ["samples-seen-twice"]
    assert causes(record([[0, 2], [0, 2]]), record([[1, 3], [1, 3]])) == ["sampler-without-set-epoch"]
    assert causes(record([[0, 2]], planned=4), record([[1, 3]], planned=4)) == ["samples-left-out"]


def test_an_epoch_is_as_long_on_every_worker() -> None:
    """A worker that goes on to its next epoch may find the others still in the last one, and waits for nobody."""
    short = record([[0, 2], [2, 0]])
    assert causes(short, record([[1, 3]])) == []
    longer = record([[1, 3], [5, 7]])
    longer[2]["round"] = 1
    assert causes(short, longer) == causes(longer, short) == ["ranks-take-different-numbers-of-steps"]


def test_samples_of_the_start_may_fill_the_end_of_each_epoch() -> None:
    first, second = (record([[0, 1], [2, 3]]), record([[0, 4], [2, 5]]))
    assert causes(first, second) == ["samples-seen-twice"]
    for facts, *_ in (first, second):
        facts["fill"] = 1
    assert causes(first, second) == []
    assert causes(first, [second[0], *record([[0, 1], [2, 3]])[1:]]) == ["samples-seen-twice"]


def test_a_sampler_of_one_replica_is_not_said_to_be_missing() -> None:
    def sentence(sampler: str, replicas: int | None) -> str:
        facts, *batches = record([[0, 1, 2]], sampler, 16)
        worker = [{**facts, "replicas": replicas}, *batches]
        many = Run(folder=Path("many"), records=[worker, worker])
        (found,) = data_findings(many, Run(folder=Path("one"), records=[[]]), [0, 1])
        assert found.cause == "no-distributed-sampler"
        return found.sentence

    assert "its DistributedSampler has num_replicas=1, and there are 2 workers" in sentence("DistributedSampler", 1)
    assert "has no DistributedSampler; its sampler is a RandomSampler" in sentence("RandomSampler", None)


def test_batches_that_a_script_draws_alike_on_every_worker_are_noticed() -> None:
    def found(*totals: float) -> list[str]:
        ins = [[{"shape": [4, 2], "total0": total}] for total in totals]
        updates = [[{"kind": "update", "n": 1, "forward": [{"module": "", "ins": one}]}] for one in ins]
        many = Run(folder=Path("many"), records=updates)
        return [one.cause for one in data_findings(many, Run(folder=Path("one"), records=[[]]), range(len(totals)))]

    assert found(1.0, 2.0) == []
    assert found(1.0, 1.0) == ["no-distributed-sampler"]


def stream(rows: list[int], size: int = 8, epochs: int = 1) -> list[dict[str, Any]]:
    """Returns the record of a worker that reads ``rows`` of iterable data in each epoch."""
    facts = {**LOADER, "iterable": True, "sampler": "NoneType", "planned": None, "replicas": None, "shuffles": False}
    batches = [
        {
            "kind": "batch",
            "key": "a.py:1#1",
            "round": epoch,
            "samples": None,
            "indices": None,
            "rows": [str(row) for row in rows[first : first + size]],
        }
        for epoch in range(1, epochs + 1)
        for first in range(0, len(rows), size)
    ]
    return [facts, *batches]


def permuted(seed: int, number: int = 200) -> list[int]:
    return random.Random(seed).sample(range(number), number)


def test_shares_of_two_orders_overlap() -> None:
    right = [stream(permuted(1)[rank::2][:48], epochs=2) for rank in (0, 1)]
    assert causes(*right) == []
    wrong = [stream(permuted(rank)[rank::2][:48]) for rank in (0, 1)]
    (found,) = data_findings(Run(folder=Path("many"), records=wrong), Run(folder=Path("one"), records=[[]]), [0, 1])
    shared = len(set(permuted(0)[0::2][:48]) & set(permuted(1)[1::2][:48]))
    assert (found.cause, found.where) == ("samples-seen-twice", "a.py:1")
    assert 6 <= shared - 3 <= found.received <= shared
    assert f"{found.received} of {96 - shared} rows were given to more than one worker in one pass" in found.sentence


def test_fewer_shared_rows_tell_where_the_permutations_are_known_to_differ() -> None:
    def found(*contents: str, number: int = 200) -> list[str]:
        made = {"kind": "permutation", "name": "randperm", "where": "a.py:9", "n": number}
        shares = ([*range(0, 48)], [*range(100, 112), *range(20, 24), *range(112, 132)])
        return causes(
            *([*stream(share), {**made, "content": one}] for share, one in zip(shares, contents, strict=True))
        )

    assert found("x", "y") == ["samples-seen-twice"]
    assert found("x", "x") == found("x", "y", number=8) == []


@pytest.mark.parametrize("number", [3, 10, 40, 200, 1000, 5000, 10**6])
def test_rows_that_are_drawn_with_replacement_may_be_those_of_another_worker(number: int) -> None:
    for seed in range(20):
        workers = [stream(random.Random(100 * seed + rank).choices(range(number), k=48)) for rank in range(4)]
        assert causes(*workers[:2]) == causes(*workers) == [], seed


def test_the_end_of_a_stream_may_be_filled_up_with_its_start() -> None:
    first, second = [*range(0, 8), *range(16, 24), *range(32, 40)], [*range(8, 16), *range(24, 32), *range(0, 8)]
    assert causes(stream(first), stream(second)) == []


def test_all_of_a_stream_on_every_worker_is_no_part_of_it() -> None:
    """Also where its rows repeat."""
    for rows in (list(range(48)), [row % 5 for row in range(48)]):
        assert causes(stream(rows), stream(rows)) == ["no-distributed-sampler"]
