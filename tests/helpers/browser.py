"""Headless Chromium, driven through its debugging pipe: pages are opened, read and clicked as a person would."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["CHROMIUM", "Browser"]

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_LIMIT_S = 90.0


class Browser:
    """One browser with one page, and what it said on its console.

    Args:
        folder: for its profile.
    """

    def __init__(self, folder: Path) -> None:
        in_read, self._in = os.pipe()
        self._out, out_write = os.pipe()
        command = (
            f'exec "$0" --headless --no-sandbox --disable-gpu --hide-scrollbars --user-data-dir="$1" '
            f"--remote-debugging-pipe about:blank 3<&{in_read} 4>&{out_write}"
        )
        self._process = subprocess.Popen(
            ["bash", "-c", command, str(CHROMIUM), str(folder)],
            pass_fds=(in_read, out_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(in_read)
        os.close(out_write)
        self._buffer, self._number, self._session = b"", 0, ""
        self.console: list[str] = []
        target = self._send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._send(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, 9)
        self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def open(self, address: str) -> None:
        """Goes to an address."""
        self._send("Page.navigate", url=address)

    def value(self, code: str) -> Any:
        """Returns what a line of JavaScript is."""
        found = self._send("Runtime.evaluate", expression=code, returnByValue=True)
        return found["result"].get("value")

    def wait_for(self, code: str) -> Any:
        """Returns what a line of JavaScript is as soon as that is true."""
        deadline = time.monotonic() + _LIMIT_S
        while not (found := self.value(code)):
            assert time.monotonic() < deadline, f"{code} did not become true: {self.value('document.body.outerHTML')}"
            time.sleep(0.05)
        return found

    def point_at(self, selector: str) -> None:
        """Moves the pointer to the middle of the first element that ``selector`` finds."""
        box = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        x, y = (self.value(f"{box}.{edge} + {box}.{size} / 2") for edge, size in (("left", "width"), ("top", "height")))
        self._send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def set_screen(self, width: int, height: int, scheme: str) -> None:
        """Has a screen of this size that prefers light or dark."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._send("Emulation.setDeviceMetricsOverride", **size)
        self._send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, path: Path) -> None:
        """Writes what is seen as PNG."""
        import base64

        path.write_bytes(base64.b64decode(self._send("Page.captureScreenshot", captureBeyondViewport=False)["data"]))

    def _send(self, method: str, **params: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._in, json.dumps(message).encode() + b"\0")
        for answer in self._messages():
            if answer.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled"):
                self.console.append(json.dumps(answer["params"]))
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
        raise AssertionError("unreachable")

    def _messages(self) -> Iterator[dict[str, Any]]:
        deadline = time.monotonic() + _LIMIT_S
        while True:
            while b"\0" in self._buffer:
                text, _, self._buffer = self._buffer.partition(b"\0")
                yield json.loads(text)
            assert time.monotonic() < deadline, "the browser does not answer"
            if select.select([self._out], [], [], 1.0)[0]:
                data = os.read(self._out, 1 << 20)
                assert data, "the browser has ended"
                self._buffer += data
