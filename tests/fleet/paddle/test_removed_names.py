"""Names of older releases say what to use instead."""

from __future__ import annotations

import pytest

import fleet
from fleet.paddle.removed_names import REMOVED_NAMES


@pytest.mark.parametrize("name", REMOVED_NAMES)
def test_a_removed_name_says_what_to_use(name: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(fleet, name)
    assert str(caught.value) == f"fleet.{name} does not exist: {REMOVED_NAMES[name]}."
    assert name not in fleet.__all__
