"""DataParallel refuses what would train alone without saying so; the two-worker behaviour is in the facade's tests."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fleet.errors import ConfigError, NotInitializedError
from fleet.paddle.data_parallel_layer import DataParallel


def test_one_process_runs_the_plain_module() -> None:
    """003-03: without peers the result is the plain module's."""
    layer = nn.Linear(2, 1)
    net = DataParallel(layer)
    x = torch.ones(1, 2)
    torch.testing.assert_close(net(x), layer(x))
    with net.no_sync():
        net(x).sum().backward()
    assert layer.weight.grad is not None


def test_several_workers_need_init_parallel_env(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers 4.1: under a starter of two workers, DataParallel without a process group raises."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(NotInitializedError, match=r"fleet.init_parallel_env\(\) first"):
        DataParallel(nn.Linear(2, 1))


@pytest.mark.parametrize("size", [0, -1, "25", True])
def test_bucket_sizes_are_checked(size: object) -> None:
    """B.11: a bucket size that is not a positive number raises."""
    with pytest.raises(ConfigError, match="greater than 0"):
        DataParallel(nn.Linear(1, 1), comm_buffer_size=size)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="greater than 0"):
        DataParallel(nn.Linear(1, 1), last_comm_buffer_size=size)  # type: ignore[arg-type]
