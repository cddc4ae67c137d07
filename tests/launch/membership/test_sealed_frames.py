"""Proofs and seals (study 5.3)."""

from __future__ import annotations

import pytest

from fleet.launch.membership import sealed_frames as _frames
from fleet.launch.membership.sealed_frames import Seals, WireError, proof, same


def ends(secret: bytes = b"s") -> tuple[Seals, Seals]:
    return Seals(secret, b"1" * 16, b"2" * 16, is_service=False), Seals(secret, b"1" * 16, b"2" * 16, is_service=True)


def opened(seals: Seals, frame: bytes) -> dict[str, object]:
    header, body = frame[: _frames.HEADER_BYTES], frame[_frames.HEADER_BYTES :]
    assert seals.body_bytes(header) == len(body)
    return seals.unpack(header, body)


def test_round_trip() -> None:
    client, service = ends()
    assert opened(service, client.pack({"a": 1})) == {"a": 1}
    assert opened(client, service.pack({"b": "x"})) == {"b": "x"}


def test_proof_depends_on_everything() -> None:
    base = proof(b"s", b"client", b"1" * 16, b"2" * 16)
    others = [
        proof(b"t", b"client", b"1" * 16, b"2" * 16),
        proof(b"s", b"service", b"1" * 16, b"2" * 16),
        proof(b"s", b"client", b"3" * 16, b"2" * 16),
        proof(b"s", b"client", b"1" * 16, b"3" * 16),
    ]
    assert base not in others
    assert len(base) == _frames.PROOF_BYTES
    assert same(base, bytes(base))


def test_frame_cannot_be_replayed_reflected_or_changed() -> None:
    client, service = ends()
    frame = client.pack({"a": 1})
    with pytest.raises(WireError, match="seal"):
        opened(client, frame)
    client, service = ends()
    frame = client.pack({"a": 1})
    opened(service, frame)
    with pytest.raises(WireError, match="seal"):
        opened(service, frame)
    client, service = ends()
    with pytest.raises(WireError, match="seal"):
        opened(service, client.pack({"a": 1})[:-2] + b"2}")


def test_other_secret_is_refused() -> None:
    with pytest.raises(WireError, match="seal"):
        opened(ends(b"other")[1], ends()[0].pack({}))


def test_size_is_checked_before_the_body_is_read() -> None:
    client, service = ends()
    with pytest.raises(WireError, match="cap"):
        service.body_bytes((_frames.MAX_FRAME_BYTES + 1).to_bytes(4, "big") + b"\0" * 32)
    with pytest.raises(WireError, match="cap"):
        client.pack({"a": "x" * (_frames.MAX_FRAME_BYTES + 1)})


def test_nonces_differ() -> None:
    assert _frames.make_nonce() != _frames.make_nonce()
