"""PageServer: serves the page of the job on the loopback interface to whoever has its token.

[Note: Who may read the page]
It shows logs, arguments and stacks, so it listens on 127.0.0.1 alone and answers nothing without the token of this
launch: as ``?token=`` (once; the answer is a cookie), as that cookie, or as ``Authorization: Bearer``. The Host header
has to be an address of this machine, so that no other site's name can be made to point here. The cookie is not sent
with a POST from another site, and no address changes the job.
"""

from __future__ import annotations

import hmac
import http.cookies
import ipaddress
import json
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from fleet.errors import LaunchError
from fleet.launch.page.job_view import JobView
from fleet.launch.page.page_html import Parts, changed, document, job_parts, process_parts

HOST = "127.0.0.1"
_PERIOD_S = 1.0
_LIMIT_S = 15.0  # for a request to come, and for an answer to be taken
_LAST_S = 1.0  # for the last changes to be sent
_MOST_CALLERS = 64
_PROCESS = re.compile(r"/process/([a-z_]+\.\d{1,9})")
_FILES = {"/page.css": "text/css", "/page.js": "text/javascript"}
_POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'"
)


class PageServer:
    """Serves ``view`` from the moment it is made until :meth:`close`.

    Args:
        view: what to show.
        port: to listen on; 0: a free one.

    Raises:
        LaunchError: the port is taken, or may not be used.
    """

    def __init__(self, view: JobView, port: int) -> None:
        self.view = view
        self.token = secrets.token_urlsafe(24)
        self._mark = secrets.token_hex(4)
        self.ended = threading.Event()
        try:
            self._server = _Server((HOST, port), self)
        except OSError as error:
            raise LaunchError(
                f"--page={port}: the page cannot listen on {HOST}:{port}: {error.strerror}. Choose another port, or "
                "--page=0 for a free one."
            ) from error
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.2,), name="page", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """The address of the page without its token."""
        return f"http://{HOST}:{self.port}/"

    @property
    def cookie(self) -> str:
        """The name of the cookie; browsers keep one jar for all ports of a host."""
        return f"fleet_page_{self._mark}"

    def parts(self, key: str, stacks: str = "") -> Parts | None:
        """Returns the parts of the page of the process ``key``, or those of the job when it is empty."""
        return process_parts(self.view, key, stacks) if key else job_parts(self.view)

    def close(self) -> None:
        """Sends what has changed to whoever looks, and stops listening."""
        self.ended.set()
        self._server.wait_for_callers(_LAST_S)
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], page: PageServer) -> None:
        self.page = page
        self._num_callers = 0
        self._strangers: dict[Any, None] = {}  # connections without a token so far, the oldest first
        self._counting = threading.Lock()
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Binds without looking up this machine's name, which may take long."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = HOST, self.server_address[1]

    def wait_for_callers(self, limit_s: float) -> None:
        """Waits until every caller has been answered, at most ``limit_s``."""
        deadline = time.monotonic() + limit_s
        while self._num_callers and time.monotonic() < deadline:
            time.sleep(0.01)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Gives a caller a thread while there is room; whoever has shown no token makes room, the oldest first."""
        with self._counting:
            has_room = len(self._strangers) > 0 or self._num_callers < _MOST_CALLERS
            if self._num_callers >= _MOST_CALLERS and has_room:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread reads the end and leaves
            self._num_callers += has_room
            if has_room:
                self._strangers[request] = None
        if has_room:
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def let_in(self, request: Any) -> None:
        """Keeps the connection of a caller who has shown the token."""
        with self._counting:
            self._strangers.pop(request, None)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answers one caller."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._counting:
                self._strangers.pop(request, None)
                self._num_callers -= 1

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing: a browser that goes away is none of the job's concern."""


