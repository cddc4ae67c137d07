"""The checks that workers of one model see the same rows."""

from __future__ import annotations

import pytest

from fleet.strategies.tensor_parallel import equal_inputs


@pytest.mark.parametrize("name", ["_is_equal", "on_any", "check_forms", "first_workers"])
def test_the_checks_are_not_compiled(name: str) -> None:
    """With to_static each worker compiled their exchanges at a moment of its own, and a job of four stopped there."""
    assert getattr(equal_inputs, name)._torchdynamo_disable
