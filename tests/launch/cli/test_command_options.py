"""Options in front of the launcher's flags."""

from __future__ import annotations

import pytest

from fleet.errors import ConfigError
from fleet.launch.cli.command_options import check_set_flags, cut_options
from fleet.launch.cli.settings import UsageError, parse_command_line


def test_the_first_other_word_ends_the_options() -> None:
    arguments = ["--nodes", "2", "--dry-run", "--to-file=x=1", "--gpus=0", "--nodes=3"]
    own, rest = cut_options(arguments, ("--nodes", "--to_file"), ("--dry_run",))
    assert own == ["--nodes=2", "--dry_run", "--to_file=x=1"]
    assert rest == ["--gpus=0", "--nodes=3"]
    with pytest.raises(UsageError, match="--nodes has no value"):
        cut_options(["--nodes"], ("--nodes",), ())


def test_what_follows_from_the_nodes_is_refused() -> None:
    def check(*words: str, nodes: int = 2) -> None:
        line = parse_command_line([*words, "t.py"], "launch")
        check_set_flags(line, nodes, sets="X sets", chooses="X", number="--nodes", more={"gpus": "Write Y."})

    check("--max_restart=3")
    check("--server_num=1", nodes=1)
    for words, rule in (
        ("--rdzv_endpoint=a:1", "--master is a flag that X sets. Omit it."),
        ("--gpus=0", "--gpus is a flag that X sets. Write Y."),
        ("--server_num=1", "--server_num with --nodes=2.*X chooses the nodes. Use --nodes=1"),
    ):
        with pytest.raises(ConfigError, match=rule):
            check(words)
