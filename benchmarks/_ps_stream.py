"""What reading a stream costs: ``fleet.StreamDataset`` beside the same batches in a list, in a job with servers.

    python benchmarks/_ps_stream.py --mode async --batch 100 --blocks 5 --seconds 2

Three jobs of one server and two workers train the wide & deep model of ``ps.py`` and keep a journal of level 1: batches
of tensors from a list, a ``StreamDataset`` of a function, and one of a ``KafkaSource`` at the mock broker of librdkafka
that runs in this process. A record is the bytes of a sample (26 ids, 13 numbers, a label). ``parse`` reads them and
``default_collate`` makes batches; with ``--collate joined`` the batch is read from the joined bytes. Blocks of training
alternate between the jobs. The rate counts both workers. Consumers of Kafka fetch in the background, in pauses too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
KINDS = ("list", "function", "kafka")
PARTITIONS = 4  # of a topic of the mock broker
PER_PARTITION = 10_000


def train(settings: dict[str, Any]) -> None:
    """Is a worker or the server of one of the jobs."""
    import torch
    from _ps_steps import DIM, NUM_DENSE, SLOTS, batches_of, draw, fill
    from model import WideDeep

    from fleet import fleet

    torch.set_num_threads(1)
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = settings["mode"] != "sync"
    fleet.init(strategy=strategy)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    torch.manual_seed(0)
    served = WideDeep(fleet.SparseEmbedding, SLOTS, NUM_DENSE, DIM)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(served.parameters(), 1e-4), strategy)
    model = fleet.distributed_model(served)
    fleet.init_worker()
    fill(model, optimizer, settings["vocabulary"])
    samples = draw(settings["vocabulary"], 1 + fleet.worker_index())
    batches = batches_of(samples, settings["batch"]) if settings["kind"] == "list" else iter(stream(settings, samples))
    fleet.barrier_worker()
    found = train_in_turn(settings, model, optimizer, batches)
    Path(settings["folder"], f"{settings['kind']}.{fleet.worker_index()}.json").write_text(json.dumps(found))
    fleet.stop_worker()


def stream(settings: dict[str, Any], samples: Any) -> Any:
    """Returns the dataset of a job that reads a stream."""
    import numpy as np
    import torch

    from fleet import fleet

    kind = np.dtype([("ids", np.int64, 26), ("dense", np.float32, 13), ("label", np.float32)])

    def parse(record: Any) -> Any:
        ids, dense, label = np.frombuffer(record if isinstance(record, bytes) else record.value, kind)[0]
        return ids, dense, label

    def joined(records: list[Any]) -> Any:
        found = np.frombuffer(b"".join(records), kind)
        return tuple(torch.from_numpy(found[name].copy()) for name in ("ids", "dense", "label"))

    how: dict[str, Any] = {"batch_size": settings["batch"]}
    if settings["collate"] == "joined":
        how["collate"] = joined
    if settings["kind"] == "kafka":
        source = Again(fleet.KafkaSource(settings["broker"], "samples", stop_at_end=True))
        return fleet.StreamDataset(source, (lambda record: record.value) if "collate" in how else parse, **how)
    records = records_of(samples)

    def opened(partition: int, start: int) -> Iterator[tuple[int, bytes]]:
        return ((offset, records[offset % len(records)]) for offset in count(start))

    return fleet.StreamDataset(opened, bytes if "collate" in how else parse, partitions=2, **how)


def records_of(samples: Any) -> list[bytes]:
    """Returns the bytes of each sample."""
    ids, dense, labels = (part.numpy() for part in samples)
    return [a.tobytes() + b.tobytes() + c.tobytes() for a, b, c in zip(ids, dense, labels, strict=True)]


def train_in_turn(settings: dict[str, Any], model: Any, optimizer: Any, batches: Any) -> dict[str, Any]:
    """Trains in every third block; returns samples per second and processor time of this process per sample."""
    from _ps_publish import wait_for
    from _ps_steps import block

    from fleet import fleet

    folder, place, jobs = Path(settings["folder"]), KINDS.index(settings["kind"]), len(KINDS)
    found: list[tuple[float, float]] = []
    for number in range(settings["blocks"] + 1):
        wait_for(folder / f"turn.{jobs * number + place}")
        fleet.barrier_worker()
        found.append(block(model, optimizer, batches, settings["seconds"]))
        fleet.barrier_worker()
        if fleet.is_first_worker():
            (folder / f"turn.{jobs * number + place + 1}").touch()
    return {"rates": [rate for rate, _ in found[1:]], "us": [us for _, us in found[1:]]}  # the first block warms up


class Again:
    """A topic that begins anew at its end, because the mock broker keeps 5 MB of a partition."""

    def __init__(self, source: Any) -> None:
        self.name, self.partitions, self._source = source.name, source.partitions, source

    def open(self, starts: Any) -> Any:
        """Returns the reader, which is this object."""
        self._starts, self._passed = dict.fromkeys(starts), 0
        self._reader = self._source.open(self._starts)
        return self

    def poll(self, timeout_s: float) -> list[Any]:
        """Returns events whose offsets go on."""
        events = self._reader.poll(timeout_s)
        if events is None:
            self._passed += PER_PARTITION
            self._reader.close()
            self._reader = self._source.open(self._starts)
        return [event._replace(offset=event.offset + self._passed) for event in events or ()]

    def lag(self, following: Any) -> None:
        """Is not known."""

    def close(self) -> None:
        """Closes the source."""
        self._reader.close()


def filled_broker(vocabulary: int) -> tuple[Any, str]:
    """Returns the producer in which the mock broker lives, full of samples, and the broker's address."""
    from _ps_steps import draw
    from confluent_kafka import Producer

    records = records_of(draw(vocabulary, 1))
    producer = Producer({"test.mock.num.brokers": 1, "bootstrap.servers": "unused", "log_level": 0, "linger.ms": 50})
    (one,) = producer.list_topics(timeout=20).brokers.values()
    for number in range(PER_PARTITION):
        for partition in range(PARTITIONS):
            value = records[(number * PARTITIONS + partition) % len(records)]
            producer.produce("samples", value, partition=partition)
        if number % 500 == 499:
            producer.flush(60)
    if producer.flush(60):
        raise SystemExit("the mock broker does not take the messages")
    return producer, f"{one.host}:{one.port}"


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """Runs the jobs and returns what they found."""
    producer, address = filled_broker(settings["vocabulary"])
    with tempfile.TemporaryDirectory() as folder:
        run_jobs({**settings, "folder": folder, "broker": address})
        workers = {kind: [json.loads(Path(folder, f"{kind}.{r}.json").read_text()) for r in (0, 1)] for kind in KINDS}
    rates = {
        kind: [sum(both) for both in zip(*(worker["rates"] for worker in found), strict=True)]
        for kind, found in workers.items()
    }
    del producer  # the broker ends with it
    return {
        kind: {
            "rate": median(found),
            "share": median(a / b for a, b in zip(found, rates["list"], strict=True)),
            "us": median(workers[kind][0]["us"] + workers[kind][1]["us"]),
        }
        for kind, found in rates.items()
    }


