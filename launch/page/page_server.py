"""PageServer: serves the page of the job on the loopback interface to callers that have its token.

[Note: Who may read the page]
It shows logs, arguments and stacks, so it listens on 127.0.0.1 alone and answers nothing without the token of this
launch: as ``?token=`` (once; the answer is a cookie), as that cookie, or as ``Authorization: Bearer``. The Host header
has to be an address of this machine, so that no other site's name can be made to point here, and an Origin has to be
this page. No address changes the job.

A browser sends a cookie to every port of its host, also to the servers of other users. So the cookie is not the token
but a number of this page alone, and its path is a word that nobody else knows: a browser sends it to no address that
lacks the word. The addresses of a browser begin with it (``/WORD/process/worker.0``); a program with the token leaves
it out.
"""

from __future__ import annotations

import contextlib
import hmac
import http.client
import json
import re
import secrets
import shlex
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import Any
from urllib.parse import parse_qs

from fleet.common.addresses import is_loopback
from fleet.common.own_thread import OwnThread
from fleet.common.plain_files import create
from fleet.errors import LaunchError
from fleet.launch.membership.callers import Seldom, accept
from fleet.launch.page.job_view import JobFacts, JobView
from fleet.launch.page.page_html import Parts, changed, document, job_parts, process_parts
from fleet.launch.plan.records import LaunchConfig
from fleet.launch.processes.logs import LaunchLog
from fleet.launch.processes.redact import redact_arguments

HOST = "127.0.0.1"
_PERIOD_S = 1.0
_LIMIT_S = 15.0  # for a request to come, and for an answer to be taken
_LAST_S = 1.0  # for the last changes to be sent
_MOST_CALLERS = 64
_MOST_HEAD_BYTES = 65_536
_HOST = re.compile(r"(?:(localhost|[0-9.]+)|\[([0-9a-fA-F:.]+)\])(?::[0-9]{1,5})?")
_PROCESS = re.compile(r"/process/([a-z_]+\.\d{1,9})")
_FILES = {"/page.css": "text/css", "/page.js": "text/javascript"}
_POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'"
)


class PageServer:
    """Serves ``view`` from the moment it is made until :meth:`close`.

    Args:
        view: the job to show.
        port: to listen on; 0: a free one.
        say: receives a line about each request that the page could not answer.

    Raises:
        LaunchError: the port is taken, or may not be used.
    """

    def __init__(self, view: JobView, port: int, say: Callable[[str], None] = lambda line: None) -> None:
        self.view = view
        self.token = secrets.token_urlsafe(24)
        self.session = secrets.token_urlsafe(24)
        self.base = f"/{secrets.token_urlsafe(12)}"
        self.say = Seldom(say)
        self.ended = threading.Event()
        try:
            self._server = _Server((HOST, port), self)
        except OSError as error:
            raise LaunchError(
                f"--page={port}: the page cannot listen on {HOST}:{port}: {error.strerror}. Choose another port, or "
                "--page=0 for a free one."
            ) from error
        self.port: int = self._server.server_address[1]
        self._thread = OwnThread(self._server.serve_forever, 0.2, name="page", say=say)
        self._thread.start()

    @property
    def address(self) -> str:
        """The address of the page without its token."""
        return f"http://{HOST}:{self.port}/"

    @property
    def cookie(self) -> str:
        """The name of the cookie; browsers keep one jar for all ports of a host."""
        return f"fleet_page_{self.port}"

    def parts(self, key: str, base: str, stacks: str = "") -> Parts | None:
        """Returns the parts of the page of the process ``key``, or those of the job when it is empty."""
        return process_parts(self.view, key, stacks, base) if key else job_parts(self.view, base)

    def close(self) -> None:
        """Sends the last changes to the open pages, and stops listening."""
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
        # A caller may leave between its announcement and accept(), which would then wait for the next one.
        self.socket.setblocking(False)
        self.server_name = HOST
        self.server_port = self.server_address[1]

    def wait_for_callers(self, limit_s: float) -> None:
        """Waits until every caller has been answered, at most ``limit_s``."""
        deadline = time.monotonic() + limit_s
        while self._num_callers and time.monotonic() < deadline:
            time.sleep(0.01)

    def get_request(self) -> tuple[socket.socket, Any]:
        """Returns a connection; raises OSError where nobody comes, also for want of descriptors."""
        found = accept(self.socket, self._make_room)
        if found is None:
            raise ConnectionAbortedError("nobody is at the door")
        return found

    def process_request(self, request: Any, client_address: Any) -> None:
        """Gives a caller a thread while there is room; callers without a token make room, the oldest first."""
        if self._num_callers >= _MOST_CALLERS and not self._make_room():
            self.shutdown_request(request)
            return
        with self._counting:
            self._num_callers += 1
            self._strangers[request] = None
        try:
            super().process_request(request, client_address)
        except BaseException:
            # The system may have no more threads; the caller is let go, and the server stays.
            self._leave(request)
            raise

    def _make_room(self) -> bool:
        """Ends the connection of the oldest caller who has shown no token; returns whether there was one."""
        with self._counting:
            oldest = next(iter(self._strangers), None)
            if oldest is not None:
                del self._strangers[oldest]
                with suppress(OSError):
                    # The thread of the oldest stranger reads the end of its connection and leaves.
                    oldest.shutdown(socket.SHUT_RDWR)
        return oldest is not None

    def _leave(self, request: Any) -> None:
        with self._counting:
            self._strangers.pop(request, None)
            self._num_callers -= 1

    def let_in(self, request: Any) -> None:
        """Keeps the connection of a caller who has shown the token."""
        with self._counting:
            self._strangers.pop(request, None)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answers one caller."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._leave(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs a failed request, seldom; a browser that goes away is no concern of the job."""
        error = sys.exc_info()[1]
        kind = type(error).__name__
        if not isinstance(error, OSError):
            self.page.say(kind, f"The page could not answer a request, and the job goes on: {kind}: {error}")


