"""The server or a worker of ``wire.py``: trains the wide & deep example, and counts the bytes at its sockets.

Arguments: form of the wire, mode, data, batches of a pass, a file for the result of worker 0.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DistributedSampler, SequentialSampler

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "wide_and_deep"))
from data import batches_of, open_data  # noqa: E402
from evaluation import find_auc  # noqa: E402
from model import MODELS  # noqa: E402

from fleet import fleet  # noqa: E402
from fleet.ps import Initializer  # noqa: E402
from fleet.ps.wire.transport import SocketConnection  # noqa: E402

PASSES, BATCH, DIM, LAYERS, LR = 2, 100, 10, [128, 64], 0.02


def count_bytes() -> Counter[str]:
    """Returns counts of the bytes that this process sends to servers and receives from them, from now on."""
    counts: Counter[str] = Counter()
    send, receive = SocketConnection.send, SocketConnection.receive

    def sending(self: SocketConnection, buffers: Any, *more: Any, **named: Any) -> None:
        counts["sent"] += sum(memoryview(buffer).nbytes for buffer in buffers)
        send(self, buffers, *more, **named)

    def receiving(self: SocketConnection, view: memoryview, *more: Any, **named: Any) -> None:
        receive(self, view, *more, **named)
        counts["received"] += view.nbytes

    SocketConnection.send, SocketConnection.receive = sending, receiving  # type: ignore[method-assign]
    return counts


def main() -> None:
    """Serves, or trains and measures."""
    wire, mode, data_from, num_batches, result = *sys.argv[1:4], int(sys.argv[4]), Path(sys.argv[5])
    torch.set_num_threads(1)
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = mode == "async"
    strategy.a_sync_configs = {"wire": wire}
    fleet.init(strategy=strategy, log_level="ERROR")
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    torch.manual_seed(0)
    data = open_data(data_from)
    sampler = DistributedSampler[int](data.train, fleet.worker_num(), fleet.worker_index(), seed=0)
    train = batches_of(data.train, sampler, min(BATCH, len(data.train) // 4), drop_last=True)
    table = partial(fleet.SparseEmbedding, padding_idx=0, initializer=Initializer("normal", 0.0, 0.01))
    model = MODELS["wide_deep"](table, data.slots, data.num_dense, DIM, LAYERS)
    optimizer = fleet.distributed_optimizer(torch.optim.Adagrad(model.parameters(), LR), strategy)
    model = fleet.distributed_model(model)
    counts = count_bytes()
    fleet.init_worker()
    counts.clear()
    steps, began = 0, time.perf_counter()
    for epoch in range(PASSES):
        sampler.set_epoch(epoch)
        for number, (ids, dense, labels) in enumerate(train):
            if number == num_batches:
                break
            binary_cross_entropy_with_logits(model(ids, dense), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    fleet.barrier_worker()
    found = {"sent": counts["sent"] / steps, "received": counts["received"] / steps, "steps": steps}
    found["seconds"] = time.perf_counter() - began
    if fleet.is_first_worker():
        test = batches_of(data.test, SequentialSampler(data.test), 1024, drop_last=False)
        found["auc"] = find_auc(model, test)
        result.write_text(json.dumps(found))
    fleet.stop_worker()


if __name__ == "__main__":
    main()
