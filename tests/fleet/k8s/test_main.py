"""The command line."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from fleet.k8s.__main__ import liveness_url, main, read_file
from tests.helpers.kubernetes import DEPLOY, job_document
from tests.helpers.sources import ROOT

RESNET = str(DEPLOY / "examples" / "resnet.yaml")


def test_render_prints_documents_and_says_notes_apart(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["render", RESNET, "--to", "pods"]) == 0
    printed = capsys.readouterr()
    kinds = [document["kind"] for document in yaml.safe_load_all(printed.out)]
    assert kinds == ["Service", "Service", "ConfigMap", "Pod", "Pod"]
    assert "note: Pods use names, not addresses" in printed.err
    assert "create secret generic resnet-key --from-literal=secret=$(" in printed.err
    assert "&id" not in printed.out


def test_several_jobs_of_one_file_and_standard_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = yaml.safe_dump_all([job_document(name="a"), None, job_document(1, 1, name="b")])
    path = tmp_path / "jobs.yaml"
    path.write_text(text)
    assert [job.name for job in read_file(str(path))] == ["a", "b"]
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    assert main(["check", "-"]) == 0
    assert capsys.readouterr().out == "a: Collective\nb: PS\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "is not YAML"),
        ("", "holds no document"),
        ("kind: Pod", "must be a PaddleJob of batch.paddlepaddle.org/v1"),
        ("!!python/object/apply:os.getcwd []", "is not YAML"),
    ],
)
def test_files_that_are_no_jobs(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    assert main(["render", str(path), "--to", "pods"]) == 2
    assert message in capsys.readouterr().err


def test_which_document_of_several_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "jobs.yaml"
    path.write_text(yaml.safe_dump_all([job_document(name="a"), job_document(name="b", elastic=3)]))
    assert main(["check", str(path)]) == 2
    assert f"{path}, document 2 of 2: spec.elastic is 3" in capsys.readouterr().err


def test_a_file_that_is_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(b"kind: \xff")
    assert main(["check", str(path)]) == 2
    assert "cannot be read: it is not UTF-8 text" in capsys.readouterr().err


def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "absent.yaml"]) == 2
    assert "absent.yaml cannot be read" in capsys.readouterr().err


def test_a_refusal_is_the_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["render", str(DEPLOY / "examples" / "wide_and_deep.yaml"), "--to", "trainjob"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "spec.ps is set" in printed.err


@pytest.mark.parametrize("text", ["8081", "10.0.0.1", "10.0.0.1:0", ":8081"])
def test_where_the_health_check_listens_is_an_address(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["operator", "--liveness", text]) == 2
    assert "takes address:port" in capsys.readouterr().err
    assert liveness_url("10.0.0.1:8081") == "http://10.0.0.1:8081/healthz"


def test_translating_needs_neither_torch_nor_the_extra() -> None:
    """The modules are imported in a process where torch, kopf and kubernetes cannot be."""
    code = (
        "import sys\n"
        "for name in ('torch', 'numpy', 'kopf', 'kubernetes'): sys.modules[name] = None\n"
        "from fleet.k8s.__main__ import main\n"
        f"assert main(['render', {RESNET!r}, '--to', 'jobset']) == 0\n"
        "assert main(['operator']) == 2\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert "pip install '.[k8s]'" in done.stderr
