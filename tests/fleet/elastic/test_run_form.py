"""The structure of what resume() relies on: what differs is named by its place."""

from __future__ import annotations

from typing import Any

import pytest

from fleet.elastic.state import check_form
from fleet.errors import CheckpointError

RUN: dict[str, Any] = {
    "epoch": 1,
    "step": 2,
    "world_size": 1,
    "k_steps": 1,
    "extra": {},
    "kinds": {},
    "degrees": {},
    "replicas": 1,
    "workers": [{"data": None, "place": {}}],
}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"epoch": True}, r"type bool at \['epoch'\], where type int is required"),
        ({"workers": []}, r"holds nothing at \['workers'\]"),
        ({"workers": [{"data": None}]}, r"lacks \['workers'\]\[0\]\['place'\]"),
        ({"extra": "x"}, r"type str at \['extra'\], where type dict is required"),
    ],
)
def test_what_differs_is_named(changes: dict[str, Any], reason: str) -> None:
    check_form(RUN, "run", "step-1: run")
    with pytest.raises(CheckpointError, match=f"step-1: run .*{reason}"):
        check_form({**RUN, **changes}, "run", "step-1: run")
