"""The table of flags agrees with itself and with the table of variables."""

from __future__ import annotations

from fleet.env import VARIABLES
from fleet.launch.cli.flag import GROUPS, REFUSED, WARNED
from fleet.launch.cli.flags import BY_SPELLING, FLAGS, PS_FLAGS
from fleet.launch.cli.unused_flags import REMOVED


def test_every_twin_is_in_the_table_of_variables() -> None:
    assert [name for flag in FLAGS.values() for name in flag.env if name not in VARIABLES] == []


def test_no_spelling_belongs_to_two_flags() -> None:
    assert len(BY_SPELLING) == sum(len(flag.spellings) for flag in FLAGS.values())


def test_every_flag_has_a_group_and_refusals_have_reasons() -> None:
    assert {flag.group for flag in FLAGS.values()} == set(GROUPS)
    assert [flag.name for flag in FLAGS.values() if flag.fate in (WARNED, REFUSED) and not flag.reason] == []


def test_removed_flags_are_no_flags() -> None:
    """003-24, 003-25."""
    assert set(REMOVED).isdisjoint(FLAGS)
    assert set(PS_FLAGS) <= set(FLAGS)


def test_names_of_both_families_are_there() -> None:
    """000-09, 002-11: the configuration block of each family."""
    newer = {
        "devices",
        "elastic_level",
        "elastic_timeout",
        "gloo_port",
        "host",
        "job_id",
        "legacy",
        "log_dir",
        "log_level",
        "master",
        "max_restart",
        "nnodes",
        "nproc_per_node",
        "rank",
        "run_mode",
        "server_num",
        "servers",
        "trainer_num",
        "trainers",
        "with_gloo",
    }
    older = {
        "gpus",
        "heter_worker_num",
        "heter_workers",
        "http_port",
        "ips",
        "log_dir",
        "nproc_per_node",
        "server_num",
        "servers",
        "worker_num",
        "workers",
    }
    assert newer | older <= set(FLAGS)
