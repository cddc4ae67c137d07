"""A stand-in for Kubeflow Trainer's status endpoint: HTTPS on the loopback interface, with a certificate of its own."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.helpers.certificates import make_certificate

__all__ = ["PATH", "SCHEMA", "StatusServer", "serve_status"]

PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/default/trainjobs/resnet/status"
# UpdateTrainJobStatusRequest of kubeflow/trainer, pkg/apis/trainer/v1alpha1/trainjob_types.go; unknown fields, which
# the server drops, are refused here.
SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["trainerStatus"],
    "additionalProperties": False,
    "properties": {
        "trainerStatus": {
            "type": "object",
            "required": ["lastUpdatedTime"],
            "additionalProperties": False,
            "properties": {
                "progressPercentage": {"type": "integer", "minimum": 0, "maximum": 100},
                "estimatedRemainingSeconds": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
                "lastUpdatedTime": {"type": "string", "pattern": r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$"},
                "metrics": {
                    "type": "array",
                    "maxItems": 256,
                    "items": {
                        "type": "object",
                        "required": ["name", "value"],
                        "additionalProperties": False,
                        "properties": {
                            "name": {"type": "string", "minLength": 1, "maxLength": 64},
                            "value": {"type": "string", "minLength": 1, "maxLength": 64},
                        },
                    },
                },
            },
        },
    },
}


@dataclass
class StatusServer:
    """What came, and what is answered; ``token`` is the one that is accepted."""

    url: str = ""
    token: str = "first"
    code: int = 200
    location: str = ""
    hold: threading.Event = field(default_factory=threading.Event)  # requests wait while it is clear
    bodies: list[dict[str, Any]] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def variables(self, folder: Path) -> dict[str, str]:
        """Returns the variables that name this server, with its token in ``folder``."""
        (folder / "token").write_text(f"{self.token}\n")
        return {
            "KUBEFLOW_TRAINER_SERVER_URL": self.url,
            "KUBEFLOW_TRAINER_SERVER_CA_CERT": str(folder / "cert.pem"),
            "KUBEFLOW_TRAINER_SERVER_TOKEN": str(folder / "token"),
        }


@contextmanager
def serve_status(folder: Path) -> Iterator[StatusServer]:
    """Yields a server; its certificate is ``cert.pem`` in ``folder``."""
    make_certificate(folder)
    state = StatusServer()
    state.hold.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            state.hold.wait(30)
            code = state.code if self.headers["Authorization"] == f"Bearer {state.token}" else 401
            code = 404 if self.path != PATH else code
            state.codes.append(code)
            state.sizes.append(len(body))
            if code == 200:
                state.bodies.append(json.loads(body))
            self.send_response(code)
            if state.location:
                self.send_header("Location", state.location)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    # The handshake in the thread of the request: a client that stops in it holds nobody else.
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    state.url = f"https://127.0.0.1:{server.server_port}{PATH}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield state
    finally:
        state.hold.set()
        server.shutdown()
        server.server_close()
        thread.join()
