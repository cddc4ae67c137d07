"""Which tests of a large family are slow, and which are long."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pytest


def sampled(values: Sequence[Any], sample: Collection[Any] | None = None) -> list[Any]:
    """Returns test parameters: those of ``sample``, by default every second one, are slow, the others long."""
    chosen = values[::2] if sample is None else sample
    assert set(chosen) <= set(values)
    return [pytest.param(one, marks=pytest.mark.slow if one in chosen else pytest.mark.long) for one in values]
