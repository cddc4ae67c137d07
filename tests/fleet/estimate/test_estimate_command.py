"""``python -m fleet estimate`` (issue 3): the table, and what is said of wrong arguments."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from fleet.__main__ import main
from fleet.estimate.estimate_command import run

MODEL = """
from dataclasses import dataclass

import torch
from neighbour import WIDTH


@dataclass
class Size:
    width: int = WIDTH


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x, tokens=None):
        return self.layer(x)


def huge():
    return torch.nn.Linear(65536, 65536)


VALUE = 3
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Returns a user's file that imports the one beside it."""
    (tmp_path / "neighbour.py").write_text("WIDTH = 512\n")
    (tmp_path / "user_model.py").write_text(MODEL)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("user_model", "neighbour", "broken"):
        monkeypatch.setitem(sys.modules, name, sys)  # so that it is taken out again afterwards
        del sys.modules[name]
    return str(tmp_path / "user_model.py")


def test_the_table_is_printed(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A class, two inputs with their types, an optimizer and the number of workers."""
    words = ["--batch", "4,512", "--batch", "4,7", "--dtype", "float32", "--dtype", "int64", "--optimizer", "adam"]
    assert main(["estimate", f"{model}:Net", *words, "--world-size", "4"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("Memory of one of 4 workers (cpu)")
    assert "optimizer state          2.0           2.0" in shown.out
    assert shown.err == ""


def test_a_model_larger_than_the_machine(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """16 GiB of parameters in half precision's batch, and nothing is allocated."""
    assert run([f"{model}:huge", "--batch", "1,65536", "--device", "cuda"]) == 0
    assert "parameters           16384." in capsys.readouterr().out


def test_a_strategy_file(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """YAML and protobuf text; what is not modelled is printed; a refused strategy gives 1 and the reason."""
    file = tmp_path / "strategy.yaml"
    file.write_text("sync_batch_norm: true\nnccl_comm_num: 2\n")
    assert run([f"{model}:Net", "--batch", "4,512", "--strategy", str(file)]) == 0
    shown = capsys.readouterr()
    assert "- sync_batch_norm: " in shown.out
    assert shown.err == ""
    text = tmp_path / "strategy.prototxt"
    text.write_text("localsgd: true\n")
    assert run([f"{model}:Net", "--batch", "4,512", "--strategy", str(text)]) == 0
    assert "communication            1.0           " in capsys.readouterr().out
    file.write_text("lars: true\nlamb: true\n")
    assert run([f"{model}:Net", "--batch", "4,512", "--strategy", str(file)]) == 1
    assert "cannot both be on" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("place", "words", "said"),
    [
        ("{file}", [], "write the file and the name in it"),
        ("{file}:Nett", [], "Did you mean 'Net'?"),
        ("{file}:nothing_like_it", [], "It defines "),
        ("{file}:VALUE", [], "model is 3"),
        ("absent.py:Net", [], "'absent.py' is not a file"),
        ("{folder}/notes.txt:Net", [], "ends in .py"),
        ("{folder}/broken.py:Net", [], "could not be imported: ZeroDivisionError: division by zero"),
        ("{file}:Net", ["--batch", "4,x"], "--batch '4,x'"),
        ("{file}:Net", ["--batch", "-4,512"], "--batch '-4,512'"),
        ("{file}:Net", ["--dtype", "float31"], "Did you mean 'float32'?"),
        ("{file}:Net", ["--dtype", "int64", "--dtype", "int64"], "--dtype was given 2 times for 1 inputs"),
        ("{file}:Net", ["--optimizer", "sgdd"], "Did you mean 'sgd'?"),
        ("{file}:Net", ["--world-size", "0"], "world_size=0"),
        ("{file}:Net", ["--strategy", "absent.yaml"], "absent.yaml"),
        ("{file}:Net", ["--device", "gpu"], "invalid choice"),
    ],
)
def test_wrong_arguments(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str, words: list[str], said: str
) -> None:
    """2, the reason on standard error, no table and no traceback."""
    (tmp_path / "notes.txt").write_text("Net = 3\n")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    batch = [] if "--batch" in words else ["--batch", "4,512"]
    words = [f"{word}={words[i + 1]}" for i, word in enumerate(words) if i % 2 == 0]
    assert run([place.format(file=model, folder=tmp_path), *batch, *words]) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert shown.out == ""
    assert "broken" not in sys.modules


def test_help_says_that_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """--help is 0; it says that the file is run. A batch is required."""
    assert run(["--help"]) == 0
    assert "runs the code in it" in " ".join(capsys.readouterr().out.split())
    assert run(["model.py:Net"]) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--batch", "4,9"], r"the batch \[\(\(4, 9\), torch.float32\)\] with RuntimeError: .*same reduction dim"),
        (["--batch", "4,512", "--batch", "4,7", "--batch", "4,7"], "with TypeError: .*takes from 2 to 3 positional"),
    ],
)
def test_a_batch_that_the_model_does_not_take(
    model: str, words: list[str], said: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """It ended with torch's traceback and code 1."""
    assert main(["estimate", f"{model}:Net", *words]) == 2
    assert re.search(said, capsys.readouterr().err)
    assert not caplog.records
