"""A job of Paddle for ``recommenders.py``: one server and two workers, in its own environment."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path

from _ps_job import HERE, written
from _ps_standby import endpoint
from _ps_tables import NUM_WORKERS, Case, Worker

PADDLE, MODE = "Paddle 2.6.2, async", "async"  # its sync mode ends with a segmentation fault in its send_barrier


def paddle_job(case: Case, python: str, limit_s: float = 600) -> list[Worker]:
    """Runs a server and two workers with the interpreter ``python``; returns what the workers wrote, or nothing."""
    server, *workers = (endpoint() for _ in range(1 + NUM_WORKERS))
    roles = [{"TRAINING_ROLE": "PSERVER", "PADDLE_PORT": server.rpartition(":")[2]}]
    for rank, one in enumerate(workers):
        role = {"TRAINING_ROLE": "TRAINER", "PADDLE_TRAINER_ID": f"{rank}", "PADDLE_CURRENT_ENDPOINT": one}
        roles.append({**role, "PADDLE_PORT": one.rpartition(":")[2]})
    shared = {
        "PADDLE_PSERVERS_IP_PORT_LIST": server,
        "PADDLE_TRAINER_ENDPOINTS": ",".join(workers),
        "PADDLE_TRAINERS_NUM": f"{NUM_WORKERS}",
        "PADDLE_WITH_GLOO": "0",
        "POD_IP": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
    }
    with tempfile.TemporaryDirectory() as folder:
        settings = json.dumps({**case.settings(MODE), "folder": folder})
        processes = []
        for number, role in enumerate(roles):
            with Path(folder, f"log.{number}").open("w") as log:
                command = [python, str(HERE / "_recommender_paddle.py"), settings]
                environment = {**os.environ, **shared, **role}
                processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
        try:
            codes = [process.wait(limit_s) for process in processes[1:]]
        except subprocess.TimeoutExpired:
            codes = [-1]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if not any(codes):
            return written(folder)
        logs = [Path(folder, f"log.{number}").read_text()[-1000:] for number in range(len(roles))]
        print("\n".join([f"{PADDLE}: left out, its workers ended with {codes}", *logs]))
        return []
