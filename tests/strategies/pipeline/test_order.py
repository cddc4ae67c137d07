"""Orders of the stages: those that Paddle records, and that no set of them waits forever."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.strategies.pipeline.order import MicroStep, as_text, check_orders, most_live, plan_order

RECORDED = json.loads((Path(__file__).parents[2] / "data" / "pipeline_orders.json").read_text())


@pytest.mark.parametrize("entry", RECORDED, ids=lambda e: f"{e['stages']}x{e['chunks']} {e['micro']} {e['stage']}")
def test_orders_are_those_of_paddle(entry: dict[str, int]) -> None:
    """Section 7.2, get_static_scheduler(), recorded with Paddle 3.3.1."""
    order = plan_order(entry["stages"], entry["stage"], entry["micro"], num_chunks=entry["chunks"])
    assert as_text(order, num_chunks=entry["chunks"]) == entry["order"]


@given(st.integers(1, 6), st.integers(1, 20), st.integers(1, 3), st.sampled_from(["1F1B", "F-then-B"]))
def test_no_stage_waits_forever(num_stages: int, num_micro: int, num_chunks: int, mode: str) -> None:
    """Study 6, order lists: each action once, backward after forward, an end with strict waiting, bounded inputs."""
    num_chunks = num_chunks if num_stages > 1 else 1
    orders = [plan_order(num_stages, s, num_micro, num_chunks=num_chunks, mode=mode) for s in range(num_stages)]
    check_orders(orders, num_chunks=num_chunks)
    if num_chunks == 1 and mode == "1F1B":
        assert [most_live(order) for order in orders] == [min(num_stages - s, num_micro) for s in range(num_stages)]


def test_wrong_orders_are_found() -> None:
    """Study 3, who waits for whom: what the check is for."""
    orders = [plan_order(2, stage, 2) for stage in range(2)]
    swapped = [orders[0], (orders[1][2], orders[1][3], orders[1][0], orders[1][1])]
    with pytest.raises(ValueError, match="would wait forever: stage 0"):
        check_orders(swapped)
    with pytest.raises(ValueError, match="twice"):
        check_orders([(*orders[0], orders[0][0]), orders[1]])
    with pytest.raises(ValueError, match="before its forward"):
        check_orders([orders[0][::-1], orders[1]])
    with pytest.raises(ValueError, match="does not run each"):
        check_orders([orders[0], orders[1][:2]])
    with pytest.raises(ValueError, match="does not run each"):
        check_orders([(MicroStep("f", 0, 0),), (MicroStep("f", 0, 0),)])
