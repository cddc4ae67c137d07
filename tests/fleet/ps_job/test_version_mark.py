"""fleet.mark_version in a job: the rows after that step on all servers, the way back, and what is refused."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from fleet import fleet, ps
from fleet.errors import ConfigError, PSError
from fleet.facade import Fleet
from fleet.ps.publishing.delta import decode, encode
from fleet.ps.publishing.publication import Publication
from fleet.ps_job.version_mark import mark_version
from tests.fleet.ps_job.test_server_job import make_sgd, served, strategy
from tests.helpers.served import batches, run_job
from tests.helpers.served import train as train_model

IDS = torch.arange(40) * 10**12


def published(mode: str, folder: Path, values: str = "float32") -> Any:
    made = strategy(mode)
    made.a_sync_configs = {"publish": str(folder), "publish_every_s": 0.02, "publish_values": values}
    return made


def in_tables(model: Any) -> torch.Tensor:
    return model.module.ads.lookup_rows(IDS)


def in_folder(folder: Path, version: str | None) -> torch.Tensor:
    with ps.Reader(folder, version=version) as reader:
        rows: torch.Tensor = reader.lookup("ads", IDS)
        return rows


def stored(rows: torch.Tensor, values: str) -> torch.Tensor:
    return torch.from_numpy(decode(*encode(rows.numpy(), values)))


@pytest.mark.parametrize(("mode", "values"), [("sync", "float32"), ("sync", "int8"), ("async", "bfloat16")])
def test_a_version_has_the_rows_of_its_step_on_all_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, values: str
) -> None:
    monkeypatch.setenv("FLEET_PS_FOLDER", str(tmp_path / "state"))
    rows = tmp_path / "rows"
    expected: dict[str, torch.Tensor] = {}

    def work(own: Fleet, rank: int) -> None:
        model, optimizer = served(own, published(mode, rows, values), make_sgd)
        data = batches(9, rank, 2)
        for step in range(9):
            train_model(model, optimizer, data[step : step + 1])
            if step % 3 == 1:
                own.mark_version(f"step-{step + 1}")
                own.barrier_worker()  # nobody has trained since
                if rank == 0:
                    expected[f"step-{step + 1}"] = in_tables(model)
                own.barrier_worker()
        own.stop_worker()

    run_job(work, strategy=published(mode, rows, values), num_servers=2, num_workers=2)
    assert list(expected) == ["step-2", "step-5", "step-8"]
    for name, table in expected.items():
        found = in_folder(rows, name)
        known = (found != 0).any(1)
        assert known.sum() > 20
        assert torch.equal(found[known], stored(table, values)[known])
        if mode == "sync":
            assert f"step-{ps.Reader(rows, version=name).position[1].step}" == name
    assert not torch.equal(expected["step-2"], expected["step-5"])
    assert not torch.equal(in_folder(rows, None), in_folder(rows, "step-8"))


def test_training_goes_back_and_released_readers_see_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEET_PS_FOLDER", str(tmp_path / "state"))
    rows = tmp_path / "rows"

    def work(own: Fleet, rank: int) -> None:
        model, optimizer = served(own, published("sync", rows), make_sgd)
        train_model(model, optimizer, batches(3))
        good = in_tables(model)
        own.mark_version("monday", save=tmp_path / "saves" / "monday")
        train_model(model, optimizer, batches(6)[3:])
        own.mark_version("tuesday")
        reader = ps.Reader(rows)
        version = ps.roll_back(rows, "monday")
        assert version.save == str(tmp_path / "saves" / "monday")
        own.load_model(version.save)
        known = (in_folder(rows, "monday") != 0).any(1)  # rows that came later stay as they are
        assert torch.equal(in_tables(model)[known], good[known])
        own.mark_version("wednesday")  # whole rows are published again; readers stay at monday
        reader.refresh()
        assert reader.version == version
        ps.release(rows)
        reader.refresh()
        assert reader.version is None
        assert torch.equal(reader.lookup("ads", IDS)[known], good[known])
        train_model(model, optimizer, batches(7)[6:])
        own.mark_version("thursday")
        reader.refresh()
        assert torch.equal(reader.lookup("ads", IDS)[known], in_tables(model)[known])
        assert not torch.equal(in_tables(model)[known], good[known])
        own.stop_worker()

    run_job(work, strategy=published("sync", rows))
    assert [version.name for version in ps.Reader(rows).versions] == ["monday", "tuesday", "wednesday", "thursday"]


def test_a_program_goes_with_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEET_PS_FOLDER", str(tmp_path / "state"))
    rows, folder = tmp_path / "rows", tmp_path / "model"
    inputs = batches(1)[0][:2]

    def work(own: Fleet, rank: int) -> None:
        model, optimizer = served(own, published("sync", rows), make_sgd)
        train_model(model, optimizer, batches(2))
        own.save_inference_model(dirname=folder, example_inputs=inputs)
        own.mark_version("monday", model=folder)
        own.stop_worker()

    run_job(work, strategy=published("sync", rows))
    kept = {path.name for path in (rows / "versions" / "monday").iterdir()}
    assert {"version.json", "export.json"} < kept
    assert {name for name in os.listdir(folder) if name.endswith(".pt2")} < kept
    assert ps.Predictor(folder, ps.Reader(rows, version="monday"))(*inputs).shape == (8, 1)


def test_the_program_may_come_until_all_workers_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEET_PS_FOLDER", str(tmp_path / "state"))
    rows, folder = tmp_path / "rows", tmp_path / "model"
    inputs = batches(1)[0][:2]
    is_waiting = threading.Event()

    def work(own: Fleet, rank: int) -> None:
        model, optimizer = served(own, published("sync", rows), make_sgd)
        train_model(model, optimizer, batches(2, rank, 2))
        with pytest.raises(ConfigError, match="no exported program"):
            own.mark_version("monday", model=folder, save=tmp_path / "save")
        assert not (tmp_path / "save").exists()
        if rank == 0:
            assert is_waiting.wait(60)
            ps.export(model, inputs, folder)
        else:
            is_waiting.set()
        own.mark_version("monday", model=folder, save=tmp_path / "save")
        own.stop_worker()

    run_job(work, strategy=published("sync", rows), num_workers=2)
    assert ps.Predictor(folder, ps.Reader(rows, version="monday"))(*inputs).shape == (8, 1)
    assert torch.equal(in_folder(tmp_path / "save", None), in_folder(rows, "monday"))


def test_in_geo_mode_a_version_is_what_a_save_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEET_PS_FOLDER", str(tmp_path / "state"))
    made = published("geo", tmp_path / "rows")
    made.a_sync_configs = {**made.a_sync_configs, "k_steps": 100}

    def work(own: Fleet, rank: int) -> None:
        model, optimizer = served(own, made, make_sgd)
        train_model(model, optimizer, batches(2, rank, 2))
        own.mark_version("monday", save=tmp_path / "save")
        own.stop_worker()

    run_job(work, strategy=made, num_workers=2)
    found = in_folder(tmp_path / "rows", "monday")
    known = (found != 0).any(1)
    assert known.sum() > 10
    assert torch.equal(found[known], in_folder(tmp_path / "save", None)[known])
    assert ps.Reader(tmp_path / "rows").versions[0].step == 0


def test_what_cannot_be_marked_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEET_PS_FOLDER", str(tmp_path / "state"))
    rows = tmp_path / "rows"

    def work(own: Fleet, rank: int) -> None:
        model, optimizer = served(own, published("sync", rows), make_sgd)
        for arguments, rule in (
            ({"name": "a/b"}, "a name has 1 to 64"),
            ({"name": "a", "keep": 0}, "keep is 0"),
            ({"name": "a", "save": 3}, r"save=3\) takes the path"),
            ({"name": "a", "model": tmp_path}, "no exported program"),
        ):
            with pytest.raises(ConfigError, match=rule):
                own.mark_version(**arguments)
        train_model(model, optimizer, batches(1))
        own.mark_version("monday")
        own.mark_version("monday")  # the same rows
        train_model(model, optimizer, batches(1))
        with pytest.raises(PSError, match=r"'monday' was marked before, with step 1"):
            own.mark_version("monday")
        own.mark_version("tuesday", keep=1)
        own.stop_worker()

    run_job(work, strategy=published("sync", rows))
    assert [version.name for version in ps.Reader(rows).versions] == ["tuesday"]


@pytest.mark.parametrize(
    ("sink", "rule"), [(None, "this job publishes none"), (print, "versions are kept in a folder")]
)
def test_a_job_without_a_folder_of_rows_is_refused(sink: Any, rule: str) -> None:
    publication = None if sink is None else Publication(sink=sink)
    job = type("Job", (), {"publication": publication, "running": lambda self: type("T", (), {"tables": None})})()
    with pytest.raises(ConfigError, match=rule):
        mark_version(job, "monday", 5, None, None)  # type: ignore[arg-type]


def test_it_is_a_call_of_fleet() -> None:
    assert callable(fleet.mark_version)


def test_a_name_that_is_taken_leaves_the_save_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEET_PS_FOLDER", str(tmp_path / "state"))
    rows, save = tmp_path / "rows", tmp_path / "save"

    def work(own: Fleet, rank: int) -> None:
        model, optimizer = served(own, published("sync", rows), make_sgd)
        data = batches(2, rank, 2)
        train_model(model, optimizer, data[:1])
        own.mark_version("monday", save=save)
        train_model(model, optimizer, data[1:])
        with pytest.raises(PSError, match="'monday' was marked before"):
            own.mark_version("monday", save=save)
        own.stop_worker()

    run_job(work, strategy=published("sync", rows))
    assert torch.equal(in_folder(save, None), in_folder(rows, "monday"))
