"""What the workers run."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleet.errors import ConfigError
from fleet.launch.plan.records import Script
from tests.helpers.launching import notes, read


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "data.txt").touch()
    (tmp_path / "program").touch(mode=0o755)
    return tmp_path


def kind(*flags: str, script: str) -> tuple[str, bool, bool]:
    config = read(*flags, script=(script,), env={"PATH": "/bin:/usr/bin"})
    return config.script.name, config.script.is_module, config.script.is_executable


def test_kinds(folder: Path) -> None:
    """C.1: a .py file, another executable, a module, the word run_check."""
    assert kind(script="train.py") == ("train.py", False, False)
    assert kind(script=f"{folder}/train.py") == (f"{folder}/train.py", False, False)
    assert kind("-m", script="train") == ("train", True, False)
    assert kind("--module", script="pkg.train") == ("pkg.train", True, False)
    assert kind(script="sh") == ("sh", False, True)
    assert kind(script="./program") == ("./program", False, True)
    assert kind(script="program") == ("./program", False, True)
    assert kind(script="run_check") == ("fleet", True, False)


def test_a_missing_script_is_named_with_the_nearest_file(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"'trian.py' does not exist .*Did you mean 'train.py'"):
        kind(script="trian.py")
    with pytest.raises(ConfigError, match=r"neither a file here.*put -m before"):
        kind(script="fleet_train")
    with pytest.raises(ConfigError, match=r"chmod \+x"):
        kind(script="data.txt")
    with pytest.raises(ConfigError, match="neither a .py file nor an executable"):
        kind("--no_python", script="train.py")
    with pytest.raises(ConfigError, match="--no_python does not"):
        kind("-m", "--no_python", script="train")


def test_a_command_of_its_own_gets_no_interpreter() -> None:
    assert Script(name="./a", args=("b",), is_executable=True).command == ("./a", "b")
    assert Script(name="a").is_module is False


def test_a_flag_of_the_launcher_behind_the_script_is_noticed(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys")
    assert notes(read(script=(f"{script}", "--gpus=0,1", "--lr", "1"))).startswith(
        f"--gpus=0,1 stands behind the script, so {script} gets it and the launcher does not."
    )
    assert "--node-rank" in notes(read(script=(f"{script}", "--node-rank", "1")))
    script.write_text("parser.add_argument('--gpus')")
    assert notes(read(script=(f"{script}", "--gpus=0,1"))) == ""


@pytest.mark.parametrize("shadow", ["fleet.py", "fleet/__init__.py"])
def test_a_users_own_fleet_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shadow: str) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\nfrom fleet import fleet\n")
    (tmp_path / "launch.py").touch()
    (tmp_path / "strategies.py").touch()
    assert read(script=(f"{script}",)).script.name == f"{script}"
    (tmp_path / shadow).parent.mkdir(exist_ok=True)
    (tmp_path / shadow).touch()
    with pytest.raises(ConfigError, match=f"{shadow} stands beside .*train.py.*Rename it"):
        read(script=(f"{script}",))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="Rename it"):
        read("-m", script=("train",))
    script.write_text("import torch\n")
    assert read(script=(f"{script}",)).script.name == f"{script}"
