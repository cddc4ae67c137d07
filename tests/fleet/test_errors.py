"""Exceptions reach other processes as they are: multiprocessing and Ray copy them."""

from __future__ import annotations

import copy

import pytest

from fleet.errors import (
    FleetError,
    LaunchError,
    NanInfError,
    StrategyConflictError,
    UnknownOptionError,
    WorkerFailedError,
)


@pytest.mark.parametrize(
    "error",
    [
        LaunchError("no", 7),
        NanInfError("no", rank=2, step=3),
        StrategyConflictError("amp", "dgc", "so"),
        UnknownOptionError("no"),
        WorkerFailedError("no", rank=1, host="h", exit_code=5, log_path="log/workerlog.1"),
    ],
)
def test_a_copy_says_the_same(error: FleetError) -> None:
    found = copy.copy(error)
    assert type(found) is type(error)
    assert str(found) == str(error)
    assert vars(found) == vars(error)
