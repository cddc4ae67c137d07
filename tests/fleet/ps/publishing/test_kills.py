"""Workers that read a stream, the server with its publisher and Redis are killed: Redis holds the rows of a calm run.

In sync mode the rows after a step do not depend on what failed on the way. The calm run waits after each step until
Redis has it and keeps what Redis holds. In the other run a watcher reads Redis all the time, each time in one
transaction: whatever step the position names, the rows must be those of the calm run, bit for bit.

Where staleness is bounded, a worker may be some steps ahead of the other, so a calm run is no measure. There every
gradient is an integer and the rate is 1: the rows must be the exact sums of the first steps of each worker, of as many
as the position and the bound allow.
"""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.ps_fault_job import IDS, NUM_WORDS, FaultJob, Kill, Training, batch_of, plan_kills
from tests.helpers.redis_server import RedisServer, missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
JOB = "kills"
AHEAD = 8  # more steps than a worker can be ahead: 3, and those on their way
# One transaction: the position of server 0 and all rows.
DUMP = """
local rows = {}
for _, key in ipairs(redis.call('KEYS', KEYS[1] .. '*:*')) do
  if redis.call('TYPE', key)['ok'] == 'string' then rows[#rows + 1] = key; rows[#rows + 1] = redis.call('GET', key) end
end
return {redis.call('HGET', KEYS[1] .. 'position', '0'), rows}
"""
Rows = dict[bytes, bytes]


def dump(client: Any) -> tuple[int, Rows]:
    """Returns the step and the rows that Redis holds now; step -1 without a position."""
    position, found = client.eval(DUMP, 1, f"fleet:{JOB}:")
    step = -1 if position is None else int(json.loads(position)["step"])
    return step, dict(zip(found[::2], found[1::2], strict=True))


def keep_each_step(url: str, folder: str, rank: int, step: int) -> None:
    """Waits until Redis has ``step`` and keeps the rows of it; worker 0 holds the other up meanwhile."""
    import redis

    if rank:
        return
    with redis.Redis.from_url(url) as client:
        deadline = time.monotonic() + 60
        while True:
            found, rows = dump(client)
            if found >= step:
                break
            assert time.monotonic() < deadline, f"Redis has step {found}, not {step}"
            time.sleep(0.002)
    assert found == step
    text = json.dumps({key.decode(): row.hex() for key, row in rows.items()})
    (Path(folder) / f"{step}.rows").write_text(text)


class PublishingJob(FaultJob):
    """One server with its publisher, two workers that read a stream, and a Redis, which is killed like the others."""

    def __init__(
        self, folder: Path, redis: RedisServer, *, steps: int, after_step: Any = None, mode: str = "sync"
    ) -> None:
        rate = 0.37 if mode == "sync" else 1.0
        configs = {"publish": redis.url, "publish_every_s": 0.005}
        training = Training(rate=rate, configs=configs, after_step=after_step, stream=True)
        super().__init__(folder, mode, num_servers=1, num_workers=2, steps=steps, training=training)
        self.redis = redis
        self._delays = random.Random(7)
        for variables in self.variables.values():
            variables["PADDLE_JOB_ID"] = JOB

    def start(self, name: str) -> None:
        if name == "redis":
            self.redis.start()
        else:
            super().start(name)

    def kill(self, name: str) -> None:
        time.sleep(self._delays.uniform(0, 0.02))  # anywhere within a cut, a write or its confirmation
        if name == "redis":
            self.redis.kill()
        elif self.processes[name].exitcode is None:
            super().kill(name)


class Watcher:
    """Reads Redis until it is told to stop; ``faults`` says what is wrong with the rows of a step."""

    def __init__(self, redis: RedisServer, faults: Callable[[int, Rows], str]) -> None:
        self._redis, self._faults = redis, faults
        self.wrong: list[str] = []
        self.steps: set[int] = set()
        self.count = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)

    def _run(self) -> None:
        import redis

        with self._redis.client() as client:
            while not self._stop.wait(0.001):
                try:
                    step, rows = dump(client)
                except redis.RedisError:
                    continue
                self.compare(step, rows)

    def compare(self, step: int, rows: Rows) -> None:
        """Notes what is wrong with ``rows``, which are those of ``step``."""
        self.count += 1
        if step >= 1:
            self.steps.add(step)
            if fault := self._faults(step, rows):
                self.wrong.append(f"step {step}: {fault}")


def not_calm(calm: dict[int, Rows], step: int, rows: Rows) -> str:
    """Returns where ``rows`` are not those of the calm run.

    Only a whole delta has rows that were pulled and never pushed; here they are zeros, as a missing id reads.
    """
    expected = calm[step]
    wrong = [
        f"{key.decode()}: {rows.get(key, b'').hex()} instead of {expected.get(key, b'').hex()}"
        for key in sorted(rows.keys() | expected.keys())
        if any(rows.get(key, b"") + expected.get(key, b"")) and rows.get(key) != expected.get(key)
    ]
    return f"{len(wrong)} of {len(expected)} rows, {wrong[:3]}" if wrong else ""


