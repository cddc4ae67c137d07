"""Whether etcd is silent for everybody: launchers ask each other."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from fleet.launch.membership.outage import ContactAnswer, ask, nobody_has_contact

SECRET = b"secret"


class Peer:
    """A launcher that answers what ``has_contact`` says."""

    def __init__(self, name: str) -> None:
        self.has_contact = True
        self.answer = ContactAnswer("127.0.0.1", SECRET, name, lambda: self.has_contact)
        self.place = ("127.0.0.1", self.answer.port, name)


@pytest.fixture
def peers() -> Iterator[list[Peer]]:
    made = [Peer("a"), Peer("b")]
    yield made
    for peer in made:
        peer.answer.close()


def test_outage_is_proved_only_when_nobody_has_contact(peers: list[Peer]) -> None:
    """004-18: a node alone with its silence may be cut off, so it does not count as an outage."""
    places = [peer.place for peer in peers]
    assert not nobody_has_contact(places, SECRET)
    peers[0].has_contact = False
    assert not nobody_has_contact(places, SECRET)
    peers[1].has_contact = False
    assert nobody_has_contact(places, SECRET)
    assert not nobody_has_contact([], SECRET)


def test_a_launcher_that_does_not_answer_counts_against_the_outage(peers: list[Peer]) -> None:
    peers[0].has_contact = peers[1].has_contact = False
    peers[1].answer.close()
    assert ask(*peers[1].place, SECRET) is None
    assert not nobody_has_contact([peer.place for peer in peers], SECRET)


def test_what_is_no_address_counts_against_the_outage() -> None:
    for host, port in (("a" * 70, 1), ("127.0.0.1", 1 << 20), ("127.0.0.1\0", 1), ("\udc80", 1)):
        assert ask(host, port, "name", b"secret") is None


def test_an_answer_without_the_secret_counts_for_nothing(peers: list[Peer]) -> None:
    peers[0].has_contact = False
    assert ask(*peers[0].place, b"other") is None
    assert not nobody_has_contact([peers[0].place], b"other")


def test_a_question_that_is_relayed_to_another_node_is_not_answered(peers: list[Peer]) -> None:
    """A, which is cut off, asks B; who sits between them passes the question to A's own port."""
    peers[0].has_contact = False
    _, own_port, _ = peers[0].place
    assert ask("127.0.0.1", own_port, "b", SECRET) is None
    assert not nobody_has_contact([("127.0.0.1", own_port, "b")], SECRET)
    assert nobody_has_contact([peers[0].place], SECRET)


def test_a_stranger_stops_nothing(peers: list[Peer]) -> None:
    """One that connects and says nothing is left after half a second; the next one is answered."""
    with socket.create_connection(peers[0].place[:2]):
        answers: list[bool | None] = []
        asking = threading.Thread(target=lambda: answers.append(ask(*peers[0].place, SECRET)))
        asking.start()
        asking.join(2.0)
    assert answers in ([True], [None])
    assert ask(*peers[0].place, SECRET) is True
