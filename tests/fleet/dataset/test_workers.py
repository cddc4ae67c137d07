"""Where a dataset finds the other workers, and the bytes between them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import fleet
from fleet.dataset.workers import GlooWorkers, OneWorker, WorkerGroup, sum_over, worker_group_of
from fleet.errors import ConfigError, NotInitializedError, UnsupportedOptionError
from fleet.facade import Fleet
from tests.fleet.dataset.files import write_files
from tests.fleet.dataset.test_in_memory import made, written
from tests.helpers.scikit_learn import log_loss, ndcg_score, roc_auc_score
from tests.helpers.workers import free_ports, run_workers


def _exchange(rank: int, world_size: int) -> list[Any]:
    assert dist.group.WORLD is not None
    group = GlooWorkers(dist.group.WORLD)
    assert isinstance(group, WorkerGroup)
    found = group.all_to_all_bytes([bytes([rank, to]) * (rank + 3 * to) for to in range(world_size)])
    nothing = group.all_to_all_bytes([b""] * world_size)
    group.barrier()
    total = sum_over(group, -(2**40) + rank)
    return [[part.hex() for part in found], [part.hex() for part in nothing], total, (group.rank, group.size)]


@pytest.mark.slow
def test_bytes_reach_the_worker_they_are_for() -> None:
    for rank, (found, nothing, total, place) in enumerate(run_workers(_exchange, 3)):
        assert found == [bytes([sender, rank]).hex() * (sender + 3 * rank) for sender in range(3)]
        assert nothing == [""] * 3
        assert total == -3 * 2**40 + 3
        assert place == (rank, 3)


def test_one_worker_is_alone() -> None:
    group = OneWorker()
    assert isinstance(group, WorkerGroup)
    assert group.all_to_all_bytes([b"x"]) == [b"x"]
    assert sum_over(group, 5) == 5


def facade(**session: Any) -> Fleet:
    """Returns a Fleet with a session that answers these questions."""
    found = Fleet()
    role = SimpleNamespace(is_worker=lambda: session.get("worker", True))
    job = SimpleNamespace(**{"world_size": 2, "host_group": None, **session})
    found._session = SimpleNamespace(role_maker=role, job=job)  # type: ignore[assignment]
    return found


def test_workers_without_a_group_are_told_what_to_set() -> None:
    """A parameter-server job without PADDLE_WITH_GLOO."""
    with pytest.raises(UnsupportedOptionError, match="the 2 workers .* PADDLE_WITH_GLOO=1"):
        worker_group_of(facade(), "global_shuffle")


def _of_metrics(rank: int) -> list[float]:
    """Metrics of which worker 0 has some samples, and worker 1 more, or none."""
    exact, loss = fleet.metrics.StatAuc(bins=None), fleet.metrics.StatLogLoss()
    recall, ndcg, alone = fleet.metrics.StatRecall(2), fleet.metrics.StatNdcg(2), fleet.metrics.StatRecall(1)
    for stat in (exact, loss):
        stat.update([0.9, 0.2, 0.6001] if rank else [0.6, 0.7], [1, 0, 1] if rank else [1, 0])
    recall.update_ids([[7, 8]] if rank else [[7, 8], [5, 6]], [9] if rank else ([7, 9, 6], [0, 2, 3]))
    ndcg.update([[0.1, 0.5, 0.3]] if rank else [[0.9, 0.2]], [[2, 0, 3]] if rank else [[0, 1]])
    if rank == 0:
        alone.update_ids([[3]], [3])
    return [stat.value() for stat in (exact, loss, recall, ndcg, alone)]


def _in_a_server_job(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    fleet.init()  # the servers are asked for at init_worker, which comes later
    dataset = made(write_files(Path(folder), [20 + rank], first=1000 * rank), batch_size=50)
    before = written(dataset)
    dataset.global_shuffle(fleet)
    stat = fleet.metrics.StatAuc(bins=10)
    stat.update([0.9, 0.2] if rank else [0.6, 0.7], [1, 0])
    return {
        "exact": _of_metrics(rank),
        "before": before,
        "after": written(dataset),
        "size": dataset.get_memory_data_size(fleet),
        "metrics": [
            float(fleet.metrics.sum(rank + 1)),
            float(fleet.metrics.max(rank + 1)),
            float(fleet.metrics.min(rank + 1)),
            fleet.metrics.acc(rank, 2),
            fleet.metrics.mae(3.0, 2),
            fleet.metrics.mse(4.0, 2),
            fleet.metrics.rmse(8.0, 2),
            stat.value(),
        ],
    }


@pytest.mark.parametrize("with_gloo", [pytest.param("1", marks=pytest.mark.slow), None])
def test_workers_of_a_server_job(tmp_path: Path, with_gloo: str | None) -> None:
    """B.6 and B.7: metrics, global_shuffle and sizes where the job has parameter servers, with and without gloo on."""
    ports = free_ports(2)

    def environment(rank: int) -> dict[str, str | None]:
        server = {"PADDLE_PSERVERS_IP_PORT_LIST": f"127.0.0.1:{ports[0]}", "TRAINING_ROLE": "TRAINER"}
        gloo = {"PADDLE_WITH_GLOO": with_gloo, "PADDLE_GLOO_HTTP_ENDPOINT": f"127.0.0.1:{ports[1]}"}
        return {**server, **(gloo if with_gloo else {})}

    first, second = run_workers(_in_a_server_job, 2, str(tmp_path), backend=None, environment=environment)
    assert Counter(first["after"] + second["after"]) == Counter(first["before"] + second["before"])
    assert first["after"] != first["before"]
    assert first["size"] == second["size"] == 41
    # Of 2 x 2 pairs of a positive and a negative the right one is above in three.
    assert first["metrics"] == second["metrics"] == [3, 2, 1, 0.25, 1.5, 2, 2, 0.75]
    labels, scores = [1, 0, 1, 1, 0], [0.9, 0.2, 0.6001, 0.6, 0.7]
    relevance, ranking = [[2, 0, 3, 0], [0, 1, 0, 0]], [[0.1, 0.5, 0.3, -1], [0.9, 0.2, -1, -2]]
    expected = [roc_auc_score(labels, scores), log_loss(labels, scores), 0.5, ndcg_score(relevance, ranking, k=2), 1.0]
    assert first["exact"] == second["exact"] == pytest.approx(expected)


def test_who_cannot_exchange() -> None:
    with pytest.raises(ConfigError, match="this process is a parameter server"):
        worker_group_of(facade(worker=False), "global_shuffle")
    with pytest.raises(NotInitializedError, match=r"fleet.init\(\)"):
        worker_group_of(Fleet(), "global_shuffle")
    with pytest.raises(ConfigError, match="takes fleet after"):
        worker_group_of(3, "global_shuffle")
    assert isinstance(worker_group_of(facade(world_size=1), "global_shuffle"), OneWorker)


def test_a_group_of_the_users_own_is_used() -> None:
    group = OneWorker()
    assert worker_group_of(group, "global_shuffle") is group


def test_the_package_itself_stands_for_its_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vars(fleet), "_fleet", facade(world_size=1))
    assert isinstance(worker_group_of(fleet, "global_shuffle"), OneWorker)


def _on_a_mesh(rank: int, world_size: int, files: list[str]) -> dict[str, Any]:
    """Reads, shuffles and counts on dp 2 x mp 2, and on dp 2 x pp 2."""
    found: dict[str, Any] = {}
    for axis in ("mp", "pp"):
        strategy = fleet.DistributedStrategy()
        strategy.hybrid_configs = {f"{axis}_degree": 2}
        fleet.init(is_collective=True, strategy=strategy, log_level="ERROR")
        torch.manual_seed(rank)  # even where the workers have drawn different numbers
        dataset = made(fleet.util.get_file_shard(files), batch_size=4)
        dataset.global_shuffle(fleet)
        found[axis] = {
            "place": [fleet.data_rank(), fleet.data_replicas(), fleet.worker_index(), fleet.worker_num()],
            "files": fleet.util.get_file_shard(files),
            "rows": written(dataset),
            "count": dataset.get_memory_data_size(fleet),
            "sum": fleet.metrics.sum(np.array([fleet.data_rank() + 1])).tolist(),
            "min": float(fleet.metrics.min(5.0 + fleet.data_rank())),
            "max": int(fleet.metrics.max(np.int64(-5 - fleet.data_rank()))),
            "acc": fleet.metrics.acc(*((1, 2) if axis == "mp" else (rank % 2, rank))),
        }
    return found


def test_copies_of_a_model_read_the_same(tmp_path: Path) -> None:
    """Files, shuffled samples and sizes go by data rank; a metric counts a model copy once, on the last stage."""
    files = write_files(tmp_path, [5, 4, 3, 6])
    found = run_workers(_on_a_mesh, 4, files, backend=None)
    peers = [(0, 1), (2, 3)]
    for axis in ("mp", "pp"):
        said = [worker[axis] for worker in found]
        assert [worker["place"] for worker in said] == [
            [next(at for at, group in enumerate(peers) if rank in group), 2, rank, 4] for rank in range(4)
        ]
        assert [said[group[0]]["files"] for group in peers] == [files[:2], files[2:]]
        for one, other in peers:
            assert said[one]["rows"] == said[other]["rows"]
        rows = sorted(row for group in peers for row in said[group[0]]["rows"])
        assert rows == sorted("".join(Path(file).read_text() for file in files).splitlines(keepends=True))
        for worker in said:
            assert worker["count"] == 18
            assert worker["sum"] == [3]
            assert (worker["min"], worker["max"]) == (5.0, -5)
    assert all(worker["mp"]["acc"] == 0.5 for worker in found)
    assert all(worker["pp"]["acc"] == pytest.approx(2 / 4) for worker in found)  # of stage 1: ranks 1 and 3
