"""Seals of messages: the launcher's wire and the parameter server's stand on them (study 5.3)."""

from __future__ import annotations

import hmac

from fleet.common.sealing import MessageSeals, prove, same


def test_a_seal_is_hmac_over_direction_number_and_content() -> None:
    for key in (b"k" * 32, b"k" * 64):
        seals = MessageSeals(key, is_server=True)
        assert seals.sent(b"ab", bytearray(b"c")) == hmac.digest(key, b"s" + (1).to_bytes(8, "big") + b"abc", "sha256")
        assert seals.sent() == hmac.digest(key, b"s" + (2).to_bytes(8, "big"), "sha256")
        assert seals.received(memoryview(b"x")) == hmac.digest(key, b"c" + (1).to_bytes(8, "big") + b"x", "sha256")


def test_both_ends_agree_and_no_seal_fits_twice() -> None:
    server, worker = MessageSeals(b"k", is_server=True), MessageSeals(b"k", is_server=False)
    seals = [worker.sent(b"m"), worker.sent(b"m"), server.sent(b"m")]
    assert [server.received(b"m"), server.received(b"m"), worker.received(b"m")] == seals
    assert len({*seals, MessageSeals(b"other", is_server=False).sent(b"m")}) == 4


def test_a_proof_depends_on_secret_and_text() -> None:
    assert len({prove(b"a", b"t"), prove(b"b", b"t"), prove(b"a", b"u")}) == 3
    assert same(prove(b"a", b"t"), prove(b"a", b"t"))
