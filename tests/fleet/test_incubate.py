"""fleet.incubate: the path to layers of experts; the rest is gone, and says what to use."""

from __future__ import annotations

import importlib

import pytest

import fleet


@pytest.mark.parametrize("name", ["fleet.incubate.fleet", "fleet.incubate.fleet.base.role_maker"])
def test_the_incubate_namespace_explains_itself(name: str) -> None:
    """003-05."""
    with pytest.raises(ImportError, match="fleet.base.role_maker"):
        importlib.import_module(name)


def test_layers_of_experts_have_their_old_path() -> None:
    """Surface 12: paddle.incubate.distributed.models.moe."""
    found = importlib.import_module("fleet.incubate.distributed.models.moe")
    assert found.MoELayer is fleet.moe.MoELayer
    assert set(found.__all__) == set(fleet.moe.__all__) - {"global_gather", "global_scatter"}
