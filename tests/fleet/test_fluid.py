"""fleet.fluid: gone, and says what to use."""

from __future__ import annotations

import importlib

import pytest


@pytest.mark.parametrize("name", ["fleet.fluid", "fleet.fluid.incubate.fleet.collective"])
def test_the_1x_namespace_explains_itself(name: str) -> None:
    """003-05: an error that explains, not a bare "no module named"."""
    with pytest.raises(ImportError, match="fleet.base.role_maker"):
        importlib.import_module(name)


def test_from_import_explains_too() -> None:
    """003-05."""
    with pytest.raises(ImportError, match="fluid namespace was removed"):
        from fleet import fluid  # noqa: F401
