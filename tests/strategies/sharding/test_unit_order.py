"""Which exchanges of units are compared with the other workers before they start."""

from __future__ import annotations

import pytest

from fleet.errors import ConfigError, RendezvousError
from fleet.strategies.sharding.unit_order import UnitOrder


def test_exchanges_that_repeat_themselves_need_no_meeting() -> None:
    """Issue 36: the check costs nothing in a loop that repeats itself, also one that takes two branches in turns."""
    met: list[str] = []
    order = UnitOrder(met.append)
    first, second = order.add(), order.add()
    assert first != second
    for step in range(9):
        met.clear()
        for exchange in ((first,), (second,), (second, 3), (first, 1 + step % 2)):
            order.check(exchange, lambda e=exchange: f"{e}")  # type: ignore[misc]
        assert bool(met) is (step < 3), step
    order.check((first, 1), lambda: "another")
    assert met == ["another"]


@pytest.mark.parametrize("kind", [ConfigError, RendezvousError])
def test_what_others_do_not_do_is_refused_with_the_option(kind: type[Exception]) -> None:
    def meet(call: str) -> None:
        raise kind(f"{call}: the others do not")

    order = UnitOrder(meet)
    with pytest.raises(kind, match=r"gathering 'a': the others do not\n.*find_unused_parameters = True"):
        order.check((order.add(),), lambda: "gathering 'a'")
