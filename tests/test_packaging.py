"""Wheel, source archive, editable install and checkout show one package, ``fleet``, and nothing beside it."""

from __future__ import annotations

import email
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import fleet
from tests.helpers.sources import ROOT, project_files

pytestmark = pytest.mark.slow

# What the package consists of, by the names under which it is installed.
PACKAGE_FILES = {
    path.as_posix() if path.parts[0] == "fleet" else f"fleet/{path.as_posix()}"
    for path in project_files()
    if path.parts[0] in ("fleet", "strategies", "launch") and path.suffix in (".py", ".pyi", ".typed", ".css", ".js")
}

EXTRAS = {
    "dev",
    "docs",
    "elastic",
    "examples",
    "hf",
    "k8s",
    "kafka",
    "lightning",
    "metrics",
    "migrate",
    "mlflow",
    "parquet",
    "qat",
    "ray",
    "redis",
    "remote",
    "tensorboard",
    "trackio",
    "wandb",
}

# The user's own modules, named like our top folders.
TRAIN = """
import launch, strategies
from fleet import fleet
fleet.init(is_collective=True)
print("own", launch.OWN, strategies.OWN, "worker", fleet.worker_index(), "of", fleet.worker_num(), flush=True)
"""
SHOW = """
import fleet, fleet.launch, fleet.strategies.amp, launch, strategies
print(fleet.__file__, fleet.launch.__file__, fleet.strategies.amp.__file__, launch.OWN, strategies.OWN, sep="\\n")
"""


def run(*command: str | Path, cwd: Path, timeout_s: float = 60) -> str:
    """Returns the output of a command that must succeed; nothing of this process's Python settings reaches it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a copy of the project's files, links as links, so that building leaves nothing in the project."""
    folder = tmp_path_factory.mktemp("checkout")
    for path in project_files():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, folder / path, follow_symlinks=False)
    return folder


@pytest.fixture(scope="module")
def archives(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder with the source archive and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, checkout, cwd=folder, timeout_s=120)
    return folder


@pytest.fixture(scope="module")
def user_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a user's folder: a training script, a ``launch.py`` and a package ``strategies`` of their own."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "strategies").mkdir()
    (folder / "strategies" / "__init__.py").write_text("OWN = 'strategies'\n")
    (folder / "launch.py").write_text("OWN = 'launch'\n")
    (folder / "train.py").write_text(TRAIN)
    return folder


def new_environment(folder: Path) -> Path:
    """Returns the Python of a new virtual environment that sees this one's packages, but not its editable ones."""
    venv.create(folder, symlinks=True, with_pip=False)
    python = folder / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    # Files of this kind are read by name, and the one of an editable install needs the packages of this one.
    (site / "_dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def install(python: Path, *what: str | Path) -> None:
    """Installs into the environment of ``python`` without fetching anything."""
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python, "install", "--no-index")
    run(*pip, "--no-deps", "--no-build-isolation", *what, cwd=python.parent, timeout_s=120)


@pytest.fixture(scope="module")
def installed(archives: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the Python of an environment with the wheel."""
    python = new_environment(tmp_path_factory.mktemp("wheel"))
    install(python, next(archives.glob("*.whl")))
    return python


@pytest.fixture(scope="module")
def editable(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the Python of an environment with an editable install of the copy."""
    python = new_environment(tmp_path_factory.mktemp("editable"))
    install(python, "--editable", checkout)
    return python


def test_the_wheel_holds_the_package_and_nothing_else(archives: Path) -> None:
    """003-38: the wheel is for any machine, and holds no shared library that one could lack."""
    with zipfile.ZipFile(next(archives.glob("*.whl"))) as wheel:
        names = set(wheel.namelist())
        assert {name for name in names if ".dist-info/" not in name} == PACKAGE_FILES
        assert (
            wheel.read("fleet/strategies/_declare/strategy.py")
            == (ROOT / "strategies" / "_declare" / "strategy.py").read_bytes()
        )
        assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_the_wheel_says_what_it_needs(archives: Path) -> None:
    with zipfile.ZipFile(next(archives.glob("*.whl"))) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(wheel.read(name))
    assert metadata["Name"] == "torch-fleet"
    assert metadata["Version"] == fleet.__version__
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata.get_all("Provides-Extra", [])) == EXTRAS
    core = {line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line}
    assert {line.partition(">")[0] for line in core} >= {"torch", "numpy", "pyyaml"}


