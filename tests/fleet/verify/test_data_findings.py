"""Samples that several workers have, and epochs in one order, from records made by hand."""

from pathlib import Path
from typing import Any

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
