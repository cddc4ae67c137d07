"""Serves predictions over HTTP while the model trains: rows come from a publisher, the network from an export.

    curl -d '{"ids": [[...]], "dense": [[...]]}' http://127.0.0.1:8000/predict

answers ``{"probability": [...], "step": ...}``: for each sample the probability of a late flight (a click), and the
step of training that the rows hold at least. It needs neither the servers nor the workers of the job.
"""

from __future__ import annotations

import argparse
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

from fleet.errors import ConfigError, FleetError
from fleet.ps import Predictor, Reader

MOST_BYTES = 1 << 24


class Requests(BaseHTTPRequestHandler):
    """Answers ``POST /predict``."""

    predictor: Predictor

    def do_POST(self) -> None:
        """Answers with probabilities, or with the reason why there are none."""
        if self.path != "/predict":
            self.answer(404, {"error": "POST /predict is all there is."})
            return
        try:
            length = int(self.headers.get("Content-Length", 0))
            body = json.loads(self.rfile.read(max(0, min(length, MOST_BYTES))))  # below 0 it would read for ever
            ids = torch.tensor(body["ids"], dtype=torch.int64)
            dense = torch.tensor(body["dense"], dtype=torch.float32)
            positions = self.predictor.reader.position  # before: newer rows may come during the prediction
            probability = torch.sigmoid(self.predictor(ids, dense))
        except ConfigError as error:  # the program takes other shapes
            self.answer(400, {"error": str(error)})
        except FleetError as error:  # Redis is away, for instance
            self.answer(503, {"error": str(error)})
        except (ValueError, KeyError, TypeError, RuntimeError, AssertionError) as error:
            self.answer(400, {"error": f"{type(error).__name__}: {error}"})
        else:
            step = min(position.step for position in positions.values())
            self.answer(200, {"probability": probability.tolist(), "step": step})

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


def follow(predictor: Predictor, every_s: float, stop: threading.Event) -> None:
    """Takes up newer exports until ``stop``; the reader follows the rows itself."""
    while not stop.wait(every_s):
        try:
            predictor.refresh()
        except FleetError as error:
            print(f"the older network stays: {error}", flush=True)


def main() -> None:
    """Serves until it is interrupted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("export", metavar="DIR", help="what train_published.py --export writes")
    parser.add_argument(
        "rows", metavar="SOURCE", help="what train_published.py --publish writes: a folder, or redis://; or ps://"
    )
    parser.add_argument("--port", type=int, default=8000, help="(default: %(default)s; 0: any free one)")
    args = parser.parse_args()
    torch.set_num_threads(1)  # one sample is too little work for more
    stop = threading.Event()
    with Reader(args.rows).follow(every_s=0.5) as reader:
        predictor = Predictor(args.export, reader)
        threading.Thread(target=follow, args=(predictor, 1.0, stop), daemon=True).start()
        handler = type("Handler", (Requests,), {"predictor": predictor})
        with ThreadingHTTPServer(("127.0.0.1", args.port), handler) as server:
            print(f"http://127.0.0.1:{server.server_port}/predict", flush=True)
            try:
                server.serve_forever()
            except KeyboardInterrupt:
                pass
            finally:
                stop.set()


if __name__ == "__main__":
    main()