class Sums:
    """The rows after so many steps of each worker: integers, exact in any order."""

    def __init__(self, steps: int) -> None:
        words = np.arange(NUM_WORDS * 2, dtype=np.float32).reshape(NUM_WORDS, 2)
        self._after = [[(np.zeros((len(IDS), 3), np.float32), np.zeros_like(words))] for _ in range(2)]
        self._start = words
        for rank, step in itertools.product(range(2), range(steps)):
            batch, (ads, words) = batch_of(rank, step), self._after[rank][step]
            ads, words = ads.copy(), words.copy()
            np.subtract.at(ads, np.searchsorted(IDS, batch["ads"][:, 0]), batch["by_ad"])
            np.subtract.at(words, batch["words"], batch["by_word"])
            self._after[rank].append((ads, words))
        self._steps = steps

    def faults(self, step: int, rows: Rows) -> str:
        """Returns what is wrong when no worker can have done what ``rows`` hold; both have done ``step`` steps."""
        ads, words = np.zeros((len(IDS), 3), np.float32), self._start.copy()
        for key, row in rows.items():
            table, number = key.decode().split(":")[-2:]
            values = np.frombuffer(row, np.float32)
            if len(values) == 3:
                ads[np.searchsorted(IDS, int(number))] = values
            else:
                words[int(number)] = values
        ahead = [after[step : step + AHEAD] for after in self._after]
        for one, other in itertools.product(*ahead):
            if (one[0] + other[0] == ads).all() and (self._start + one[1] + other[1] == words).all():
                return ""
        return f"the rows are no sums of {step} to {step + AHEAD - 1} of {self._steps} steps of each worker"


def calm_run(folder: Path, redis: RedisServer, steps: int) -> dict[int, Rows]:
    """Returns the rows that Redis holds after each step of an undisturbed run."""
    kept = folder / "kept"
    kept.mkdir()
    job = PublishingJob(folder / "calm", redis, steps=steps, after_step=partial(keep_each_step, redis.url, str(kept)))
    job.run([])
    texts = {step: json.loads((kept / f"{step}.rows").read_text()) for step in range(1, steps + 1)}
    return {step: {key.encode(): bytes.fromhex(row) for key, row in rows.items()} for step, rows in texts.items()}


def disturbed(job: PublishingJob, watcher: Watcher, kills: Sequence[Kill]) -> None:
    """Runs ``job`` with ``kills`` under the eyes of ``watcher``, and looks once more at the end."""
    with watcher:
        job.run(kills, limit_s=60 + 6 * len(kills))
    with job.redis.client() as client:
        watcher.compare(*dump(client))


@pytest.mark.slow
def test_redis_holds_the_rows_of_a_calm_run_after_100_kills(tmp_path: Path) -> None:
    """Workers, the readers of the stream; the server with its publisher; Redis."""
    check_kills(100, tmp_path)


@pytest.mark.slow
def test_redis_holds_exact_sums_after_100_kills_with_bounded_staleness(tmp_path: Path) -> None:
    """The same processes, with max_staleness."""
    steps = 300
    with RedisServer(tmp_path / "redis") as redis:
        job = PublishingJob(tmp_path / "faults", redis, steps=steps, mode="bounded")
        sums = Sums(steps)
        watcher = Watcher(redis, sums.faults)
        disturbed(job, watcher, plan_kills(2027, 100, [*job.names, "redis"], 2 * steps - 160))
        with redis.client() as client:
            last = dump(client)
    assert not watcher.wrong, watcher.wrong[:5]
    assert last[0] == max(watcher.steps) == steps
    assert len(last[1]) > len(IDS)  # rows of both tables
    assert len(watcher.steps) > 3  # a busy machine lets the watcher look seldom


def check_kills(count: int, tmp_path: Path) -> None:
    steps = 100 + 2 * count  # the last kills come while steps are left that are slower to take than a kill
    with RedisServer(tmp_path / "calm-redis") as redis:
        calm = calm_run(tmp_path, redis, steps)
    assert len({len(rows) for rows in calm.values()}) > 1
    with RedisServer(tmp_path / "redis") as redis:
        job = PublishingJob(tmp_path / "faults", redis, steps=steps)
        kills = plan_kills(2026, count, [*job.names, "redis"], 2 * steps - 160)
        assert {kill.name.split("-")[0] for kill in kills} == {"server", "worker", "redis"}
        watcher = Watcher(redis, partial(not_calm, calm))
        disturbed(job, watcher, kills)
    assert not watcher.wrong, watcher.wrong[:5]
    assert max(watcher.steps) == steps
    assert len(watcher.steps) > 3  # a busy machine lets the watcher look seldom
