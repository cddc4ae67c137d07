"""torch and this project are libraries, however they are reached; a script is not."""

import importlib.util
from pathlib import Path

import torch

import fleet
from fleet.verify import user_lines
from fleet.verify.user_lines import is_library


def test_torch_is_a_library_and_this_file_is_not() -> None:
    assert is_library(str(torch.__file__))
    assert not is_library(__file__)


def test_this_project_is_a_library_through_a_symbolic_link_as_well(tmp_path: Path) -> None:
    (tmp_path / "fleet").symlink_to(Path(str(fleet.__file__)).parent)
    linked = tmp_path / "fleet" / "verify" / "user_lines.py"
    spec = importlib.util.spec_from_file_location("linked_user_lines", linked)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.is_library(str(linked))
    assert module.is_library(str(user_lines.__file__))
    assert not module.is_library(__file__)
