"""What surrounds the code says one thing: version, workflows, checks before a commit, tested Pythons and torches."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

import fleet
from fleet.common.compatibility import OLDEST_PYTHON, OLDEST_TORCH
from tests.helpers.sources import ROOT, project_files
from tests.test_readme import found_in, read

PAGES = ("docs/reference/compatibility.md", "docs/reference/compatibility.zh-CN.md")
# | 3.12 | 2.14.1 | 11157 | 0 | ... : Python, torch and figures of a run.
ROW = re.compile(r"^\| (3\.\d+)(?:\.\d+)? \| (\d+\.\d+)\.\d+ \| (?:.*?) \| (\d+) \| (\d+) \| (\d+) \|", re.MULTILINE)


def parsed(name: str) -> Any:
    """Returns a YAML file of the project."""
    return yaml.safe_load(read(name))


def workflows() -> list[str]:
    """Returns the paths of all workflows."""
    return [str(path) for path in project_files() if path.match(".github/workflows/*.yml")]


def commands(workflow: str) -> list[str]:
    """Returns the commands of all steps of a workflow."""
    return [step["run"] for job in parsed(workflow)["jobs"].values() for step in job["steps"] if "run" in step]


def test_workflows_run_what_a_developer_runs() -> None:
    assert ".ci/run" in commands(".github/workflows/ci.yml")
    assert commands(".github/workflows/release.yml")[0] == ".ci/run"
    targets = set(found_in("Makefile", r"^\.PHONY: ([^\n]*)$").split())
    used = {name for path in workflows() for command in commands(path) for name in re.findall(r"^make (\w+)", command)}
    assert used == {"compat", "dist"}
    assert used <= targets


def test_a_workflow_may_only_read() -> None:
    assert {path: parsed(path)["permissions"] for path in workflows()} == dict.fromkeys(
        workflows(), {"contents": "read"}
    )


def test_the_checks_before_a_commit_are_those_of_make_lint() -> None:
    """The commands of .venv, whose versions constraints.txt pins."""
    hooks = [hook for repo in parsed(".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]
    entries = [hook["entry"] for hook in hooks]
    assert all(
        entry.startswith(".venv/bin/python ") and hook["language"] == "system"
        for entry, hook in zip(entries, hooks, strict=True)
    )
    for tool in re.findall(r"\$\(PY\) -m (\w+(?: \w+)?)", found_in("Makefile", r"^lint: .*?\n\n")):
        assert any(f"-m {tool}" in entry for entry in entries), tool


@pytest.mark.parametrize(
    "path", [path for path in project_files() if path.match(".github/ISSUE_TEMPLATE/*.yml")], ids=str
)
def test_templates_of_issues_ask_for_what_is_needed(path: Any) -> None:
    form = parsed(str(path))
    if path.stem == "config":
        assert form["blank_issues_enabled"] is True
        return
    assert {"name", "description", "body"} <= set(form)
    ids = [part["id"] for part in form["body"]]
    assert len(ids) == len(set(ids))


def test_one_version_everywhere() -> None:
    citation = parsed("CITATION.cff")
    assert citation["version"] == fleet.__version__
    assert citation["date-released"] == found_in("CHANGELOG.md", r"^## \[\S+\] - (\S+)$")
    tags = {
        (str(path), tag)
        for path in project_files()
        if path.parts[0] == "deploy" and path.suffix == ".yaml"
        for tag in re.findall(r"image: torch-fleet(?:-operator)?:(\S+)", read(path))
    }
    assert len(tags) > 5
    assert {tag for _, tag in tags} == {fleet.__version__}


# ---- compatibility ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_a_classifier_is_a_python_that_was_tested(page: str) -> None:
    rows = ROW.findall(read(page))
    classifiers = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', read("pyproject.toml"))
    assert {python for python, *_ in rows} == set(classifiers)
    assert ".".join(map(str, OLDEST_PYTHON)) == classifiers[0]
    assert ".".join(map(str, OLDEST_TORCH)) in {torch for _, torch, *_ in rows}


def test_both_pages_have_the_same_figures() -> None:
    english, chinese = (ROW.findall(read(page)) for page in PAGES)
    assert english == chinese


def test_the_workflow_runs_rows_of_the_page() -> None:
    rows = {(python, torch) for python, torch, *_ in ROW.findall(read(PAGES[0]))}
    matrix = parsed(".github/workflows/compatibility.yml")["jobs"]["quick"]["strategy"]["matrix"]["include"]
    assert {(entry["python"], entry["torch"]) for entry in matrix} <= rows
    assert {entry["python"] for entry in matrix} == {python for python, _ in rows}


def test_the_pins_are_left_out_where_they_do_not_exist() -> None:
    """`make` works on the oldest Python: what needs a newer one says so."""
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    for name in ("hypothesis", "pyarrow", "transformers"):
        assert re.search(rf'^{name}==\S+; python_version >= "3.11"$', text, re.MULTILINE)
