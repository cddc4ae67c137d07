"""docs/run/kubernetes.md in both languages: the order of the steps, and files and names that exist."""

from __future__ import annotations

import re

import pytest

from tests.helpers.sources import ROOT

TEXTS = ("docs/run/kubernetes.md", "docs/run/kubernetes.zh-CN.md")
STEPS = (
    "kubectl create -f deploy/v1/crd.yaml",
    "kubectl get crd",
    "kubectl create -f deploy/v1/operator.yaml",
    "kubectl -n paddle-system get pods",
    "kubectl create -f deploy/examples/wide_and_deep.yaml",
    "kubectl get pdj",
    "kubectl delete pdj --all --all-namespaces",
    "kubectl delete -f deploy/v1/operator.yaml",
    "kubectl delete -f deploy/v1/crd.yaml",
)


@pytest.mark.parametrize("name", TEXTS)
def test_install_submit_and_uninstall_stand_in_order(name: str) -> None:
    """000-29: jobs are deleted while the operator runs, the definition last."""
    text = (ROOT / name).read_text(encoding="utf-8")
    places = [text.index(step) for step in STEPS]
    assert places == sorted(places)


@pytest.mark.parametrize("name", TEXTS)
def test_the_files_that_are_named_exist(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    named = set(re.findall(r"deploy/[\w./-]*[\w]", text))
    assert {path for path in named if not (ROOT / path).exists()} == set()
    assert len(named) > 6


def test_both_languages_show_the_same_commands() -> None:
    blocks = [re.findall(r"```\w*\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), re.DOTALL) for name in TEXTS]
    assert blocks[0] == blocks[1]
