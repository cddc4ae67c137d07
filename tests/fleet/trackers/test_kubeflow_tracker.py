"""Progress to Kubeflow Trainer's status endpoint: what is sent, how often, and what a failure of it does."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

import fleet
from fleet.env import Environment
from fleet.errors import ConfigError
from fleet.trackers import kubeflow_tracker
from fleet.trackers.kubeflow_tracker import KubeflowTracker
from fleet.trackers.progress import Progress
from tests.helpers.ready_python import run_python
from tests.helpers.status_server import SCHEMA, StatusServer, serve_status


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StatusServer]:
    with serve_status(tmp_path) as started:
        yield started


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the tracker send often, and give up soon."""
    monkeypatch.setattr(kubeflow_tracker, "_PERIOD_S", 0.05)
    monkeypatch.setattr(kubeflow_tracker, "_AFTER_FAILURE_S", 0.05)


def until(condition: Callable[[], object]) -> None:
    """Returns when ``condition`` holds."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def tracker(server: StatusServer, folder: Path, total: int = 10, steps: int = 0, **changed: str) -> KubeflowTracker:
    progress = Progress(lambda: steps)
    progress.total_steps = total
    return KubeflowTracker(progress, Environment({**server.variables(folder), **changed}))


def status(body: dict[str, Any]) -> dict[str, Any]:
    """Returns the status of a body that the schema takes, with the metrics as a dictionary."""
    jsonschema.validate(body, SCHEMA)
    found: dict[str, Any] = body["trainerStatus"]
    return {**found, "metrics": {each["name"]: each["value"] for each in found["metrics"]}}


def test_the_newest_values_are_sent_in_the_form_of_the_endpoint(server: StatusServer, tmp_path: Path) -> None:
    sender = tracker(server, tmp_path)
    sender.log({"loss": 0.5, "gone": float("nan")}, 2)
    until(lambda: server.bodies)
    sender.log({"loss": 0.25}, 4)
    sender.close()
    first, last = (status(body) for body in server.bodies)
    assert first["progressPercentage"] == 20
    assert first["metrics"] == {"step": "2", "loss": "0.5", "gone": "nan"}
    assert "estimatedRemainingSeconds" not in first
    assert last["progressPercentage"] == 40
    assert last["estimatedRemainingSeconds"] >= 0
    assert last["metrics"] == {"step": "4", "loss": "0.25", "gone": "nan"}


def test_100_percent_comes_at_the_end_of_all_steps_alone(server: StatusServer, tmp_path: Path, quick: None) -> None:
    sender = tracker(server, tmp_path, total=4)
    sender.log({"loss": 1.0}, 4)
    until(lambda: server.bodies)
    sender.close()
    assert [status(body)["progressPercentage"] for body in server.bodies] == [99, 100]
    assert status(server.bodies[1])["estimatedRemainingSeconds"] == 0


def test_a_training_that_failed_does_not_reach_100_percent(
    server: StatusServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)
    sender = tracker(server, tmp_path, total=4)
    sender.log({"loss": 1.0}, 4)
    sender.close()
    assert {status(body)["progressPercentage"] for body in server.bodies} == {99}


def test_steps_of_optimizers_count_before_those_of_the_values(server: StatusServer, tmp_path: Path) -> None:
    sender = tracker(server, tmp_path, total=1000, steps=500)
    sender.log({"loss": 1.0}, 3)  # an epoch
    sender.close()
    assert status(server.bodies[-1])["progressPercentage"] == 50


def test_without_a_total_there_is_no_progress(server: StatusServer, tmp_path: Path) -> None:
    sender = tracker(server, tmp_path, total=0)
    sender.log({"loss": 1.0}, 3)
    sender.close()
    assert set(status(server.bodies[-1])) == {"lastUpdatedTime", "metrics"}


def test_many_and_long_names_fit_into_a_request(server: StatusServer, tmp_path: Path) -> None:
    sender = tracker(server, tmp_path)
    long = "\u0436" * 70
    sender.log({f"{number}-{long}" if number % 2 else f"{number}": number / 3 for number in range(400)}, 1)
    sender.close()
    metrics = status(server.bodies[-1])["metrics"]
    assert server.sizes[-1] <= 1 << 16
    assert len(metrics) > 100
    assert "398" in metrics  # the newest stay
    assert "0" not in metrics


def test_many_calls_are_few_requests(server: StatusServer, tmp_path: Path) -> None:
    sender = tracker(server, tmp_path)
    for step in range(200):
        sender.log({"loss": 1.0}, step)
    sender.close()
    assert len(server.bodies) <= 2
    assert status(server.bodies[-1])["metrics"]["step"] == "199"


def test_a_renewed_token_is_read(
    server: StatusServer, tmp_path: Path, quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    sender = tracker(server, tmp_path)
    server.token = "second"
    for step in range(3):
        sender.log({"loss": 1.0}, step)
        until(lambda: len(server.codes) > step)  # noqa: B023
    assert server.codes == [401, 401, 401]
    assert caplog.text.count("it answers 401 Unauthorized. Training goes on") == 1
    (tmp_path / "token").write_text("second")
    sender.log({"loss": 1.0}, 4)
    sender.close()
    assert server.bodies


@pytest.mark.parametrize("code", [403, 422, 500, 503])
def test_an_answer_that_is_no_success_is_named_once(
    code: int, server: StatusServer, tmp_path: Path, quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    server.code = code
    sender = tracker(server, tmp_path)
    for step in range(2):
        sender.log({"loss": 1.0}, step)
        until(lambda: len(server.codes) > step)  # noqa: B023
    sender.close()
    assert len(caplog.records) == 1
    assert f"does not reach Kubeflow Trainer at 127.0.0.1:{sender._port}: it answers {code}" in caplog.text


def test_a_redirect_is_not_followed(server: StatusServer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server.code, server.location = 307, server.url
    sender = tracker(server, tmp_path)
    sender.log({"loss": 1.0}, 1)
    sender.close()
    assert set(server.codes) == {307}
    assert "it answers 307" in caplog.text


def test_a_server_that_hangs_holds_nobody(
    server: StatusServer, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubeflow_tracker, "_LAST_LIMIT_S", 0.3)
    server.hold.clear()
    sender = tracker(server, tmp_path)
    began = time.monotonic()
    for step in range(1000):
        sender.log({"loss": 1.0}, step)
    assert time.monotonic() - began < 1.0
    sender.close()
    assert time.monotonic() - began < 2.0
    assert "no answer within 0.3 s" in caplog.text
    server.hold.set()
    assert sender._thread is not None
    sender._thread.join()


def test_a_certificate_of_nobody_known_is_refused(
    server: StatusServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "other").mkdir()
    with serve_status(tmp_path / "other"):
        pass
    sender = tracker(server, tmp_path, KUBEFLOW_TRAINER_SERVER_CA_CERT=str(tmp_path / "other" / "cert.pem"))
    sender.log({"loss": 1.0}, 1)
    sender.close()
    assert server.codes == []
    assert "CERTIFICATE_VERIFY_FAILED" in caplog.text


@pytest.mark.parametrize("text", ["no certificate", None])
def test_a_ca_file_that_cannot_be_used_is_named(
    text: str | None, server: StatusServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The text of ssl's own error names no file."""
    authority = tmp_path / "ca.pem"
    if text is not None:
        authority.write_text(text)
    sender = tracker(server, tmp_path, KUBEFLOW_TRAINER_SERVER_CA_CERT=f"{authority}")
    sender.log({"loss": 1.0}, 1)
    sender.close()
    assert f"KUBEFLOW_TRAINER_SERVER_CA_CERT={authority} cannot be read as a CA file" in caplog.text
    assert server.codes == []


