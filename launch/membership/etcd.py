"""A thin layer over etcd3gw: several endpoints, a user and password, revisions, and errors with their cause.

The client speaks etcd's JSON gateway. This module adds the rest: a token that is renewed, another endpoint when one
does not answer, the revision of a read, and a compare-and-set that takes a lease. One :class:`EtcdStore` belongs to one
thread; its connections are not shared. No proxy variable and no variable that names a certificate bundle is looked at.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import json
import re
from collections.abc import Collection, Iterator
from typing import Any

from etcd3gw import Etcd3Client
from etcd3gw.exceptions import ConnectionFailedError, ConnectionTimeoutError, Etcd3Exception, InternalServerError

from fleet.common.addresses import split_endpoint
from fleet.errors import LaunchError
from fleet.launch.membership.etcd_address import EtcdAddress
from fleet.launch.membership.store import View

_CONNECT_S = 2.0
_REFUSED = f"[Errno {errno.ECONNREFUSED}]"  # this machine's own words; etcd's gateway has others for its inside
_ERRNO = re.compile(r"\[Errno -?\d+\] ([^'\")]+)")
_TLS = re.compile(r"\[(?:SSL|X509)[^\]]*\] ([^(]+?) \(_ssl")
_TOKEN_ENDED = ("invalid auth token", "user name is empty", "revision of auth store is old")
_OUTAGE = ("no leader", "leader changed", "timed out", "too many requests", "etcdserver: stopped")


class EtcdUnreachableError(LaunchError):
    """No endpoint answered; ``is_down`` says that every one of them refused the connection: nothing listens there."""

    def __init__(self, text: str, *, is_down: bool) -> None:
        super().__init__(text)
        self.is_down = is_down


class EtcdRefusedError(LaunchError):
    """etcd answered and did not take the request: wrong user or password, no permission."""


class EtcdStore:
    """Requests to one etcd cluster, one at a time.

    Args:
        address: endpoints, user, TLS files.
        timeout_s: how long one endpoint may take to answer before the next is asked.
    """

    def __init__(self, address: EtcdAddress, *, timeout_s: float) -> None:
        self._address = address
        self._clients = [_client(address, endpoint, timeout_s) for endpoint in address.endpoints]
        self._has_token = [False] * len(self._clients)
        self._first = 0
        self._has_answered = False

    # -- keys ---------------------------------------------------------------------------------------------------

    def read(self, prefix: str) -> View:
        """Returns every key under ``prefix`` with the revision of the answer; values are read from JSON.

        A value that is no JSON belongs to somebody else and is left out, but for its text.
        """
        answer = self._call("kv/range", {"key": _pack(prefix), "range_end": _pack_end(prefix)})
        view = View(int(answer["header"]["revision"]))
        for item in answer.get("kvs", ()):
            with contextlib.suppress(ValueError, RecursionError):
                key = _unpack(item["key"])[len(prefix) :]
                text = _unpack(item.get("value", ""))
                view.texts[key] = text
                view.created[key] = int(item["create_revision"])
                view.values[key] = json.loads(text)
        return view

    def put(self, key: str, text: str, lease: int | None = None) -> None:
        """Sets ``key``; with ``lease`` it goes when the lease does. EtcdRefusedError: the lease is gone already."""
        self._call("kv/put", {"key": _pack(key), "value": _pack(text), **_leased(lease)})

    def swap(self, key: str, old_text: str | None, text: str | None, lease: int | None = None) -> bool:
        """Sets ``key`` (or deletes it, for None) if its text is still ``old_text`` (None: absent); says if it did."""
        packed = _pack(key)
        if old_text is None:
            compare = {"key": packed, "target": "CREATE", "result": "EQUAL", "create_revision": 0}
        else:
            compare = {"key": packed, "target": "VALUE", "result": "EQUAL", "value": _pack(old_text)}
        if text is None:
            change: dict[str, Any] = {"request_delete_range": {"key": packed}}
        else:
            change = {"request_put": {"key": packed, "value": _pack(text), **_leased(lease)}}
        return bool(self._call("kv/txn", {"compare": [compare], "success": [change], "failure": []}).get("succeeded"))

    def claim(self, key: str, text: str, lease: int, own: Collection[int]) -> bool:
        """Sets ``key`` unless it is there under another lease than those of ``own``; returns whether it did."""
        if self.swap(key, None, text, lease):
            return True
        found = self._call("kv/range", {"key": _pack(key)}).get("kvs", ())
        if any(int(item.get("lease", 0)) not in own for item in found):
            return False
        self.put(key, text, lease)
        return True

    def delete(self, prefix: str) -> int:
        """Deletes every key under ``prefix`` and returns how many there were."""
        answer = self._call("kv/deleterange", {"key": _pack(prefix), "range_end": _pack_end(prefix)})
        return int(answer.get("deleted", 0))

    # -- leases -------------------------------------------------------------------------------------------------

    def grant(self, ttl_s: int) -> int:
        """Returns a new lease of ``ttl_s`` seconds."""
        return int(self._call("lease/grant", {"TTL": ttl_s, "ID": 0})["ID"])

    def keep_alive(self, lease: int) -> bool:
        """Renews a lease; returns False when it is gone."""
        return int(self._call("lease/keepalive", {"ID": lease}).get("result", {}).get("TTL", 0)) > 0

    def revoke(self, lease: int) -> None:
        """Ends a lease, and with it its keys."""
        self._call("lease/revoke", {"ID": lease})

    # -- hints --------------------------------------------------------------------------------------------------

    def watch(self, prefix: str, idle_s: float) -> Iterator[None]:
        """Yields once for each change under ``prefix`` until the connection ends or was silent for ``idle_s``.

        It is a hint: a change may be missed, so its users also read at intervals.
        """
        client = self._clients[self._first]
        create = {"create_request": {"key": _pack(prefix), "range_end": _pack_end(prefix)}}
        with contextlib.suppress(OSError, Etcd3Exception, ValueError, AttributeError):
            self._authenticate(self._first)
            with client.session.post(
                client.get_url("watch"), json=create, stream=True, timeout=(_CONNECT_S, idle_s)
            ) as stream:
                for line in stream.iter_lines(chunk_size=1):
                    if b'"events"' in line:
                        yield None

    def close(self) -> None:
        """Closes the connections."""
        for client in self._clients:
            client.session.close()

    # -- requests -----------------------------------------------------------------------------------------------

    def _call(self, path: str, payload: dict[str, Any]) -> dict[str, Any]:
        errors = []
        for step in range(len(self._clients)):
            index = (self._first + step) % len(self._clients)
            try:
                answer = self._post(index, path, payload)
            except (
                ConnectionFailedError,
                ConnectionTimeoutError,
                InternalServerError,
                ValueError,
                RecursionError,
            ) as error:
                errors.append(_words(error))
                continue
            self._first = index
            self._has_answered = True
            return answer
        is_down = all(_REFUSED in text for text in errors)
        expects_tls = self._address.ca is None and not self._has_answered
        what = "nothing listens there" if is_down else _short(errors[-1], expects_tls=expects_tls)
        raise EtcdUnreachableError(f"etcd at {self._address.text} does not answer ({what}).", is_down=is_down)

    def _post(self, index: int, path: str, payload: dict[str, Any]) -> dict[str, Any]:
        client = self._clients[index]
        for attempt in (1, 2):
            self._authenticate(index)
            try:
                answer = client.post(client.get_url(path), json=payload)
                if not isinstance(answer, dict) or not answer.keys() & {"header", "result"}:
                    # A proxy may answer with any JSON, so the shape of the answer is checked as well.
                    raise ValueError(f"what answers there is not etcd: {answer!r:.100}")
                return answer
            except Etcd3Exception as error:
                if isinstance(error, ConnectionFailedError | ConnectionTimeoutError):
                    raise
                text = _words(error)
                if attempt == 1 and self._address.user and any(phrase in text for phrase in _TOKEN_ENDED):
                    self._has_token[index] = False
                    continue
                if isinstance(error, InternalServerError) or any(phrase in text.lower() for phrase in _OUTAGE):
                    raise ConnectionFailedError(text) from error
                raise EtcdRefusedError(_refusal(self._address, text)) from error
        raise AssertionError("the loop returns or raises")

    def _authenticate(self, index: int) -> None:
        if not self._address.user or self._has_token[index]:
            return
        client = self._clients[index]
        client.session.headers.pop("Authorization", None)
        payload = {"name": self._address.user, "password": self._address.password}
        try:
            token = client.post(client.get_url("auth/authenticate"), json=payload)["token"]
        except Etcd3Exception as error:
            if isinstance(error, ConnectionFailedError | ConnectionTimeoutError | InternalServerError):
                raise
            raise EtcdRefusedError(_refusal(self._address, _words(error))) from error
        client.session.headers["Authorization"] = token
        self._has_token[index] = True


def _client(address: EtcdAddress, endpoint: str, timeout_s: float) -> Etcd3Client:
    host, port = split_endpoint(endpoint, "The address of etcd")
    client = Etcd3Client(
        host=host,
        port=port,
        protocol="http" if address.ca is None else "https",
        ca_cert=address.ca,
        cert_cert=address.certificate,
        cert_key=address.key,
        timeout=timeout_s,
    )
    # The environment's REQUESTS_CA_BUNDLE would win over the job's own authority, and its proxies do not lead to etcd.
    client.session.trust_env = False
    return client


def _words(error: Exception) -> str:
    """Returns etcd's answer, or how the connection failed; never the request, which may hold a password."""
    text = getattr(error, "detail_text", None) or f"{error}"
    with contextlib.suppress(ValueError, TypeError, AttributeError, RecursionError):
        data = json.loads(text)
        text = data.get("error") or data.get("message") or text
    return f"{text}".strip()


