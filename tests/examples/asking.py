"""Requests to the services of the examples."""

from __future__ import annotations

import json
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen


def ask(url: str, body: Any) -> tuple[int, dict[str, Any]]:
    """Returns the status and the answer to a POST of ``body``."""
    try:
        with urlopen(Request(url, json.dumps(body).encode()), timeout=30) as answer:
            return answer.status, json.load(answer)
    except HTTPError as error:
        with error:
            return error.code, json.load(error)
