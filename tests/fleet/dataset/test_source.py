"""Reading of one file: programs, packed files, remote files, errors; pipe commands, without a shell."""

from __future__ import annotations

import gzip
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.dataset import source
from fleet.dataset.source import Source, read_blocks, split_pipeline
from fleet.errors import ConfigError, UnsupportedOptionError
from tests.helpers.sources import ROOT


def read(path: Path | str, source: Source) -> bytes:
    """Returns the whole file."""
    return b"".join(read_blocks(str(path), source))


def test_a_plain_file_comes_in_blocks_of_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "part-0"
    lines = [b"%d %s\n" % (number, b"x" * number) for number in range(60)]
    path.write_bytes(b"".join(lines) + b"no newline")
    monkeypatch.setattr(source, "_BLOCK_BYTES", 64)
    blocks = list(read_blocks(str(path), Source()))
    assert b"".join(blocks) == path.read_bytes()
    assert len(blocks) > 10
    assert all(block.endswith(b"\n") for block in blocks[:-1])


def test_a_pipeline_gets_the_file_and_gives_the_lines(tmp_path: Path) -> None:
    """B.7: pipe_command, spawned per file, file on stdin, stdout read."""
    path = tmp_path / "part-0"
    path.write_text("b 2\na 1\nc 3\n")
    source = Source((("sort",), ("awk", "{print $2}")))
    assert read(path, source) == b"1\n2\n3\n"
    assert read(path, Source((("head", "-n", "1"),))) == b"b 2\n"


def test_a_program_that_stops_early_may_end_the_one_before_it(tmp_path: Path) -> None:
    path = tmp_path / "part-0"
    path.write_text("line\n" * 200_000)
    assert read(path, Source((("cat",), ("head", "-n", "1")))) == b"line\n"


def test_packed_files(tmp_path: Path) -> None:
    path = tmp_path / "part-0.gz"
    path.write_bytes(gzip.compress(b"1 2\n"))
    assert read(path, Source()) == b"1 2\n"
    assert read(path, Source((("tr", "1", "9"),))) == b"9 2\n"
    path.write_bytes(b"no gzip")
    with pytest.raises(ConfigError, match="'gzip -dc' exited with status 1 while it read"):
        read(path, Source())


def test_a_download_command_takes_the_place_of_the_file(tmp_path: Path) -> None:
    """B.7: download_cmd."""
    path = tmp_path / "somewhere"
    path.write_text("1 2\n")
    assert read(path, Source((("tr", "1", "9"),), download=("tail", "-n", "+1"))) == b"9 2\n"
    Source(download=("tail",)).check_files(["not here"])


def test_remote_files_come_through_hadoop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B.7: fs_name, fs_ugi."""
    program = tmp_path / "bin" / "hadoop"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\n{(ROOT / 'tests/helpers/fake_hadoop.py').read_text()}")
    program.chmod(0o755)
    (tmp_path / "root" / "hdfs:" / "data").mkdir(parents=True)
    (tmp_path / "root" / "hdfs:" / "data" / "part-0").write_text("1 2\n")
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    source = Source(fs_name="hdfs://name-node:9000", fs_ugi="user,pw")
    assert read("hdfs:/data/part-0", source) == b"1 2\n"
    assert "-Dhadoop.job.ugi=user,pw" in (tmp_path / "calls.log").read_text()
    with pytest.raises(ConfigError, match="exited with status 1 while it read 'hdfs:/data/part-1'") as failed:
        read("hdfs:/data/part-1", source)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="cannot be started for 'hdfs:/data/part-1'") as absent:
        read("hdfs:/data/part-1", source)
    for error in (failed.value, absent.value):  # issue 10, Medium 8
        assert "-Dhadoop.job.ugi=*** -cat" in str(error)
        assert "pw" not in str(error)
    assert source.commands("afs:/data/part-0.gz")[0] == [
        ["hadoop", "fs", "-Dfs.default.name=hdfs://name-node:9000", "-Dhadoop.job.ugi=user,pw", "-text"]
        + ["afs:/data/part-0.gz"]
    ]
    source.check_files(["hdfs:/data/part-0"])


def test_what_fails_says_so(tmp_path: Path) -> None:
    """B.7: nonzero exit -> error."""
    path = tmp_path / "part-0"
    path.write_text("1 2\n")
    with pytest.raises(ConfigError, match="'false' exited with status 1 while it read .*part-0"):
        read(path, Source((("false",),)))
    with pytest.raises(ConfigError, match="'false' exited with status 1"):
        read(path, Source((("false",), ("cat",))))
    with pytest.raises(ConfigError, match="'no-such-program -x' cannot be started for .*: No such file"):
        read(path, Source((("no-such-program", "-x"),)))
    with pytest.raises(ConfigError, match="killed by signal 9"):
        read(path, Source(((sys.executable, "-S", "-c", "import os; os.kill(os.getpid(), 9)"),)))
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read(tmp_path / "absent", Source())
    with pytest.raises(ConfigError, match="'absent', which is not a file here. 1 more are absent"):
        Source().check_files([str(path), "absent", "too"])


def test_programs_end_when_the_reader_stops(tmp_path: Path) -> None:
    """The fixture of conftest fails this test if one is left."""
    path = tmp_path / "part-0"
    path.write_text("")
    blocks = read_blocks(str(path), Source((("yes",),)))
    assert next(blocks).startswith(b"y\n")
    blocks.close()  # type: ignore[attr-defined]


def test_words_and_pipes() -> None:
    """B.7: pipe_command is a pipeline of programs."""
    assert split_pipeline("cat", "pipe_command") == [["cat"]]
    text = """python 'my script.py' --sep "|" a\\|b | awk '{print $1 > "x"}' | tr -d '*'"""
    assert split_pipeline(text, "pipe_command") == [
        ["python", "my script.py", "--sep", "|", "a|b"],
        ["awk", '{print $1 > "x"}'],
        ["tr", "-d", "*"],
    ]


@given(st.lists(st.text(min_size=1), min_size=1, max_size=4))
def test_quoted_words_reach_the_program_as_they_are(words: list[str]) -> None:
    text = " ".join("'" + word.replace("'", "'\\''") + "'" for word in words)
    assert shlex.split(text) == words
    assert split_pipeline(text, "pipe_command") == [words]


@pytest.mark.parametrize(
    "text",
    [
        "cat; rm x",
        "cat && ls",
        "cat > out",
        "cat < in",
        "cat $HOME",
        'cat "$HOME"',
        "cat `id`",
        'cat "`id`"',
        "cat *.txt",
    ]
    + ["cat &", "(cat)", "cat\nls", "cat ~", "cat {a,b}", "cat [ab]", "cat ?", "cat #x", "cat $(id)"],
)
def test_what_only_a_shell_does_is_refused(text: str) -> None:
    """No shell runs: what it would act on is refused, not passed on and not run."""
    with pytest.raises(UnsupportedOptionError, match="only a shell interprets"):
        split_pipeline(text, "pipe_command")


@pytest.mark.parametrize(
    ("text", "rule"),
    [("", "names no program"), ("cat |", "names no program"), ("a || b", "names no program"), ("cat 'x", "quotation")]
    + [(None, "as a string"), (["cat"], "as a string")],
)
def test_no_command(text: Any, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        split_pipeline(text, "pipe_command")
