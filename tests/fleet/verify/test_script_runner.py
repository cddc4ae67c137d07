"""One process computes batch norm as the workers do: in as many parts, or over all rows."""

import builtins
import os
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from torch.nn.functional import batch_norm

from fleet.verify import script_runner
from fleet.verify.draw_replay import Draws, _attention, _dropout, _maker
from fleet.verify.loader_replay import ReplayedBatches
from fleet.verify.record_files import RecordFile, read_record
from fleet.verify.run_recording import Recording
from fleet.verify.script_runner import _in_parts, _run_script


def test_batch_norm_takes_the_statistics_of_each_part(tmp_path: Path) -> None:
    record = RecordFile(tmp_path)
    recording = Recording(record, ReplayedBatches(record, lambda entered: None), Draws(tmp_path), 2, {})
    x = torch.arange(8.0).view(4, 2)
    for synced in (False, True):
        plan = {"replicas": 2, "synced": synced}
        found = _in_parts(batch_norm, plan, recording)(x, None, None, training=True)
        parts = [x] if synced else list(x.chunk(2))
        assert torch.equal(found, torch.cat([batch_norm(part, None, None, training=True) for part in parts]))
    record.close()


def test_large_packages_that_a_script_names_are_imported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(script_runner, "_LARGE", ("fleet_large",))
    (tmp_path / "fleet_large.py").write_text("def __getattr__(name):\n    print(name)\n", encoding="utf-8")
    (tmp_path / "fleet_small.py").write_text("raise SystemExit\n", encoding="utf-8")
    text = "import fleet_small\nfrom fleet_large import Model\nfrom fleet_large.nowhere import x\n"
    script_runner._import_ahead({"text": text, "script": ""})
    assert "fleet_large" in sys.modules
    assert "fleet_small" not in sys.modules
    monkeypatch.delitem(sys.modules, "fleet_large")
    script_runner._import_ahead({"text": "", "script": str(tmp_path / "nowhere.py")})
    assert "fleet_large" not in sys.modules


SCRIPTS = {
    "verify": "recording._know_aliases(None)\n",
    "verify, and the script says more": (
        "try:\n    recording._know_aliases(None)\nexcept TypeError as error:\n    raise OSError from error\n"
    ),
    "script": "recording.before_updates(None)\n",
    "script, in a call that verify hands on": "draw(5, 2, (3,))\n",
    "script, in dropout of a leaf in place": (
        "import torch\ndrop(torch.ones(4, requires_grad=True), 0.5, True, True)\n"
    ),
    "script, in attention to values of another length": (
        "import torch\none = torch.ones(1, 1, 3, 2)\nattend(one, one, torch.ones(1, 1, 4, 2), dropout_p=0.5)\n"
    ),
    "script, in its text": "def\n",
}


@pytest.mark.parametrize("whose", SCRIPTS)
def test_an_error_of_verify_is_no_error_of_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], whose: str
) -> None:
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    record = RecordFile(tmp_path)
    draws = Draws(tmp_path)
    recording = Recording(record, ReplayedBatches(record, lambda entered: None), draws, 2, {})
    monkeypatch.setattr(builtins, "recording", recording, raising=False)
    draws.active = True
    given = {
        "draw": _maker(draws, "randint", torch.randint),
        "drop": _dropout(draws, 0, functional.dropout),
        "attend": _attention(draws, functional.scaled_dot_product_attention),
    }
    for name, call in given.items():
        monkeypatch.setattr(builtins, name, call, raising=False)
    script = tmp_path / "train.py"
    script.write_text(SCRIPTS[whose], encoding="utf-8")
    how, error, _ = _run_script({"script": str(script), "arguments": [], "text": ""})
    record.close()
    text, _, where = error.partition("\n@")
    own = text.startswith("fleet verify itself failed at fleet/verify/run_recording.py:")
    assert (how, own) == ("failed", whose.startswith("verify")), error
    assert where.startswith(str(script)) or whose.endswith("text")
    assert "Traceback" in capsys.readouterr().err


def test_an_error_before_the_script_is_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script_runner, "_train", lambda plan: plan["nothing"])
    monkeypatch.setattr(script_runner, "export", lambda variables: None)
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(os, "dup2", lambda one, other: None)
    monkeypatch.chdir(tmp_path)
    plan = {"log": str(tmp_path / "log"), "place": str(tmp_path), "environment": {}, "text": ""}
    with pytest.raises(SystemExit):
        script_runner._become({**plan, "folder": str(tmp_path / "rank0")})
    (end,) = read_record(tmp_path / "rank0", "end")
    assert end["error"].startswith("fleet verify itself failed at fleet/verify/script_runner.py:")