class _Handler(BaseHTTPRequestHandler):
    timeout = _LIMIT_S
    server: _Server
    server_version, sys_version = "fleet", ""

    def log_message(self, format: str, *args: object) -> None:
        """Writes nothing."""

    def do_GET(self) -> None:  # noqa: N802
        """Answers with a page, its changes, or one of its files."""
        self._answer(self._get)

    def do_POST(self) -> None:  # noqa: N802
        """Answers with the page of a process and its stacks."""
        self._answer(self._post)

    def _answer(self, answer: Callable[[str, dict[str, list[str]]], None]) -> None:
        where = urlsplit(self.path)
        query = parse_qs(where.query)
        if not _is_here(self.headers.get("Host", "")):
            self._send(HTTPStatus.FORBIDDEN, "The page is served as 127.0.0.1 or localhost only.\n")
        elif (given := query.get("token", [""])[-1]) and self._is_token(given):
            page = self.server.page
            self.send_response(HTTPStatus.SEE_OTHER)
            self.send_header("Location", where.path if where.path.startswith("/process/") else "/")
            self.send_header("Set-Cookie", f"{page.cookie}={page.token}; Path=/; HttpOnly; SameSite=Lax")
            self._end_headers(0)
        elif not self._is_known():
            self._send(
                HTTPStatus.FORBIDDEN,
                "This page needs the token of its launch: open the whole address that the launcher printed.\n",
            )
        else:
            self.server.let_in(self.request)
            answer(where.path, query)

    def _get(self, path: str, query: dict[str, list[str]]) -> None:
        if path in _FILES:
            text = Path(__file__).with_name(path[1:]).read_text(encoding="utf-8")
            self._send(HTTPStatus.OK, text, _FILES[path])
        elif path == "/events":
            self._send_events(query.get("process", [""])[-1])
        elif path == "/":
            self._send_page("")
        elif found := _PROCESS.fullmatch(path):
            self._send_page(found[1])
        else:
            self._send(HTTPStatus.NOT_FOUND, "There is no such page.\n")

    def _post(self, path: str, query: dict[str, list[str]]) -> None:
        found = _PROCESS.fullmatch(path.removesuffix("/stacks")) if path.endswith("/stacks") else None
        origin = self.headers.get("Origin")
        if found is None:
            self._send(HTTPStatus.NOT_FOUND, "There is no such page.\n")
        elif origin is not None and urlsplit(origin).netloc != self.headers.get("Host"):
            self._send(HTTPStatus.FORBIDDEN, "This request comes from another site.\n")
        else:
            stacks = self.server.page.view.requests.ask(found[1].replace(".", " "))
            self._send_page(found[1], stacks)

    def _send_page(self, key: str, stacks: str = "") -> None:
        parts = self.server.page.parts(key, stacks)
        if parts is None:
            self._send(HTTPStatus.NOT_FOUND, f"This node has no process {key}.\n")
            return
        title = f"{key} of job" if key else "Job"
        events = f"/events?process={key}" if key else "/events"
        text = document(f"{title} {self.server.page.view.facts.job_id}", parts, events)
        self._send(HTTPStatus.OK, text, "text/html")

    def _send_events(self, key: str) -> None:
        """Sends what changes until the caller goes or the job ends; the stacks stay as they were asked for."""
        page = self.server.page
        if page.parts(key) is None:
            self._send(HTTPStatus.NOT_FOUND, f"This node has no process {key}.\n")
            return
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self._end_headers(None)
        before: Parts = {}
        while True:
            is_last = page.ended.wait(_PERIOD_S if before else 0)
            now = page.parts(key) or {}
            now.pop("stacks", None)
            news = json.dumps(changed(before, now))
            before = now
            with suppress(OSError):
                self.wfile.write(f"data: {news}\n\n".encode())
                self.wfile.flush()
                if not is_last:
                    continue
            return

    def _is_known(self) -> bool:
        scheme, _, bearer = self.headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._is_token(bearer.strip()):
            return True
        jar: http.cookies.SimpleCookie = http.cookies.SimpleCookie()
        with suppress(http.cookies.CookieError):
            jar.load(self.headers.get("Cookie", ""))
        cookie = jar.get(self.server.page.cookie)
        return cookie is not None and self._is_token(cookie.value)

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode("utf-8", "replace"), self.server.page.token.encode())

    def _send(self, status: HTTPStatus, text: str, kind: str = "text/plain") -> None:
        body = text.encode("utf-8", "replace")
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self._end_headers(len(body))
        if self.command != "HEAD":
            self.wfile.write(body)

    def _end_headers(self, num_bytes: int | None) -> None:
        if num_bytes is not None:
            self.send_header("Content-Length", f"{num_bytes}")
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", _POLICY)
        self.send_header("Referrer-Policy", "same-origin")  # with "no-referrer" a form sends no origin
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()


def _is_here(host: str) -> bool:
    """Returns whether a Host header names this machine as a browser on it, or at the end of a tunnel, does."""
    name = host.rpartition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
