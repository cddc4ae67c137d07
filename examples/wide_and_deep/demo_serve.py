"""Trains, publishes and serves at once, and prints how the prediction for a few flights changes meanwhile.

Three processes that know each other only by folders and HTTP: the job (a server and a worker), ``serve.py``, and this
one, which asks it every second and ends when the job does.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from data import open_data
from processes import running, wait_for

HERE = Path(__file__).parent


def ask(url: str, ids: Any, dense: Any) -> dict[str, Any]:
    """Returns the server's answer for some samples."""
    body = json.dumps({"ids": ids.tolist(), "dense": dense.tolist()}).encode()
    with urlopen(Request(url, body), timeout=30) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def main() -> None:
    """Runs the demonstration; returns when training has ended and its last rows are served."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for logs, rows and exports; what is there is replaced")
    parser.add_argument("--data", default="flights", help="as for train_published.py (default: %(default)s)")
    parser.add_argument("--epochs", default="3", help="passes over the data (default: %(default)s)")
    parser.add_argument("--max-batches", default="300", help="end each pass after this many (default: %(default)s)")
    args = parser.parse_args()
    shutil.rmtree(args.folder, ignore_errors=True)
    args.folder.mkdir(parents=True)
    rows, export = args.folder / "rows", args.folder / "export"
    command: list[str | Path] = [sys.executable, "-m", "fleet.launch", "--server_num=1", "--worker_num=1", "--log_dir"]
    command += [args.folder / "log", HERE / "train_published.py", "--layers", "128", "64", "--data", args.data]
    command += ["--epochs", args.epochs, "--max-batches", args.max_batches, "--publish", rows, "--export", export]
    environment = {**os.environ, "FLEET_PS_FOLDER": str(args.folder / "journal")}

    test = open_data(args.data).test
    ids, dense, label = test[:1000]
    chosen = [int((label == 1).nonzero()[0]), int((label == 0).nonzero()[0])]  # a late flight, and one in time
    with running(*command, env=environment, stdout=subprocess.DEVNULL) as job:
        wait_for(export / "export.json", job, args.folder / "log")
        wait_for(rows / "MANIFEST.json", job, args.folder / "log")
        with running(sys.executable, HERE / "serve.py", export, rows, "--port=0", stdout=subprocess.PIPE) as server:
            assert server.stdout is not None
            url = server.stdout.readline().strip()
            print("seconds   step  probability for a sample of label 1 / of label 0", flush=True)
            began = time.monotonic()
            ended = False
            while not ended:
                ended = job.poll() is not None
                time.sleep(1.0)  # after the end: until the reader has the last rows
                answer = ask(url, ids[chosen], dense[chosen])
                one, zero = answer["probability"]
                seconds = time.monotonic() - began
                print(f"{seconds:7.1f}  {answer['step']:5}  {one:.4f} / {zero:.4f}", flush=True)
        if job.returncode:
            raise SystemExit(f"Training failed; its log is in {args.folder / 'log'}.")


if __name__ == "__main__":
    main()