def _short(text: str, *, expects_tls: bool) -> str:
    """Returns the cause in a chain of connection errors, and the variable to check where that is certain."""
    if "timed out" in text:
        return "timed out"
    if (tls := _TLS.search(text)) is not None:
        # An alert is the other side's refusal; the other words mean that the files of this side cannot be used.
        is_own = any(word in tls[1] for word in ("alert", "PEM", "key values"))
        return f"TLS: {tls[1].rstrip('.')}; check {'FLEET_ETCD_CERT and FLEET_ETCD_KEY' if is_own else 'FLEET_ETCD_CA'}"
    if expects_tls and "closed connection" in text:
        return "it closed the connection; does it speak TLS? Then set FLEET_ETCD_CA"
    found = _ERRNO.search(text)
    return found[1].strip() if found else text[:200]


def _refusal(address: EtcdAddress, text: str) -> str:
    step = "Check the user (FLEET_ETCD_USER) and its permissions."
    if "CommonName" in text:
        step = (
            "Where users are on, etcd's gateway takes no client certificate with a common name: let FLEET_ETCD_CERT be "
            "one whose subject has none, as openssl makes with -subj /O=launcher."
        )
    return f"etcd at {address.text} refused a request: {text.rstrip('.')}. {step}"


def _leased(lease: int | None) -> dict[str, int]:
    return {} if lease is None else {"lease": lease}


def _pack(text: str) -> str:
    return base64.b64encode(text.encode(errors="surrogateescape")).decode("ascii")


def _pack_end(prefix: str) -> str:
    """Returns the first key behind all that start with ``prefix``; a prefix here ends in an ASCII character."""
    return _pack(prefix[:-1] + chr(ord(prefix[-1]) + 1))


def _unpack(text: str) -> str:
    return base64.b64decode(text).decode(errors="surrogateescape")
