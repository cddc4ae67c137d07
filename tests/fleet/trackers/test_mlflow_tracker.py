"""MlflowTracker: a run that MLflow's own client reads, with the result of the job."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.tracked import read_back

_READ = """
import json
import mlflow
client = mlflow.MlflowClient()
(run,) = client.search_runs([client.get_experiment_by_name("fleet").experiment_id])
history = [[metric.step, metric.value] for metric in client.get_metric_history(run.info.run_id, "loss")]
print(json.dumps([history, run.info.status, run.data.params["world_size"]]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ends", "status"),
    [("well", "FINISHED"), ("with an error", "FAILED"), ("with status 3", "FAILED"), ("with status 0", "FINISHED")],
)
def test_a_run(tmp_path: Path, ends: str, status: str) -> None:
    environment = {"MLFLOW_TRACKING_URI": f"file:{tmp_path}/mlruns", "MLFLOW_ALLOW_FILE_STORE": "true"}
    found = read_back("mlflow", tmp_path, ends, environment, _READ)
    assert found == [[[step, step / 2] for step in range(1, 6)], status, "1"]


@pytest.mark.slow
def test_without_a_place_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="names 'mlflow', and MLFLOW_TRACKING_URI is not set"):
        read_back("mlflow", tmp_path, "well", {}, _READ)
