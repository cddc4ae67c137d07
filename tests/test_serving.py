"""The pages of docs/serving in both languages: every block of those with programs runs, in its order."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.sources import ROOT

BLOCK = re.compile(r"```(python|bash)\n(.*?)```", re.DOTALL)
LIMIT_S = 240


def blocks(name: str) -> list[tuple[str, str]]:
    """Returns language and text of every block that runs."""
    return BLOCK.findall((ROOT / "docs" / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", ["README", "retrieval", "versions"])
def test_both_languages_have_the_same_code(page: str) -> None:
    plain = [
        [(kind, re.sub(r" *#.*", "", text)) for kind, text in blocks(name)]
        for name in (f"serving/{page}.md", f"serving/{page}.zh-CN.md")
    ]
    assert plain[0] == plain[1]


def run_blocks(folder: Path, name: str) -> list[str]:
    """Runs the blocks of a page in ``folder``, and returns what each printed."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PADDLE_", "FLEET_"))}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = []
    for kind, text in blocks(name):
        if text.startswith("# train.py\n"):
            (folder / "train.py").write_text(text, encoding="utf-8")
            continue
        if kind == "bash":
            words = text.split()
            variables = dict(word.split("=") for word in words if re.fullmatch(r"[A-Z_]+=\w+", word))
            command = [word for word in words if word.split("=")[0] not in variables]
            command[0] = sys.executable
        else:
            command, variables = [sys.executable, "-W", "error", "-c", text], {}
        ran = subprocess.run(
            command, cwd=folder, env=environment | variables, capture_output=True, text=True, timeout=LIMIT_S
        )
        assert ran.returncode == 0, f"{text}\n{ran.stdout}\n{ran.stderr}"
        done.append(ran.stdout)
    return done


@pytest.mark.slow
@pytest.mark.parametrize("language", ["", ".zh-CN"])
def test_every_block_about_versions_runs(tmp_path: Path, language: str) -> None:
    done = run_blocks(tmp_path, f"serving/versions{language}.md")
    assert len(done) == 4
    assert "[('monday', 50, '" in done[1]
    assert "go back to version 'monday', step 50" in done[2]
    assert done[3].startswith("monday 0.0 1.0")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["serving/README.md", "serving/README.zh-CN.md"])
def test_every_block_runs(tmp_path: Path, name: str) -> None:
    done = run_blocks(tmp_path, name)
    assert len(done) == 6
    assert "{'ads': 8, 'age': 8}" in done[1]
    assert "tensor([0.9" in done[3] or "tensor([1." in done[3]
    assert "a program of" in done[4]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["serving/retrieval.md", "serving/retrieval.zh-CN.md"])
def test_every_block_of_retrieval_runs(tmp_path: Path, name: str) -> None:
    _, searched, changed = run_blocks(tmp_path, name)
    count, found = re.fullmatch(r"(\d+) items; (.*)\n", searched).groups()
    digits = json.loads(found)
    assert [row.count(digit) > 5 for row, digit in zip(digits, (7, 3), strict=True)] == [True, True]
    assert changed == f"{count} ({count}, 16) 0\n0\n"
