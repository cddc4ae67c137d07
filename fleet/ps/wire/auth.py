"""Mutual proof of the job secret at the start of a connection, before any other byte is read.

With HMAC-SHA256 keyed by the secret, each proof over both nonces and the server's endpoint::

    server -> worker   greeting, nonce, endpoint of the server
    worker -> server   nonce, proof("worker")
    server -> worker   proof("server")

Both derive from the same values a key for messages, see :mod:`fleet.ps.wire.sealed`. A wrong or missing secret
closes the connection. Whoever relays a handshake has no key, and no server is taken for another one.
"""

from __future__ import annotations

import secrets

from fleet.common.sealing import PROOF_BYTES, prove, same
from fleet.errors import ConfigError, PSError
from fleet.ps.wire.sealed import Sealed
from fleet.ps.wire.transport import Connection, ConnectionLost, TransferTimeout

_GREETING, _FULL = b"FLEET-PS-AUTH-2\0", b"FLEET-PS-FULL-2\0"
_NONCE_BYTES = 32
_SIZE_BYTES = 2
_MAX_ENDPOINT_BYTES = 512
GREETING_BYTES = len(_GREETING) + _NONCE_BYTES + _SIZE_BYTES


class AuthenticationError(PSError):
    """The peer did not prove that it knows the job secret."""


def check_secret(endpoint: str, secret: bytes | None) -> bytes:
    """Returns ``secret``; raises ``ConfigError`` without one, on loopback too."""
    if not secret:
        raise ConfigError(
            f"parameter server {endpoint!r} without a job secret: anyone who reaches that address (on this machine, "
            "every user) could read and change the model. Make a secret with\n"
            '  export FLEET_JOB_SECRET=$(python -c "import secrets; print(secrets.token_hex(32))")\n'
            "and set the same value for every server and worker."
        )
    return secret


def prove_to_worker(connection: Connection, endpoint: str, secret: bytes, timeout_s: float) -> Sealed:
    """Runs the server's half; raises :class:`AuthenticationError` when the worker's proof is wrong."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    name = endpoint.encode()
    connection.send([_GREETING + nonce + len(name).to_bytes(_SIZE_BYTES, "big") + name], timeout_s)
    answer = bytearray(_NONCE_BYTES + PROOF_BYTES)
    connection.receive(memoryview(answer), timeout_s, timeout_s)
    base = nonce + bytes(answer[:_NONCE_BYTES]) + name
    if not same(bytes(answer[_NONCE_BYTES:]), _proof(secret, b"worker", base)):
        raise AuthenticationError(f"{connection.peer} does not know the job secret; its connection was closed.")
    connection.send([_proof(secret, b"server", base)], timeout_s)
    return Sealed(connection, _proof(secret, b"connection", base), is_server=True)


def prove_to_server(connection: Connection, endpoint: str, secret: bytes, timeout_s: float) -> Sealed:
    """Runs the worker's half; raises :class:`AuthenticationError` when the server's proof is wrong or withheld.

    ``endpoint`` is the server that this worker wants to reach, as its list spells it.
    """
    peer = f"parameter server {connection.peer}"
    nonce = _read_greeting(connection, endpoint, timeout_s)
    own = secrets.token_bytes(_NONCE_BYTES)
    name = endpoint.encode()
    base = nonce + own + name
    proof = bytearray(PROOF_BYTES)
    connection.send([own + _proof(secret, b"worker", base)], timeout_s)
    try:
        connection.receive(memoryview(proof), timeout_s, timeout_s)
    except ConnectionLost:
        raise AuthenticationError(
            f"{peer} closed the connection: this worker has another job secret, or none. Start servers and workers "
            "with the same one."
        ) from None
    if not same(bytes(proof), _proof(secret, b"server", base)):
        raise AuthenticationError(f"{peer} does not know the job secret.")
    return Sealed(connection, _proof(secret, b"connection", base), is_server=False)


def turn_away(connection: Connection, timeout_s: float) -> None:
    """Tells a newcomer that the server is full."""
    connection.send([_FULL + bytes(_NONCE_BYTES + _SIZE_BYTES)], timeout_s)


def _read_greeting(connection: Connection, endpoint: str, timeout_s: float) -> bytes:
    """Returns the server's nonce."""
    greeting = bytearray(GREETING_BYTES)
    peer = f"parameter server {connection.peer}"
    try:
        connection.receive(memoryview(greeting), timeout_s, timeout_s)
    except TransferTimeout as error:
        raise TransferTimeout(f"{error} If the server has FLEET_PS_CERT, its workers need FLEET_PS_CA.") from None
    if greeting.startswith(_FULL):
        raise ConnectionLost(
            f"{peer} has reached its limit of connections. Raise its FLEET_PS_MAX_CONNECTIONS, or add servers."
        )
    size = int.from_bytes(greeting[-_SIZE_BYTES:], "big")
    if not greeting.startswith(_GREETING) or size > _MAX_ENDPOINT_BYTES:
        raise AuthenticationError(f"{peer} is not a parameter server of this version.")
    name = bytearray(size)
    connection.receive(memoryview(name), timeout_s, timeout_s)
    if name != endpoint.encode():
        raise AuthenticationError(
            f"the list of this worker has {endpoint!r}, but the server that answers there calls itself "
            f"{bytes(name).decode(errors='replace')!r}. Spell the servers alike in the list of every process "
            "(PADDLE_PSERVERS_IP_PORT_LIST). If they are, a stranger is relaying the connection."
        )
    return bytes(greeting[len(_GREETING) : -_SIZE_BYTES])


def _proof(secret: bytes, role: bytes, base: bytes) -> bytes:
    return prove(secret, _GREETING + role + b"\0" + base)