@pytest.mark.parametrize(
    ("text", "said"),
    [("secret\nInjected: 1", "holds no token"), ("", "holds no token"), (None, "FileNotFoundError")],
)
def test_a_token_file_that_cannot_be_used_is_named_and_not_shown(
    text: str | None, said: str, server: StatusServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sender = tracker(server, tmp_path)
    (tmp_path / "token").unlink()
    if text is not None:
        (tmp_path / "token").write_text(text)
    sender.log({"loss": 1.0}, 1)
    sender.close()
    assert said in caplog.text
    assert "secret" not in caplog.text
    assert server.codes == []


@pytest.mark.parametrize(
    "url",
    ["http://trainer:8082/status", "trainer:8082", "https://", "https://me:pw@trainer/x", "https://trainer:port/x",
     "https://trainer/a b", "https://trainer:99999/x", "https://[::1/x"],
)  # fmt: skip
def test_a_wrong_address_is_refused_at_init(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", url)
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(tmp_path))
    with pytest.raises(ConfigError, match="KUBEFLOW_TRAINER_SERVER_URL is .*https address.*unset it"):
        fleet.fleet.init(is_collective=True)


def test_an_address_without_a_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", "https://trainer.example/status")
    with pytest.raises(ConfigError, match="KUBEFLOW_TRAINER_SERVER_TOKEN is not.*path of the file"):
        fleet.fleet.init(is_collective=True)


TRAIN = """
import sys, torch
from fleet import fleet

strategy = fleet.DistributedStrategy()
strategy.tracker_configs = {"total_steps": 25}
fleet.init(is_collective=True, strategy=strategy)
optimizer = fleet.distributed_optimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1))
for _ in range(15):
    optimizer.step()
fleet.log({"loss": 0.5})
sys.exit(75)
"""


@pytest.mark.slow
def test_an_end_in_the_middle_is_no_end(server: StatusServer, tmp_path: Path) -> None:
    """A preempted worker ends without an error."""
    variables = {**os.environ, **server.variables(tmp_path)}
    job = run_python(TRAIN, env=variables, timeout_s=120)
    assert job.returncode == 75, job.stderr
    assert "WARNING" not in job.stderr, job.stderr
    assert status(server.bodies[-1])["progressPercentage"] == 60


def test_a_forked_process_says_nothing(server: StatusServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sender = tracker(server, tmp_path, total=1)
    sender.log({"loss": 1.0}, 1)
    until(lambda: server.bodies)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    sender.close()
    monkeypatch.undo()
    assert len(server.bodies) == 1
    sender.close()
    assert status(server.bodies[-1])["progressPercentage"] == 100


def test_a_script_that_logs_nothing_reports_its_progress(
    server: StatusServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The steps after the last automatic record count as well."""
    for name, value in server.variables(tmp_path).items():
        monkeypatch.setenv(name, value)
    strategy = fleet.DistributedStrategy()
    strategy.tracker_configs = {"total_steps": 15}
    fleet.fleet.init(is_collective=True, strategy=strategy)
    model = torch.nn.Linear(2, 1)
    optimizer = fleet.fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model = fleet.fleet.distributed_model(model)
    for _ in range(15):
        model(torch.ones(4, 2)).sum().backward()
        optimizer.step()
        optimizer.clear_grad()
    fleet.fleet._instance()._close()
    assert [status(body)["progressPercentage"] for body in server.bodies][-1] == 100
    assert status(server.bodies[-1])["metrics"]["step"] == "15"
    assert "rate/steps_per_s" in status(server.bodies[-1])["metrics"]
    assert "changes nothing" not in caplog.text
