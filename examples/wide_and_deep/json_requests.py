"""Requests over HTTP whose bodies and answers are JSON, for the services of the examples."""

from __future__ import annotations

import json
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any

from fleet.errors import ConfigError, FleetError

MOST_BYTES = 1 << 24


def answering(path: str, respond: Callable[[Any], dict[str, Any]]) -> type[JsonRequests]:
    """Returns the handler of a server that answers ``POST`` of ``path``.

    Args:
        path: with its slash.
        respond: gets the body and returns the answer. A ConfigError of it, as of a program that takes other inputs, is
            a 400, another FleetError, as when Redis is away, a 503; errors of Python and torch are a 400.
    """
    return type("Requests", (JsonRequests,), {"only_path": path, "respond": staticmethod(respond)})


class JsonRequests(BaseHTTPRequestHandler):
    """Answers ``POST`` of one path; :func:`answering` says which, and with what."""

    only_path: str
    respond: Callable[[Any], dict[str, Any]]

    def do_POST(self) -> None:
        """Answers, or says why there is no answer."""
        if self.path != self.only_path:
            self.answer(404, {"error": f"POST {self.only_path} is all there is."})
            return
        try:
            length = int(self.headers.get("Content-Length", 0))
            body = json.loads(self.rfile.read(max(0, min(length, MOST_BYTES))))  # below 0 it would read for ever
            found = type(self).respond(body)
        except ConfigError as error:
            self.answer(400, {"error": str(error)})
        except FleetError as error:
            self.answer(503, {"error": str(error)})
        except (ValueError, KeyError, TypeError, RuntimeError, AttributeError, AssertionError) as error:
            self.answer(400, {"error": f"{type(error).__name__}: {error}"})
        else:
            self.answer(200, found)

    def answer(self, status: int, content: dict[str, Any]) -> None:
        """Sends ``content`` as JSON."""
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Leaves the terminal to errors."""