def test_building_leaves_nothing_in_the_checkout(archives: Path, checkout: Path) -> None:
    """A build folder in the checkout would carry a removed module into the next wheel."""
    present = {path.relative_to(checkout) for path in checkout.rglob("*") if path.is_symlink() or path.is_file()}
    assert {path for path in present if not (checkout / path.parent).is_symlink()} == set(project_files())


def test_the_source_archive_holds_files_and_no_links(archives: Path) -> None:
    with tarfile.open(next(archives.glob("*.tar.gz"))) as archive:
        members = {member.name.partition("/")[2]: member for member in archive.getmembers()}
    assert set(members) >= PACKAGE_FILES
    assert not [name for name, member in members.items() if member.issym() or member.islnk()]
    assert not [name for name in members if name.startswith(("strategies", "launch"))]


def test_the_wheel_works_beside_modules_of_the_same_names(installed: Path, user_folder: Path) -> None:
    *files, launch, strategies = run(installed, "-c", SHOW, cwd=user_folder).split()
    assert (launch, strategies) == ("launch", "strategies")
    assert [file for file in files if not Path(file).is_relative_to(installed.parents[1])] == []


def test_the_editable_install_works_beside_modules_of_the_same_names(
    editable: Path, checkout: Path, user_folder: Path
) -> None:
    *files, launch, strategies = run(editable, "-c", SHOW, cwd=user_folder).split()
    assert (launch, strategies) == ("launch", "strategies")
    assert [file for file in files if not Path(file).is_relative_to(checkout / ".editable" / "fleet")] == []


CHECKERS = ("mypy --strict --ignore-missing-imports --python-executable", "pyright --pythonpath")


@pytest.mark.parametrize("kind", ["installed", "editable"])
@pytest.mark.parametrize("checker", CHECKERS)
def test_type_checkers_find_the_package(
    kind: str, checker: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    python: Path = request.getfixturevalue(kind)
    script = tmp_path / "wrong.py"
    script.write_text("from fleet import fleet\nfleet.init(is_collective=True)\nfleet.init(is_colective=True)\n")
    command = (sys.executable, "-m", *checker.split(), python, script)
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300).stdout
    (error,) = (line for line in found.splitlines() if "error:" in line or " - error" in line)
    assert "wrong.py:3:" in error
    assert "is_colective" in error


@pytest.mark.parametrize("kind", ["installed", "editable"])
def test_our_top_folders_are_not_importable(
    kind: str, checkout: Path, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Other packages, as deepctr_torch, install a folder of one of these names."""
    python: Path = request.getfixturevalue(kind)
    code = (
        "import sys; from importlib.util import find_spec\n"
        "found = [s for m in ('launch', 'strategies', 'tests') if (s := find_spec(m)) is not None]\n"
        "places = [p for s in found for p in s.submodule_search_locations or [s.origin]]\n"
        f"print([p for p in places if p.startswith((sys.prefix, {str(checkout)!r}))])"
    )
    assert run(python, "-c", code, cwd=tmp_path).strip() == "[]"


@pytest.mark.parametrize("kind", ["installed", "editable"])
def test_a_new_file_of_the_checkout_is_seen_only_by_the_editable_install(
    kind: str, checkout: Path, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    python: Path = request.getfixturevalue(kind)
    new = checkout / "launch" / "_made_later.py"
    new.write_text("")
    try:
        code = "from importlib.util import find_spec; print(find_spec('fleet.launch._made_later') is not None)"
        assert run(python, "-c", code, cwd=tmp_path).strip() == str(kind == "editable")
    finally:
        new.unlink()


@pytest.mark.parametrize("kind", ["installed", "editable"])
@pytest.mark.parametrize("command", ["launch", "fleetrun", "fleet", "python -m fleet.launch", "python -m fleet"])
def test_the_commands_start(kind: str, command: str, user_folder: Path, request: pytest.FixtureRequest) -> None:
    python: Path = request.getfixturevalue(kind)
    words = command.split()
    help_text = run(python.parent / words[0], *words[1:], "--help", cwd=user_folder)
    assert "usage: " in help_text
    assert command.endswith("fleet") or "--gpus" in help_text


def test_a_job_runs_from_the_wheel(installed: Path, user_folder: Path) -> None:
    command = (installed.parent / "fleetrun", "--gpus=0,1", "--log_dir", "log", "train.py")
    run(*command, cwd=user_folder, timeout_s=60)
    logs = "".join((user_folder / "log" / f"workerlog.{rank}").read_text() for rank in (0, 1))
    for rank in (0, 1):
        assert f"own launch strategies worker {rank} of 2" in logs
