"""A node's standing contact with a real etcd: its key, its lease, silence, and when it counts as cut off."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from secrets import token_hex

import pytest

from fleet.launch.membership.etcd_address import EtcdAddress
from tests.helpers import etcd as helper
from tests.helpers.etcd import Etcd

pytestmark = pytest.mark.skipif(bool(helper.missing()), reason=helper.missing())
if not helper.missing():
    from fleet.launch.membership.etcd import EtcdUnreachableError
    from fleet.launch.membership.etcd_meeting import EtcdContact

TTL_S = 2


class Place:
    """An etcd and contacts with it; ``outage`` is what the other nodes would say."""

    def __init__(self, server: Etcd) -> None:
        self.server, self.prefix = server, f"/t{token_hex(8)}/"
        self.outage = False
        self.contacts: list[EtcdContact] = []

    def contact(self, name: str, ttl_s: int = TTL_S) -> EtcdContact:
        one = EtcdContact(
            EtcdAddress(endpoints=(self.server.endpoint,)),
            prefix=self.prefix,
            key=name,
            ttl_s=ttl_s,
            is_outage=lambda: self.outage,
        )
        self.contacts.append(one)
        return one

    def close(self) -> None:
        for one in self.contacts:
            one.close()


@pytest.fixture
def place(etcd: Etcd) -> Iterator[Place]:
    """Contacts with the etcd of all tests."""
    one = Place(etcd)
    yield one
    one.close()


@pytest.fixture
def own_place(tmp_path: Path) -> Iterator[Place]:
    """Contacts with an etcd that the test may stop."""
    with Etcd(tmp_path) as server:
        one = Place(server)
        yield one
        one.close()


def until(condition: Callable[[], object], limit_s: float = 8.0) -> float:
    """Waits for ``condition`` and returns how long that took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < limit_s, "in vain"
        time.sleep(0.01)
    return time.monotonic() - began


def test_published_keys_are_seen_and_go_at_the_end(place: Place) -> None:
    one, two = place.contact("one"), place.contact("two")
    one.publish("1")
    assert until(lambda: two.view().values.get("one") == 1) < 1.0, "by the hint, not by the period"
    one.publish("2")
    until(lambda: two.view().values == {"one": 2})
    assert one.swap("world", None, "{}")
    assert not two.swap("world", None, "{}")
    place.contacts.remove(one)
    one.close("world")
    assert until(lambda: two.view().values == {}) < 1.0, "the last one takes the record with it"


def test_record_stays_while_others_are_there(place: Place) -> None:
    one, two = place.contact("one"), place.contact("two")
    two.publish("2")
    assert one.swap("world", None, "{}")
    until(lambda: "two" in one.view().values)
    place.contacts.remove(one)
    one.close("world")
    time.sleep(0.2)
    view = two.fresh_view()
    assert view is not None
    assert view.values == {"world": {}, "two": 2}


@pytest.mark.slow
def test_key_is_written_again_when_its_lease_was_lost(own_place: Place) -> None:
    """A frozen etcd ends all leases when it goes on; nobody is cut off when all were silent."""
    own_place.outage = True
    one = own_place.contact("one")
    one.publish("1")
    until(lambda: one.view().values == {"one": 1})
    own_place.server.freeze()
    until(one.silence)
    until(lambda: not one.has_contact())
    time.sleep(2 * TTL_S)
    assert not one.is_cut_off
    own_place.server.thaw()
    until(lambda: not one.silence())
    assert not one.trusts_absence(), "others may not have come back yet"
    until(lambda: one.view().values == {"one": 1})
    until(one.trusts_absence)


@pytest.mark.slow
def test_silence_cuts_off_within_the_lease_unless_it_is_proved(own_place: Place) -> None:
    """004-18, 004-19: a refused connection proves that etcd is down; a silent one proves nothing."""
    one = own_place.contact("one", ttl_s=3)
    one.publish("1")
    until(lambda: one.view().values == {"one": 1})
    own_place.server.kill()
    time.sleep(4.0)
    assert "nothing listens there" in one.silence()
    assert not one.is_cut_off
    own_place.server.start()
    until(lambda: not one.silence())
    own_place.server.freeze()
    assert until(lambda: one.is_cut_off) < 3.0
    own_place.server.thaw()
    until(lambda: not one.silence())
    one.rejoin()
    assert not one.is_cut_off


def test_nothing_at_the_address(tmp_path: Path) -> None:
    with pytest.raises(EtcdUnreachableError, match="does not answer"):
        EtcdContact(
            EtcdAddress(endpoints=(f"127.0.0.1:{helper.free_port()}",)),
            prefix="/t/",
            key="one",
            ttl_s=TTL_S,
            is_outage=lambda: False,
        )
