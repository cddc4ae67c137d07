"""What file systems share."""

from __future__ import annotations

import pytest

from fleet.errors import FleetError
from fleet.utils.fs import FS, ExecuteError, FSFileExistsError, FSFileNotExistsError, FSShellCmdAborted, FSTimeOut


def test_errors_are_also_those_of_the_standard_library() -> None:
    assert issubclass(FSFileExistsError, FileExistsError)
    assert issubclass(FSFileNotExistsError, FileNotFoundError)
    assert issubclass(FSTimeOut, TimeoutError)
    assert issubclass(FSShellCmdAborted, ExecuteError)
    for error in (ExecuteError, FSFileExistsError, FSFileNotExistsError, FSTimeOut):
        assert issubclass(error, FleetError)


def test_files_are_split_by_the_rule_of_the_workers() -> None:
    """B.8: the same as get_file_shard."""
    assert FS._split_files(["a", "b", "c"], 1, 2) == ["c"]


def test_a_file_system_has_to_do_everything() -> None:
    with pytest.raises(TypeError, match="abstract"):
        FS()  # type: ignore[abstract]
