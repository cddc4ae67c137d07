"""A server or a worker of Paddle 2.6.2 in ``recommenders.py``: DeepFM or two towers on its parameter server.

Runs in an environment of its own, without fleet and torch. A program of Paddle scores held-out samples only while it
trains on them, so the AUC is taken before each of their updates: they are the last samples of the job. Rows have
Paddle's Adagrad for each number (``StdAdaGradSGDRule``); dense parameters have Adam, because Paddle's servers know no
Adagrad for them. Arguments: settings. Writes ``samples.RANK.json``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed.fleet as fleet
from _recommender_clicks import auc, clicks, held_out, resident_bytes

DIM, WIDTHS, TOWER_WIDTHS = 12, (400, 400, 1), (128, 32)  # as in _tables_model and _recommender_model
# Paddle's documented rate and first sum of squares: its Adagrad divides by the squares before a gradient, which no
# constants make torch's. The start is uniform and has the peers' standard deviation.
RATE, FIRST_SUM, DENSE_RATE, START = 0.05, 3.0, 0.001, 0.01 * 3**0.5
UNCOUNTED, SCORED, NUM_PARTS = 20, 10_000, 10
paddle.enable_static()


def chain(rows: Any, widths: tuple[int, ...]) -> Any:
    """Returns linear layers with ReLU between them."""
    for i, width in enumerate(widths):
        rows = paddle.static.nn.fc(rows, width, activation="relu" if i + 1 < len(widths) else None)
    return rows


def logits_of(model: str, rows: list[Any]) -> Any:
    """Returns the logits (batch, 1) of the rows of all features."""
    if model == "towers":
        half = len(rows) // 2
        user = chain(paddle.concat(rows[:half], 1), TOWER_WIDTHS)
        item = chain(paddle.concat(rows[half:], 1), TOWER_WIDTHS)
        return paddle.sum(user * item, 1, keepdim=True)
    fields = paddle.stack(rows, 1)
    weights, factors = fields[:, :, :1], fields[:, :, 1:]
    pairs = paddle.square(paddle.sum(factors, 1)) - paddle.sum(paddle.square(factors), 1)
    first = paddle.sum(weights, 1) + 0.5 * paddle.sum(pairs, 1, keepdim=True)
    return first + chain(paddle.concat(rows, 1), WIDTHS)


def table_configs(names: list[str]) -> dict[str, dict[str, Any]]:
    """Returns the rule of each table."""
    found = {}
    for name in names:
        accessor = f"table_parameters.{name}.accessor"
        table = f"table_parameters.{name}"
        # With Paddle's 1,000 parts of a table by default a server needs several times as long.
        configs: dict[str, Any] = {f"{table}.table_class": "MemorySparseTable", f"{table}.shard_num": NUM_PARTS}
        configs[f"{accessor}.accessor_class"] = "SparseAccessor"
        for part in ("embed_sgd_param", "embedx_sgd_param"):
            configs[f"{accessor}.{part}.name"] = "StdAdaGradSGDRule"
            adagrad = {"learning_rate": RATE, "initial_g2sum": FIRST_SUM, "initial_range": START}
            configs.update({f"{accessor}.{part}.adagrad.{key}": value for key, value in adagrad.items()})
        found[name] = configs
    return found


def build(settings: dict[str, Any]) -> tuple[list[str], Any]:
    """Makes the program; returns the names of the inputs, and the logits."""
    names = [f"c{i}" for i in range(settings["tables"])]
    ids = [paddle.static.data(name, [None, 1], "int64") for name in names]
    label = paddle.static.data("label", [None, 1], "float32")
    rows = []
    for name, column in zip(names, ids, strict=True):
        attribute = paddle.ParamAttr(name=f"t_{name}", initializer=paddle.nn.initializer.Uniform(-START, START))
        looked_up = paddle.static.nn.sparse_embedding(column, size=[settings["ids"], DIM], param_attr=attribute)
        rows.append(paddle.reshape(looked_up, [-1, DIM]))
    logits = logits_of(settings["model"], rows)
    loss = paddle.mean(paddle.nn.functional.binary_cross_entropy_with_logits(logits, label))
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = settings["mode"] == "async"
    strategy.sparse_table_configs = table_configs([f"t_{name}" for name in names])
    optimizer = paddle.optimizer.Adam(DENSE_RATE)
    fleet.distributed_optimizer(optimizer, strategy).minimize(loss)
    return names, logits


def main() -> None:
    """Runs what the settings in argument 1 say."""
    settings = json.loads(sys.argv[1])
    fleet.init(fleet.PaddleCloudRoleMaker())
    names, score = build(settings)
    if fleet.is_server():
        Path(settings["folder"], f"server.{os.getpid()}").touch()
        fleet.init_server()
        fleet.run_server()
        return
    executor = paddle.static.Executor(paddle.CPUPlace())
    executor.run(paddle.static.default_startup_program())
    fleet.init_worker()
    train(settings, executor, names, score)
    fleet.stop_worker()


def train(settings: dict[str, Any], executor: Any, names: list[str], score: Any) -> None:
    """Trains once on this worker's samples, then scores others; writes what was found."""
    size, program, processes = settings["batches"][0], paddle.static.default_main_program(), [str(os.getpid())]
    if fleet.is_first_worker():
        processes += [path.suffix[1:] for path in Path(settings["folder"]).glob("server.*")]

    def run(ids: np.ndarray, labels: np.ndarray, fetched: list[Any]) -> Any:
        feed = {name: column[:, None] for name, column in zip(names, ids, strict=True)}
        return executor.run(program, feed={**feed, "label": labels[:, None]}, fetch_list=fetched)

    ids, labels, _ = clicks(settings["tables"], settings["ids"], settings["samples"] // 2, 1 + fleet.worker_index())
    parts = [slice(start, start + size) for start in range(0, len(labels) - size + 1, size)]
    began = used = 0.0
    for number, part in enumerate(parts):
        if number == UNCOUNTED:
            began, used = time.perf_counter(), sum(map(processor_s, processes))
        run(ids[:, part], labels[part], [])
    found = {"steps": len(parts) - UNCOUNTED, "wall_s": time.perf_counter() - began}
    found["own_s"] = sum(map(processor_s, processes)) - used
    found["resident"] = sum(map(resident_bytes, processes))
    if fleet.is_first_worker():
        found.update(score_held_out(settings, lambda ids, labels: run(ids, labels, [score])[0][:, 0]))
    Path(settings["folder"], f"samples.{fleet.worker_index()}.json").write_text(json.dumps({"learn": found}))


def score_held_out(settings: dict[str, Any], score: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> dict[str, float]:
    """Returns the AUC of the scores that samples get just before they train."""
    size = settings["batches"][0]
    held, labels, probabilities = held_out(settings["tables"], settings["ids"])
    pieces = [slice(start, start + size) for start in range(0, SCORED, size)]
    scores = np.concatenate([score(held[:, part], labels[part]) for part in pieces])
    return {"auc": auc(scores, labels[: len(scores)]), "best_auc": auc(probabilities, labels)}


def processor_s(process: str) -> float:
    """Returns the processor time of a process."""
    user, system = Path("/proc", process, "stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
