"""``python -m fleet checkpoint``: every format to every other one, what is shown, what is found damaged or refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest
import safetensors.torch
import torch

from fleet import checkpoint
from fleet.__main__ import main
from fleet.checkpoint.conversion.formats import open_state
from fleet.checkpoint.conversion.torch_tree import tree_of_state
from tests.helpers.many_tensors import comparable, many_entries, many_tensors

FORMATS = ("fleet", "torch", "dcp", "hf")


def convert(*arguments: Any) -> int:
    return main(["checkpoint", "convert", *map(str, arguments)])


@pytest.fixture
def source(tmp_path: Path) -> Path:
    torch.save(many_entries(), tmp_path / "source.pt")
    return tmp_path / "source.pt"


@pytest.mark.parametrize("first", FORMATS)
@pytest.mark.parametrize("second", FORMATS)
def test_every_format_to_every_other_and_back(first: str, second: str, tmp_path: Path) -> None:
    tree: Any = many_tensors()
    torch.save(tree, tmp_path / "start.pt")
    ends = {"hf": ".safetensors"}
    one, two = tmp_path / f"one{ends.get(first, '')}", tmp_path / f"two{ends.get(second, '')}"
    assert convert(tmp_path / "start.pt", one, "--to", first) == 0
    assert convert(one, two, "--to", second) == 0
    assert convert(two, tmp_path / "end.pt", "--key", "model") == 0
    found = torch.load(tmp_path / "end.pt", weights_only=True)
    assert comparable(found.get("model", found)) == comparable(tree)


@pytest.mark.parametrize("first", ["fleet", "torch", "dcp"])
@pytest.mark.parametrize("second", ["fleet", "torch", "dcp"])
def test_a_whole_training_state_goes_through_every_format(
    first: str, second: str, source: Path, tmp_path: Path
) -> None:
    assert convert(source, tmp_path / "one", "--to", first) == 0
    assert convert(tmp_path / "one", tmp_path / "two", "--to", second) == 0
    assert comparable(tree_of_state(open_state(str(tmp_path / "two")))) == comparable(many_entries())


def parts() -> dict[str, Any]:
    """Returns a model, an optimizer and a scheduler of the form that :func:`many_entries` saves."""
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.BatchNorm2d(2))
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.5)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2),
        "epoch": 0,
    }


def states(loaded: dict[str, Any]) -> Any:
    return comparable({n: one.state_dict() if hasattr(one, "state_dict") else one for n, one in loaded.items()})


@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_a_script_loads_what_was_converted_and_what_it_saves_is_converted(
    to: str, source: Path, tmp_path: Path
) -> None:
    assert convert(source, tmp_path / "other", "--to", to) == 0
    assert convert(tmp_path / "other", tmp_path / "run") == 0
    loaded = checkpoint.load(tmp_path / "run", parts())
    expected = {name: one for name, one in many_entries().items() if name in loaded}
    assert states(loaded) == comparable(expected)
    checkpoint.save(tmp_path / "saved", loaded)
    assert convert(tmp_path / "saved", tmp_path / "back", "--to", to) == 0
    assert comparable(tree_of_state(open_state(str(tmp_path / "back")))) == comparable(expected)


def test_a_model_from_hugging_face_is_loaded_by_a_script(source: Path, tmp_path: Path) -> None:
    assert convert(source, tmp_path / "model.safetensors") == 0
    assert convert(tmp_path / "model.safetensors", tmp_path / "run") == 0
    model = checkpoint.load(tmp_path / "run", {"model": parts()["model"]})["model"]
    assert comparable(dict(model.state_dict())) == comparable(dict(many_entries()["model"]))


def test_the_format_follows_from_the_name_of_the_target(source: Path, tmp_path: Path) -> None:
    kinds = {
        "a.safetensors": "safetensors", "a.pt": "a file of torch.save", "a.bin": "a file of torch.save",
        "a": "a Fleet checkpoint",
    }  # fmt: skip
    for name, kind in kinds.items():
        assert convert(source, tmp_path / name) == 0
        assert open_state(str(tmp_path / name)).kind == kind


def test_what_stays_behind_is_said(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert(source, tmp_path / "a.safetensors") == 0
    said = capsys.readouterr().out
    assert "left out: " in said
    assert "optimizer" in said
    size = sum(one.nbytes for one in many_entries()["model"].values())
    assert f"hf, 12 tensors, {size:,} bytes, from a file of torch.save" in said


def test_shards_and_names(source: Path, tmp_path: Path) -> None:
    (tmp_path / "names.yaml").write_text("conv.weight: 0.weight\n")
    arguments = ("--to", "hf", "--max-shard-size", "100B", "--map", tmp_path / "names.yaml", "--key", "model")
    assert convert(source, tmp_path / "folder", *arguments) == 0
    files = sorted((tmp_path / "folder").glob("*.safetensors"))
    assert len(files) > 1
    assert "conv.weight" in {name for file in files for name in safetensors.torch.load_file(file)}


def test_a_remote_checkpoint_is_written_shown_and_read(source: Path, tmp_path: Path) -> None:
    assert convert(source, "memory://command/run") == 0
    assert main(["checkpoint", "show", "memory://command/run"]) == 0
    assert main(["checkpoint", "verify", "memory://command/run"]) == 0
    assert convert(source, "memory://command/run") == 2
    assert convert("memory://command/run", tmp_path / "back.pt") == 0
    assert comparable(torch.load(tmp_path / "back.pt", weights_only=True)) == comparable(many_entries())
    fsspec.filesystem("memory").store.clear()


def test_show_prints_everything(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert(source, tmp_path / "run")
    capsys.readouterr()
    assert main(["checkpoint", "show", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr().out
    assert f"{tmp_path}/run: a Fleet checkpoint" in shown
    assert re.search(r"^  model/0\.weight +float32 +\[2, 1, 3, 3\] +72 bytes$", shown, re.MULTILINE)
    assert "epoch = 3" in shown
    assert main(["checkpoint", "show", str(tmp_path / "run"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tensors"]["model/0.weight"] == {"dtype": "float32", "shape": [2, 1, 3, 3], "bytes": 72, "pieces": 1}
    assert found["values"]["epoch"] == 3
    assert found["bytes"] == sum(one["bytes"] for one in found["tensors"].values())


def test_verify_says_what_is_wrong(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(tmp_path / "run")
    convert(source, run)
    assert main(["checkpoint", "verify", run]) == 0
    assert "every block matches its sum" in capsys.readouterr().out
    assert convert(source, tmp_path / "plain.safetensors") == 0
    assert main(["checkpoint", "verify", str(tmp_path / "plain.safetensors")]) == 0
    assert "no sums to compare" in capsys.readouterr().out
    (path,) = Path(run).glob("*.safetensors")
    data = path.read_bytes()
    for damaged, text in (
        (data[:-1] + bytes([data[-1] ^ 1]), "do not match their sum"),
        (data[:-1], "was cut off"),
        (None, "No such file"),
    ):  # fmt: skip
        path.unlink() if damaged is None else path.write_bytes(damaged)
        assert main(["checkpoint", "verify", run]) == 1
        assert text in capsys.readouterr().err
    index = Path(run, "index.json")
    index.write_text(index.read_text().replace("0.weight", "9.weight"))
    assert main(["checkpoint", "verify", run]) == 1
    assert "damaged" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (["source.pt", "source.pt"], "exists already"),
        (["source.pt", "file://{here}/source.pt"], "exists already"),
        (["source.pt", "file://{here}/run"], "exists already"),
        (["source.pt", ""], "TARGET is '', which names nothing"),
        (["", "x"], "'' names nothing"),
        (["nested.pt", "x.safetensors"], "model holds no tensors by their names"),
        (["nested.pt", "x", "--to", "hf"], "model holds no tensors by their names"),
        (["source.pt", "x.safetensors", "--key", "epoch"], "epoch holds no tensors by their names"),
        (["absent", "x"], "does not exist"),
        (["names.yaml", "x"], "Looked for"),
        (["source.pt", "x", "--key", "modle"], "Did you mean 'model'"),
        (["source.pt", "x", "--max-shard-size", "1GB"], "divides a folder of --to hf"),
        (["source.pt", "x.safetensors", "--max-shard-size", "1GB"], "divides a folder of --to hf"),
        (["source.pt", "x", "--to", "hf", "--max-shard-size", "much"], "'much' is no size"),
        (["source.pt", "x", "--to", "hf", "--max-shard-size", "0"], "'0' is no size"),
        (["source.pt", "memory://x", "--to", "dcp"], "only --to fleet"),
        (["source.pt", "x", "--map", "names.yaml"], "two tensors would be called '0.bias'"),
        (["source.pt", "x", "--map", "absent.yaml"], "No such file"),
        (["source.pt", "x", "--map", "source.pt"], "is no YAML"),
        (["source.pt", "x", "--map", "list.yaml"], "a colon"),
        (["source.pt", "x", "--map", "twice.yaml"], "'a' stands there twice"),
        (["plain.pt", "x", "--to", "hf"], "pass --key"),
        (["source.safetensors", "x", "--in-order"], "has no optimizer with numbers"),
        (["odd.pt", "x", "--in-order"], "one group and one model are needed"),
        (["source.pt", "absent/x.pt"], "was not written"),
        (["source.pt", "x", "--to", "zip"], "invalid choice: 'zip'"),
    ],
)
def test_wrong_use_is_refused_and_leaves_nothing(
    arguments: list[str], rule: str, source: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(source.parent)
    Path("names.yaml").write_text("0.bias: 0.weight\n")
    Path("list.yaml").write_text("- a\n")
    Path("twice.yaml").write_text("a: 0.weight\na: 0.bias\n")
    torch.save({"first": {"w": torch.ones(1)}, "second": {"w": torch.ones(1)}}, "plain.pt")
    model = torch.nn.Linear(2, 2)
    torch.save({"model": {}, "optimizer": torch.optim.Adam(model.parameters()).state_dict()}, "odd.pt")
    torch.save({"model": {"inner": {"w": torch.ones(1)}}}, "nested.pt")
    assert convert("source.pt", "source.safetensors") == 0
    assert convert("source.pt", "run") == 0
    before = sorted(Path().iterdir())
    assert convert(*(one.format(here=Path.cwd()) for one in arguments)) == 2
    assert rule in capsys.readouterr().err
    assert sorted(Path().iterdir()) == before


@pytest.mark.parametrize("to", FORMATS)
def test_a_damaged_source_is_not_converted(
    to: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convert(source, tmp_path / "run")
    (path,) = (tmp_path / "run").glob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    before = sorted(tmp_path.iterdir())
    assert convert(tmp_path / "run", tmp_path / "x", "--to", to) == 2
    told = capsys.readouterr().err
    assert "do not match their sum" in told
    assert "was not written" not in told
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("to", FORMATS)
def test_a_damaged_file_of_torch_save_is_not_converted(
    to: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"w": torch.arange(100.0)}, tmp_path / "a.pt")
    data = (tmp_path / "a.pt").read_bytes()
    (tmp_path / "a.pt").write_bytes(data.replace(torch.tensor(50.0).numpy().tobytes(), b"\1\2\3\4"))
    assert main(["checkpoint", "verify", str(tmp_path / "a.pt")]) == 1
    assert "Bad CRC-32" in capsys.readouterr().err
    assert convert(tmp_path / "a.pt", tmp_path / "x", "--to", to) == 2
    assert "Bad CRC-32" in capsys.readouterr().err
    assert [one.name for one in tmp_path.iterdir()] == ["a.pt"]


def test_what_a_file_of_safetensors_holds_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"model": {"w": torch.ones(2), "extra": [torch.ones(3)]}}, tmp_path / "a.pt")
    assert convert(tmp_path / "a.pt", tmp_path / "x.safetensors") == 0
    assert ": hf, 1 tensors, 8 bytes" in capsys.readouterr().out


def test_help_needs_no_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')\n")
    program = "import sys; from fleet.checkpoint.checkpoint_command import run; sys.exit(run(['--help']))"
    done = subprocess.run([sys.executable, "-c", "import sys; sys.path.insert(0, '.'); " + program], cwd=tmp_path,
                          capture_output=True, text=True, timeout=60)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "verify" in done.stdout
