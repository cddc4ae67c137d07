"""Serves predictions over HTTP while the model trains: rows come from a publisher, the network from an export.

    curl -d '{"ids": [[...]], "dense": [[...]]}' http://127.0.0.1:8000/predict

answers ``{"probability": [...], "step": ...}``: for each sample the probability of a late flight (a click), and the
step of training that the rows hold at least. It needs neither the servers nor the workers of the job.
"""

from __future__ import annotations

import argparse
import threading
from functools import partial
from http.server import ThreadingHTTPServer
from typing import Any

import torch
from json_requests import answering

from fleet.errors import FleetError
from fleet.ps import Predictor, Reader


def predict(predictor: Predictor, body: Any) -> dict[str, Any]:
    """Returns probabilities for the samples of ``body``, and the step of the rows."""
    ids = torch.tensor(body["ids"], dtype=torch.int64)
    dense = torch.tensor(body["dense"], dtype=torch.float32)
    positions = predictor.reader.position  # before: newer rows may come during the prediction
    probability = torch.sigmoid(predictor(ids, dense))
    return {"probability": probability.tolist(), "step": min(position.step for position in positions.values())}


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
        handler = answering("/predict", partial(predict, predictor))
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
