from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fleet import fleet
from fleet.errors import CheckpointError, ConfigError
from fleet.ps import Predictor
from fleet.ps.serving.export_command import run
from tests.fleet.ps.serving import models

PLACE = f"{models.__file__}:example"


@pytest.mark.slow
def test_a_saved_model_becomes_a_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(5)
    model = models.EveryForm()
    models.save_rows(model, tmp_path)
    fleet.save(model.state_dict(), str(tmp_path / "model.pt"))
    assert run([str(tmp_path), PLACE]) == 0
    assert f"{tmp_path}: a program of" in capsys.readouterr().out
    model.eval()
    batch = models.inputs(3, seed=2)
    with torch.no_grad():
        assert torch.equal(Predictor(tmp_path)(*batch), model(*batch))


def test_wrong_calls(tmp_path: Path) -> None:
    assert run([]) == 2
    assert run(["--help"]) == 0
    with pytest.raises(CheckpointError, match=r"model.pt: cannot be read: No such file"):
        run([str(tmp_path), PLACE])
    fleet.save({"weight": torch.ones(2)}, str(tmp_path / "other.pt"))
    with pytest.raises(CheckpointError, match="the state does not fit what"):
        run([str(tmp_path), PLACE, "--state", str(tmp_path / "other.pt")])
    with pytest.raises(ConfigError, match="gave tuple; it is a function"):
        run([str(tmp_path), f"{models.__file__}:inputs_alone", "--state", str(tmp_path / "other.pt")])
    with pytest.raises(ConfigError, match="has no 'exemple'. Did you mean 'example'"):
        run([str(tmp_path), f"{models.__file__}:exemple", "--state", str(tmp_path / "other.pt")])
    (tmp_path / "model.pt").write_bytes(b"text")
    with pytest.raises(CheckpointError, match="torch cannot read this state"):
        run([str(tmp_path), PLACE])
