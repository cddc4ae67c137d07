"""MlflowTracker: MLflow; needs the extra ``mlflow``. ``MLFLOW_TRACKING_URI`` names the server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlflow

from fleet.common.exit_status import EXIT
from fleet.errors import ConfigError
from fleet.trackers.tracker import RunInfo, Tracker

_LONGEST = 500  # characters of a parameter's value


class MlflowTracker(Tracker):
    """Writes a run of the experiment with the project's name, to the server in ``MLFLOW_TRACKING_URI``.

    Raises ConfigError where neither the variable nor ``mlflow.set_tracking_uri`` names a server.
    """

    def __init__(self) -> None:
        if not mlflow.is_tracking_uri_set():  # type: ignore[no-untyped-call]
            raise ConfigError(
                "strategy.trackers names 'mlflow', and MLFLOW_TRACKING_URI is not set. Set it to your server, as in "
                "http://mlflow:5000, or to a place on this machine that your MLflow takes."
            )

    def start(self, run: RunInfo) -> None:
        """Begins the run, or continues the run of that name."""
        self._client: Any = mlflow.MlflowClient()
        found = self._client.get_experiment_by_name(run.project)
        experiment = found.experiment_id if found is not None else self._client.create_experiment(run.project)
        # The name stands in quotes in a filter expression, which has no escape for them.
        name = run.name.replace("'", "")
        known = self._client.search_runs([experiment], f"attributes.run_name = '{name}'") if run.resumed else []
        started = known[0] if known else self._client.create_run(experiment, run_name=name)
        self._run_id = started.info.run_id
        # A restart may have other values, such as world_size, and MLflow refuses to change a parameter.
        if not known:
            for option, value in {"world_size": run.world_size, **run.options}.items():
                self._client.log_param(self._run_id, option, f"{value}"[:_LONGEST])

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Sends the values."""
        for name, value in values.items():
            self._client.log_metric(self._run_id, name, value, step=step)

    def close(self) -> None:
        """Ends the run."""
        self._client.set_terminated(self._run_id, "FAILED" if EXIT.code else "FINISHED")