class _Handler(BaseHTTPRequestHandler):
    timeout = _LIMIT_S
    server: _Server
    server_version, sys_version = "fleet", ""
    _base = ""  # stands before the paths of a caller that came with it

    def setup(self) -> None:
        """Bounds the bytes and the time of a caller that has not shown the token yet."""
        super().setup()
        self.rfile = _Head(self.rfile)  # type: ignore[assignment]

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answers a request that is none, or of another method."""
        self._send(HTTPStatus(code), f"{HTTPStatus(code).phrase}.\n")

    def log_message(self, format: str, *args: object) -> None:
        """Writes nothing."""

    def do_GET(self) -> None:  # noqa: N802
        """Answers with a page, its changes, or one of its files."""
        self._answer(self._get)

    def do_POST(self) -> None:  # noqa: N802
        """Answers with the page of a process and its stacks."""
        self._answer(self._post)

    def _answer(self, answer: Callable[[str, dict[str, list[str]]], None]) -> None:
        page = self.server.page
        path, _, words = self.path.partition("?")
        query = parse_qs(words)
        if path.startswith(f"{page.base}/"):
            self._base = page.base
            path = path.removeprefix(page.base)
        hosts, origins = (self.headers.get_all(name, []) for name in ("Host", "Origin"))
        if len(hosts) != 1 or not _is_here(hosts[0]):
            self._send(HTTPStatus.FORBIDDEN, "The page is served as 127.0.0.1 or localhost only.\n")
        elif any(origin.partition("://")[2] != hosts[0] for origin in origins):
            self._send(HTTPStatus.FORBIDDEN, "This request comes from another site.\n")
        elif (given := query.get("token", [""])[-1]) and _is_same(given, page.token):
            self.send_response(HTTPStatus.SEE_OTHER)
            self.send_header("Location", page.base + (path if _PROCESS.fullmatch(path) else "/"))
            cookie = f"{page.cookie}={page.session}; Path={page.base}/; HttpOnly; SameSite=Lax"
            self.send_header("Set-Cookie", cookie)
            self._end_headers(0)
        elif not self._is_known():
            self._send(
                HTTPStatus.FORBIDDEN,
                "This page needs the token of its launch: open the whole address that the launcher printed.\n",
            )
        else:
            self.server.let_in(self.request)
            answer(path, query)

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
        if found is None:
            self._send(HTTPStatus.NOT_FOUND, "There is no such page.\n")
        else:
            stacks = self.server.page.view.requests.ask(found[1].replace(".", " "))
            self._send_page(found[1], stacks)

    def _send_page(self, key: str, stacks: str = "") -> None:
        try:
            parts = self.server.page.parts(key, self._base, stacks)
        except Exception:
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, "The page cannot be shown now; the launcher's log says why.\n")
            raise
        if parts is None:
            self._send(HTTPStatus.NOT_FOUND, f"This node has no process {key}.\n")
            return
        title = f"{key} of job" if key else "Job"
        events = f"/events?process={key}" if key else "/events"
        text = document(f"{title} {self.server.page.view.facts.job_id}", parts, events, self._base)
        self._send(HTTPStatus.OK, text, "text/html")

    def _send_events(self, key: str) -> None:
        """Sends the changes until the caller goes or the job ends; the stacks stay as they were asked for."""
        page = self.server.page
        if page.parts(key, self._base) is None:
            self._send(HTTPStatus.NOT_FOUND, f"This node has no process {key}.\n")
            return
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self._end_headers(None)
        before: Parts = {}
        while True:
            is_last = page.ended.wait(_PERIOD_S if before else 0)
            now = page.parts(key, self._base) or {}
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
        page = self.server.page
        if scheme.lower() == "bearer" and _is_same(bearer.strip(), page.token):
            return True
        # By hand: those of other programs on this host come along, in whatever form.
        cookies = [one.strip().partition("=") for one in self.headers.get("Cookie", "").split(";")]
        return any(name == page.cookie and _is_same(value, page.session) for name, _, value in cookies)

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
        # With "no-referrer" a browser sends no Origin with a form, and the form would be refused.
        self.send_header("Referrer-Policy", "same-origin")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()


def _is_here(host: str) -> bool:
    """Returns whether a Host header names this machine as a browser on it, or at the end of a tunnel, does."""
    found = _HOST.fullmatch(host)
    return found is not None and is_loopback(found[1] or found[2])


def _is_same(given: str, secret: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), secret.encode())


class _Head:
    """Reads the lines before the body of a request, in all no more than a browser sends."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._left = _MOST_HEAD_BYTES

    def readline(self, limit: int = -1) -> bytes:
        if self._left <= 0:
            # The base class answers this error with 431.
            raise http.client.LineTooLong("head of a request")
        line: bytes = self._file.readline(self._left + 1 if limit < 0 else min(limit, self._left + 1))
        self._left -= len(line)
        return line

    def close(self) -> None:
        self._file.close()