def run_jobs(settings: dict[str, Any]) -> None:
    """Runs all jobs to their end."""
    folder = settings["folder"]
    with ExitStack() as ending:
        jobs = []
        for kind in KINDS:
            launcher = [sys.executable, "-m", "fleet.launch", "--server_num=1", "--worker_num=2"]
            launcher += [f"--log_dir={folder}/log-{kind}", __file__, "--train", json.dumps({**settings, "kind": kind})]
            variables = {"PADDLE_JOB_ID": f"bench-{kind}", "FLEET_PS_FOLDER": f"{folder}/state-{kind}"}
            pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            job = subprocess.Popen(launcher, env={**os.environ, **variables}, **pipe)  # type: ignore[call-overload]
            ending.callback(job.terminate)
            jobs.append(job)
        Path(folder, "turn.0").touch()
        for kind, job in zip(KINDS, jobs, strict=True):
            said = job.communicate(timeout=540)[0]
            if job.returncode:
                raise SystemExit(f"{kind}: the job ended with {job.returncode}\n{said[-4000:]}")


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=("async", "sync"), default="async")
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--vocabulary", type=int, default=200_000)
    parser.add_argument("--collate", choices=("default", "joined"), default="default")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        train(json.loads(args.train))
        return
    names = ("mode", "batch", "blocks", "seconds", "vocabulary", "collate")
    found = measure({name: getattr(args, name) for name in names})
    print(f"{args.mode}, batch {args.batch}, {args.collate} collate, load {os.getloadavg()[0]:.1f}:")
    for kind, case in found.items():
        print(
            f"  {kind:8}  {case['rate']:7.0f} samples/s, share {case['share']:.2f}, {case['us']:.0f} us of worker CPU"
        )


if __name__ == "__main__":
    main()
