"""fleet.incubate: gone, and says what to use."""

from __future__ import annotations

import importlib

import pytest


@pytest.mark.parametrize("name", ["fleet.incubate", "fleet.incubate.fleet.base.role_maker"])
def test_the_incubate_namespace_explains_itself(name: str) -> None:
    """003-05."""
    with pytest.raises(ImportError, match="fleet.base.role_maker"):
        importlib.import_module(name)
