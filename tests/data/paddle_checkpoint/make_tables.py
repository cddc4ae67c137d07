"""Records saves of Paddle 2.6.2's parameter server: python make_tables.py FOLDER.

For each rule it starts a server and a worker, which makes six steps on the keys 0 to 9 of a table of 4 columns, and
saves. In RULE.npz, ``mode0`` to ``mode3`` are the rows that ``fleet.save_persistables(mode=...)`` wrote, one mode after
the other, as text; ``names`` the names of the files of each mode that have rows, of 1000; ``dense`` the text of the
dense table (``b`` [1], ``w`` [4, 1]); ``rows`` what the trainer pulled after the saves.
"""

from __future__ import annotations

import gzip
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

RULES = {
    "adam": "SparseAdamSGDRule",
    "adagrad": "SparseAdaGradSGDRule",
}
DIM, STEPS = 4, 6


def minimize(rule: str, optimizer: str):
    """Builds the program; returns the variable of the pulled rows."""
    import paddle
    from paddle.distributed import fleet

    ids = paddle.static.data("ids", [None, 1], "int64")
    label = paddle.static.data("label", [None, 1], "float32")
    initial = paddle.nn.initializer
    rows = paddle.static.nn.sparse_embedding(
        ids, [1000, DIM], param_attr=paddle.ParamAttr("EMB", initializer=initial.Uniform(-0.5, 0.5))
    )
    out = paddle.static.nn.fc(
        rows.reshape([-1, DIM]),
        1,
        weight_attr=paddle.ParamAttr("w", initializer=initial.Constant(0.5)),
        bias_attr=paddle.ParamAttr("b", initializer=initial.Constant(0.1)),
    )
    loss = paddle.nn.functional.binary_cross_entropy_with_logits(out, label)
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = True
    prefix = "table_parameters.EMB.accessor."
    names = {f"{prefix}{part}_sgd_param.name": RULES[rule] for part in ("embed", "embedx")}
    names[f"{prefix}ctr_accessor_param.base_threshold"] = 0.5
    strategy.sparse_table_configs = {"EMB": names}
    made = {"sgd": paddle.optimizer.SGD, "adam": paddle.optimizer.Adam}[optimizer](0.05)
    fleet.distributed_optimizer(made, strategy).minimize(loss)
    return rows


def run(folder: Path, rule: str, optimizer: str) -> None:
    """One process of a job: the server, or the trainer, which saves."""
    import numpy as np
    import paddle
    from paddle.distributed import fleet

    paddle.enable_static()
    fleet.init(fleet.PaddleCloudRoleMaker())
    rows = minimize(rule, optimizer)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    executor = paddle.static.Executor(paddle.CPUPlace())
    executor.run(paddle.static.default_startup_program())
    fleet.init_worker()
    draw = np.random.default_rng(1)
    main = paddle.static.default_main_program()

    def step(keys):
        feed = {"ids": keys.reshape(-1, 1), "label": draw.integers(0, 2, (len(keys), 1)).astype("float32")}
        (pulled,) = executor.run(main, feed, [rows])
        time.sleep(0.5)  # the communicator sends what it has after some empty polls
        fleet.fleet._runtime_handle._worker.client_flush()
        time.sleep(0.5)
        return pulled

    for _ in range(STEPS):
        step(np.concatenate([np.arange(10), draw.integers(0, 4, 12)]))
    for mode in range(4):
        fleet.save_persistables(executor, str(folder / f"mode{mode}"), main, mode=mode)
    # What the server has, as the trainer gets it; the step that pulls it comes after the saves.
    np.savez(folder / "pulled.npz", rows=step(np.arange(10)).reshape(-1, DIM))
    fleet.stop_worker()


def text_of(path: Path) -> str:
    return gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()


def pack(folder: Path) -> None:
    """Puts what one job saved into one file."""
    import numpy as np

    found = {}
    names = []
    for mode in range(4):
        parts = {path.name: text_of(path) for path in sorted((folder / f"mode{mode}" / "000").iterdir())}
        assert len(parts) == 1000
        found[f"mode{mode}"] = "".join(parts.values())
        names.append(" ".join(name for name, text in parts.items() if text))
        (dense,) = (folder / f"mode{mode}" / "001").iterdir()
        found["dense"] = text_of(dense)
    with np.load(folder / "pulled.npz") as pulled:
        np.savez_compressed(folder.with_suffix(".npz"), names=names, rows=pulled["rows"], **found)
    shutil.rmtree(folder)


def main() -> None:
    if len(sys.argv) == 4:
        run(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
        return
    for rule, optimizer in [(rule, "sgd") for rule in RULES] + [("adam", "adam")]:
        folder = Path(sys.argv[1]).absolute() / (rule if optimizer == "sgd" else f"{rule}_dense_adam")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        ports = []
        for _ in range(2):
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                ports.append(probe.getsockname()[1])
        common = {
            "PADDLE_PSERVERS_IP_PORT_LIST": f"127.0.0.1:{ports[0]}",
            "PADDLE_TRAINER_ENDPOINTS": f"127.0.0.1:{ports[1]}",
            "PADDLE_TRAINERS_NUM": "1",
            "PADDLE_WITH_GLOO": "0",
            "POD_IP": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
        }
        roles = [{"TRAINING_ROLE": "PSERVER", "PADDLE_PORT": str(ports[0])}]
        roles.append({"TRAINING_ROLE": "TRAINER", "PADDLE_TRAINER_ID": "0", "PADDLE_PORT": str(ports[1])})
        command = [sys.executable, __file__, str(folder), rule, optimizer]
        started = [
            subprocess.Popen(command, env={**os.environ, **common, **role}, cwd=folder, stdout=log, stderr=log)
            for role in roles
            for log in [(folder.parent / f"{folder.name}.{role['TRAINING_ROLE']}.log").open("w")]
        ]
        try:
            started[1].wait(120)
        finally:
            for process in started:
                process.kill()
                process.wait()
        pack(folder)


if __name__ == "__main__":
    main()
