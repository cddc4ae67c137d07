"""KubeflowTracker: reports the progress of a TrainJob to Kubeflow Trainer, which shows it in that TrainJob's status.

[Note: What is reported]
Kubeflow Trainer (2.2 and newer, feature gate TrainJobStatus) gives the pods of a TrainJob an address, a CA file and a
file with a token. The body of a request is ``{"trainerStatus": {...}}``, at most 64 KiB, with progressPercentage (0 to
100), estimatedRemainingSeconds, up to 256 metrics with names and values of up to 64 characters, and lastUpdatedTime. A
request replaces the status as a whole.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import ssl
import threading
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fleet.common.exit_status import EXIT
from fleet.common.log import LOGGER
from fleet.common.own_thread import OwnThread
from fleet.env import Environment
from fleet.errors import ConfigError
from fleet.trackers.progress import Progress
from fleet.trackers.tracker import Tracker

_URL = "KUBEFLOW_TRAINER_SERVER_URL"
_CA = "KUBEFLOW_TRAINER_SERVER_CA_CERT"
_TOKEN = "KUBEFLOW_TRAINER_SERVER_TOKEN"
_PERIOD_S = 5.0
_AFTER_FAILURE_S = 30.0
_LIMIT_S = 5.0  # of one operation on the socket
_LAST_LIMIT_S = 8.0  # for the last status, when training is over
_MOST_METRICS = 256
_LONGEST = 64  # characters of a metric's name or value
_LARGEST = 2**31 - 1
_MOST_BYTES = 1 << 16


class KubeflowTracker(Tracker):
    """Keeps the newest values and sends them from a separate thread, at most once in five seconds.

    Args:
        progress: of the run; where its length is not known, no progress is reported.
        environment: names the endpoint.

    Raises:
        ConfigError: the address cannot be used, or the file with the token is not named.
    """

    def __init__(self, progress: Progress, environment: Environment) -> None:
        self._progress = progress
        self._host, self._port, self._path = _split(environment.str(_URL))
        if not environment.has(_TOKEN):
            raise ConfigError(
                f"{_URL} is set and {_TOKEN} is not: it takes the path of the file with the token. Set it, or unset "
                f"{_URL} to report nothing."
            )
        self._token_path = Path(environment.str(_TOKEN))
        self._ca = environment.raw(_CA)
        self._values: dict[str, float] = {}
        self._named: set[str] = set()
        self._wake = threading.Condition()
        self._is_new = self._is_over = False
        self._pid = os.getpid()
        self._thread: OwnThread | None = None

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Notes the values; they replace those of the same names."""
        with self._wake:
            for name, value in values.items():
                # The newest values stand last: of more than 256, or of a body too long, the oldest are left out.
                self._values.pop(name, None)
                self._values[name] = value
            self._progress.note(step)
            self._is_new = True
            self._wake.notify()
        if self._thread is None:
            self._thread = OwnThread(self._send_on, name="fleet-kubeflow")
            self._thread.start()
        self._thread.check()

    def close(self) -> None:
        """Sends the last status: 100 % only where every step was made and no error ends the process."""
        if self._thread is None or os.getpid() != self._pid:  # a process that was forked has no thread
            return
        with self._wake:
            self._is_over = True
            self._wake.notify()
        self._thread.join(_LAST_LIMIT_S)
        if self._thread.is_alive():
            self._name("silence", f"no answer within {_LAST_LIMIT_S:g} s")

    def _send_on(self) -> None:
        wait_s = 0.0
        while True:
            with self._wake:
                # First the pause since the last request, which only the end of the run cuts short; then new values.
                self._wake.wait_for(lambda: self._is_over, wait_s)
                self._wake.wait_for(lambda: self._is_over or self._is_new)
                is_over = self._is_over
                self._is_new = False
                body = self._body(is_over)
            wait_s = _PERIOD_S if self._send(body) else _AFTER_FAILURE_S
            if is_over:
                return

    def _body(self, is_over: bool) -> bytes:
        """Returns the body of a request with the current status."""
        progress = self._progress
        step = progress.step
        status: dict[str, Any] = {"lastUpdatedTime": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")}
        if progress.total_steps:
            is_done = is_over and step >= progress.total_steps and not EXIT.code
            status["progressPercentage"] = 100 if is_done else min(99, 100 * step // progress.total_steps)
            left_s = 0.0 if is_done else progress.left_s(step)
            if left_s is not None:
                status["estimatedRemainingSeconds"] = min(int(left_s), _LARGEST)
        named = {"step": f"{step}", **{name: f"{value:.6g}" for name, value in self._values.items() if name}}
        metrics = [{"name": name[:_LONGEST], "value": value} for name, value in named.items()][-_MOST_METRICS:]
        while True:
            body = json.dumps({"trainerStatus": {**status, "metrics": metrics}}).encode()
            if len(body) <= _MOST_BYTES:
                return body
            metrics = metrics[len(metrics) // 4 + 1 :]

    def _send(self, body: bytes) -> bool:
        """Sends ``body``; returns whether the endpoint accepted it. Each kind of failure is logged once."""
        try:
            code, reason = self._post(body)
        except Exception as error:  # whatever sockets, TLS and files raise
            self._name(type(error).__name__, f"{type(error).__name__}: {error}")
            return False
        is_taken = 200 <= code < 300
        if not is_taken:
            self._name(f"{code}", f"it answers {code} {reason}".rstrip())
        return is_taken

    def _post(self, body: bytes) -> tuple[int, str]:
        # The token and the CA are read each time, because the kubelet renews the files. http.client follows no redirect
        # and asks no proxy, so the token reaches nobody else.
        token = self._token_path.read_text(encoding="ascii").strip()
        if re.fullmatch(r"[!-~]+", token) is None:
            raise ValueError(f"{_TOKEN}={self._token_path} holds no token")
        try:
            context = ssl.create_default_context(cafile=self._ca)
        except OSError as error:  # its text names no file
            raise ValueError(f"{_CA}={self._ca} cannot be read as a CA file ({error})") from error
        connection = http.client.HTTPSConnection(self._host, self._port, timeout=_LIMIT_S, context=context)
        try:
            headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
            connection.request("POST", self._path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.reason[:80]
        finally:
            connection.close()

    def _name(self, kind: str, what: str) -> None:
        if kind not in self._named:
            self._named.add(kind)
            LOGGER.warning(
                f"The status of this TrainJob does not reach Kubeflow Trainer at {self._host}:{self._port}: {what}. "
                "Training goes on, and the next status is tried later."
            )


def _split(url: str) -> tuple[str, int, str]:
    """Returns host, port and path of the endpoint; raises ConfigError for anything but an https address."""
    try:
        parts = urlsplit(url)
        port = parts.port or 443
    except ValueError:
        parts = urlsplit("")
        port = 0
    is_plain = parts.username is None and re.fullmatch(r"[!-~]+", url) is not None and not parts.fragment
    if parts.scheme != "https" or not parts.hostname or not is_plain:
        raise ConfigError(
            f"{_URL} is {url!r:.200}; it takes an https address with a host and without a user, as in "
            f"https://trainer.example:8082/status. Correct it, or unset it to report nothing."
        )
    return parts.hostname, port, f"{parts.path or '/'}{'?' if parts.query else ''}{parts.query}"
