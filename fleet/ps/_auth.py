"""Mutual proof of the job secret at the start of a connection, before any other byte is looked at.

Challenge and answer by HMAC-SHA256: the server sends a nonce, the worker answers with its own nonce and its proof,
the server answers with its proof. A wrong or missing secret closes the connection. This proves who the peer is at
the start; it does not hide or protect the bytes that follow from someone on the path: for that there is TLS.
"""

from __future__ import annotations

import hmac
import secrets

from fleet.errors import ConfigError, PSError
from fleet.ps._transport import Connection, ConnectionLost, TransferTimeout, is_loopback

__all__ = ["AuthenticationError", "check_bind", "prove_to_server", "prove_to_worker"]

_GREETING = b"FLEET-PS-AUTH-1\0"
_NONCE_BYTES = 32
_PROOF_BYTES = 32


class AuthenticationError(PSError):
    """The peer did not prove that it knows the job secret."""


def check_bind(endpoint: str, secret: bytes | None) -> None:
    """Raises ``ConfigError`` when ``endpoint`` can be reached from other machines and there is no secret."""
    if not secret and not is_loopback(endpoint):
        raise ConfigError(
            f"the parameter server would listen on {endpoint!r} without a job secret: anyone who reaches that "
            "address could read and change the model. Make a secret with\n"
            '  export FLEET_JOB_SECRET=$(python -c "import secrets; print(secrets.token_hex(32))")\n'
            "and set the same value for every server and worker, or listen on 127.0.0.1."
        )


def prove_to_worker(connection: Connection, secret: bytes | None, timeout_s: float) -> None:
    """Does the server's half; raises :class:`AuthenticationError` when the worker's proof is wrong."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    connection.send([_GREETING + nonce], timeout_s)
    answer = bytearray(_NONCE_BYTES + _PROOF_BYTES)
    connection.receive(memoryview(answer), timeout_s, timeout_s)
    theirs, proof = bytes(answer[:_NONCE_BYTES]), bytes(answer[_NONCE_BYTES:])
    if not hmac.compare_digest(proof, _proof(secret, b"worker", nonce, theirs)):
        raise AuthenticationError(f"{connection.peer} does not know the job secret; its connection was closed.")
    connection.send([_proof(secret, b"server", theirs, nonce)], timeout_s)


def prove_to_server(connection: Connection, secret: bytes | None, timeout_s: float) -> None:
    """Does the worker's half; raises :class:`AuthenticationError` when the server's proof is wrong or withheld."""
    greeting = bytearray(len(_GREETING) + _NONCE_BYTES)
    try:
        connection.receive(memoryview(greeting), timeout_s, timeout_s)
    except TransferTimeout as error:
        raise TransferTimeout(f"{error} A server that has FLEET_PS_CERT needs FLEET_PS_CA at its workers.") from None
    if not greeting.startswith(_GREETING):
        raise AuthenticationError(f"{connection.peer} is not a parameter server of this version.")
    nonce, theirs = secrets.token_bytes(_NONCE_BYTES), bytes(greeting[len(_GREETING) :])
    connection.send([nonce + _proof(secret, b"worker", theirs, nonce)], timeout_s)
    proof = bytearray(_PROOF_BYTES)
    try:
        connection.receive(memoryview(proof), timeout_s, timeout_s)
    except ConnectionLost:
        raise AuthenticationError(
            f"parameter server {connection.peer} closed the connection: this worker has another job secret, or "
            "none. Start servers and workers with the same one."
        ) from None
    if not hmac.compare_digest(bytes(proof), _proof(secret, b"server", nonce, theirs)):
        raise AuthenticationError(f"parameter server {connection.peer} does not know the job secret.")


def _proof(secret: bytes | None, role: bytes, challenge: bytes, own: bytes) -> bytes:
    return hmac.digest(secret or b"\0", _GREETING + role + challenge + own, "sha256")
