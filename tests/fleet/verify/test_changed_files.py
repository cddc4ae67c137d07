"""What a run changes outside its own folder is as it was before, whichever worker changed it and however."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleet.verify.changed_files import put_back
from tests.helpers.sources import ROOT
from tests.helpers.verifying import verify

# One process for all: what it imports takes longer than what it does. An audit hook stays, so each has a fork.
_WATCHED = """
import json, os, shutil, sys
from pathlib import Path
import safetensors.torch, torch
from fleet.verify.changed_files import ChangedFiles

for run, place, body in json.loads(sys.argv[1]):
    if os.fork():
        assert os.wait()[1] == 0, body
        continue
    begun = []
    ChangedFiles(Path(run), lambda: bool(begun), print).watch()
    os.chdir(place)
    Path("downloaded").write_text("data")
    os.mkdir("made_before")
    begun.append(1)
    exec(body)
    sys.stdout.flush()
    os._exit(0)
"""

BODIES = {
    "a file is made": "Path('new').write_text('x')",
    "a file is written anew": "Path('old').write_text('x')",
    "a file is appended to": "open('old', 'a').write('x')",
    "a file is replaced": "Path('tmp').write_text('x'); os.replace('tmp', 'old')",
    "a file is removed": "os.remove('old')",
    "a file is removed and a folder made of it": "os.remove('old'); os.mkdir('old'); Path('old/x').write_text('x')",
    "a folder is made": "os.makedirs('made_before/deeper/still'); Path('made_before/deeper/still/x').write_text('x')",
    "a folder is removed": "shutil.rmtree('folder')",
    "a folder is moved": "os.rename('folder', 'moved'); os.mkdir('folder'); Path('folder/x').write_text('x')",
    "a file is written through a link": "Path('link').write_text('x')",
    "a link is set anew": "os.remove('link'); os.symlink('folder', 'link')",
    "torch.save": "torch.save({'x': 1}, 'new'); torch.save({'x': 1}, f='old')",
    "safetensors": "safetensors.torch.save_file({'x': torch.ones(2)}, 'new.safetensors')",
    "twice": "Path('old').write_text('x'); Path('old').write_text('y')",
}


def state_of(folder: Path) -> dict[str, str]:
    """Returns what is in a folder: the content of each file, where each link points."""
    found: dict[str, str] = {}
    for path in sorted(folder.rglob("*")):
        what = path.read_bytes().decode("latin-1") if path.is_file() else "(folder)"
        found[str(path.relative_to(folder))] = f"-> {path.readlink()}" if path.is_symlink() else what
    return found


def prepared(tmp_path: Path) -> tuple[Path, Path]:
    """Returns the folder of a run, and a folder in which a script works."""
    run, place = tmp_path / "run", tmp_path / "place"
    (place / "folder" / "empty").mkdir(parents=True)
    run.mkdir(parents=True)
    (place / "old").write_text("before")
    (place / "folder" / "inside").write_text("inside")
    (place / "link").symlink_to("old")
    return run, place


def changed(tmp_path: Path, bodies: dict[str, str]) -> Iterator[tuple[str, Path, Path, dict[str, str]]]:
    """Yields for each body its name, the folder of its run, where it worked, and what was there before."""
    places = {name: prepared(tmp_path / name.replace(" ", "_")) for name in bodies}
    before = {name: state_of(place) for name, (_, place) in places.items()}
    jobs = [(str(run), str(place), bodies[name]) for name, (run, place) in places.items()]
    command = [sys.executable, "-c", _WATCHED, json.dumps(jobs)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
    for name, (run, place) in places.items():
        yield name, run, place, before[name]


def test_it_is_as_it_was(tmp_path: Path) -> None:
    for name, run, place, before in changed(tmp_path, BODIES):
        assert state_of(place) != before | {"downloaded": "data", "made_before": "(folder)"}, name
        assert put_back(run) == [], name
        assert state_of(place) == before | {"downloaded": "data"}, name
        assert not (run / "before").exists(), name


def test_what_cannot_be_put_back_is_said_and_kept(tmp_path: Path) -> None:
    for _, run, place, _ in changed(tmp_path, {"written anew": "Path('old').write_text('x')"}):
        (place / "old").unlink()
        (place / "old" / "x").mkdir(parents=True)
        (said,) = put_back(run)
        assert said.startswith(f"{place / 'old'} was changed and could not be put back: ")
        shutil.rmtree(place / "old")
        assert put_back(run) == []
        assert (place / "old").read_text() == "before"


_FIRST_NAME = """\
import sys, tempfile
from pathlib import Path
import torch
from fleet.verify.changed_files import ChangedFiles

tempfile.tempdir = tempfile._name_sequence = None  # as in a process that has made no temporary file
ChangedFiles(Path(sys.argv[1]), lambda: True, print).watch()
tempfile.gettempdir()
"""


def test_a_script_may_make_its_first_temporary_file(tmp_path: Path) -> None:
    """It ended never: what the search for the folder wrote was kept under the lock that the search held."""
    command = [sys.executable, "-c", _FIRST_NAME, str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=60, capture_output=True)


@pytest.mark.slow
@pytest.mark.parametrize("earlier", [False, True], ids=["first start", "a checkpoint is there"])
def test_a_script_that_resumes_is_equal(tmp_path: Path, earlier: bool) -> None:
    """The single process does not resume from what the workers saved, under an absolute path."""
    saved = tmp_path / "saved" / "checkpoint.pt"
    if earlier:
        script = ROOT / "tests/fleet/verify/clean/resumes.py"
        command = [sys.executable, str(script), "--checkpoint", str(saved), "--epochs", "1"]
        subprocess.run(command, cwd=ROOT, check=True, timeout=120, capture_output=True)
    before = saved.read_bytes() if earlier else b""
    report = verify(
        Path("tests/fleet/verify/clean/resumes.py"), tmp_path, "--steps", "6", arguments=["--checkpoint", str(saved)]
    )
    assert (report["outcome"], report["findings"]) == ("equal", []), report["notes"]
    assert saved.exists() == earlier
    assert not earlier or saved.read_bytes() == before