@contextlib.contextmanager
def open_page(config: LaunchConfig, log: LaunchLog) -> Iterator[JobView | None]:
    """Serves the page while the block runs; yields the view that it shows, None where no page is asked for.

    Raises:
        LaunchError: the port is taken.
    """
    if config.page is None:
        yield None
        return
    config.page.folder.mkdir(mode=0o700)
    facts = JobFacts(
        job_id=config.job_id,
        mode=config.mode,
        command=shlex.join([config.script.name, *redact_arguments(config.script.args)]),
        launcher_log=config.log_file,
    )
    view = JobView(facts, config.page.folder)
    try:
        server = PageServer(view, config.page.port, log.warning)
        try:
            log.file_only(f"The page of the job is at {server.address}")
            log.count_shown(1)
            # Standard output may be closed; the job goes on without the line.
            with contextlib.suppress(OSError):
                print(_address_line(config, server), flush=True)
            yield view
        finally:
            server.close()
    finally:
        view.requests.close_pipe()


def _address_line(config: LaunchConfig, server: PageServer) -> str:
    """Returns the line with the address, for a terminal with the token: a file might be read by others."""
    if sys.stdout is not None and sys.stdout.isatty():
        return f"Page of the job: {server.address}?token={server.token}"
    path = config.pod.scratch_path / "page_token"
    with create(path, 0o600) as file:
        file.write(f"{server.token}\n".encode())
    return f'Page of the job: {server.address} (open what this prints: echo "{server.address}?token=$(cat {path})")'
