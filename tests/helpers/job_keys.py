"""A client of the key-value service for one job: keys without their prefix, values instead of texts."""

from __future__ import annotations

import json
from typing import Any

from fleet.launch.membership.kv_client import KeyValueClient
from fleet.launch.membership.store import View


class JobKeys:
    """``client`` and the keys under ``prefix``."""

    def __init__(self, address: tuple[str, int], secret: bytes, *, prefix: str, ttl_s: float) -> None:
        self.client, self._prefix = KeyValueClient(address, secret, ttl_s=ttl_s), prefix
        self.connect, self.close = self.client.connect, self.client.close

    def read(self) -> View:
        """Everything under the prefix."""
        return self.client.read(self._prefix)

    def wait(self, revision: int, timeout_s: float) -> View:
        """The same as soon as it changes."""
        return self.client.wait(self._prefix, revision, timeout_s)

    def put(self, key: str, value: Any, *, leased: bool = False) -> None:
        """Sets a key; None deletes it."""
        self.client.put(self._prefix + key, _text(value), leased=leased)

    def swap(self, key: str, old_text: str | None, value: Any, *, leased: bool = False) -> bool:
        """Sets a key whose text is ``old_text``."""
        return self.client.swap(self._prefix + key, old_text, _text(value), leased=leased)


def _text(value: Any) -> str | None:
    return None if value is None else json.dumps(value, sort_keys=True)
