"""torch and this project are libraries, however they are reached; a script is not, and findings name its lines."""

import importlib.util
from pathlib import Path

import pytest
import torch

import fleet
from fleet.verify import user_lines
from fleet.verify.paired_runs import Run
from fleet.verify.report import Finding
from fleet.verify.user_lines import is_library, place_of, with_line

LINES = {"forward": "train.py:1", "backward": "train.py:2", "step": "train.py:3"}


def test_torch_is_a_library_and_this_file_is_not() -> None:
    assert is_library(str(torch.__file__))
    assert not is_library(__file__)


def test_this_project_is_a_library_through_a_symbolic_link_as_well(tmp_path: Path) -> None:
    (tmp_path / "fleet").symlink_to(Path(str(fleet.__file__)).parent)
    linked = tmp_path / "fleet" / "verify" / "user_lines.py"
    spec = importlib.util.spec_from_file_location("linked_user_lines", linked)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.is_library(str(linked))
    assert module.is_library(str(user_lines.__file__))
    assert not module.is_library(__file__)


def run_of(*steps: int) -> Run:
    """Returns a run of two workers whose lines end with the update and the worker."""
    records = [
        [
            {"kind": "update", "n": n, "lines": {kind: f"{place}{n}{rank}" for kind, place in LINES.items()}}
            for n in steps
        ]
        for rank in range(2)
    ]
    return Run(folder=Path(), records=records)


@pytest.mark.parametrize(
    ("cause", "tensor", "step", "line"),
    [
        ("loss-sum-instead-of-mean", "gradient of 0.weight", 2, "train.py:220"),
        ("gradients-not-averaged", "gradient of 0.weight", 1, "train.py:110"),
        ("gradients-clipped-per-part", "gradient of 0.weight", 1, "train.py:310"),
        ("initial-weights-differ", "0.weight", 0, "train.py:110"),
        ("unknown", "output", 1, "train.py:110"),
        ("unknown", "gradient of 0.weight", 1, "train.py:210"),
        ("unknown", "0.weight exp_avg", 2, "train.py:320"),
        ("unknown", "0.weight", 9, ""),
    ],
)
def test_the_line_follows_from_the_cause(cause: str, tensor: str, step: int, line: str) -> None:
    finding = Finding(cause=cause, sentence="", step=step, tensor=tensor)
    assert with_line(finding, run_of(1, 2), [0, 1]).where == line


def test_a_finding_of_one_worker_has_that_workers_line_and_a_known_line_stays() -> None:
    late = Finding(cause="scheduler-stepped-unevenly", sentence="", step=2, rank=1)
    assert with_line(late, run_of(1, 2), [0, 1]).where == "train.py:321"
    known = Finding(cause="samples-left-out", sentence="", step=1, where="data.py:5")
    assert with_line(known, run_of(1), [0, 1]) is known


def test_a_place_is_shown_from_the_current_folder_with_its_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text("x = 1\n    loss.backward()\n")
    monkeypatch.chdir(tmp_path)
    assert place_of(f"{tmp_path}/train.py:2") == "train.py:2 `loss.backward()`"
    assert place_of("/nowhere/else.py:7") == "/nowhere/else.py:7"
    assert place_of("train.py:41 `clip(model)`") == "train.py:41 `clip(model)`"
    assert place_of("") == ""
