"""Dotted paths and fleet_desc_configs say what keys of sparse_table_configs say (D.4)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fleet.errors import ConfigError, OptionWarning, UnsupportedOptionError
from fleet.ps.table.accessor import Accessor, documented_accessor
from fleet.ps.table.layout import SparseTableConfig
from fleet.ps.table.rules import Rule, rule_from_paddle
from fleet.ps.worker.table_configs import configure_table
from fleet.ps.worker.table_spellings import settings_of_tables

PLAIN = SparseTableConfig("ads", 9, Rule("sgd", {"learning_rate": 0.3}))
START = "table_parameters.ads."
ADAGRAD = rule_from_paddle("adagrad", {"learning_rate": 0.5})


def paths(**settings: Any) -> dict[str, Any]:
    return {START + name.replace("__", "."): value for name, value in settings.items()}


def both(name: str, value: Any) -> dict[str, Any]:
    return {f"{START}accessor.{part}_sgd_param.{name}": value for part in ("embed", "embedx")}


def test_paths_name_rules_and_statistics() -> None:
    """What they leave away has the values of a table without settings, as Paddle 2.6.2 trains."""
    made = configure_table(
        PLAIN,
        {
            **both("name", "SparseAdaGradSGDRule"),
            **both("adagrad.learning_rate", 0.5),
            **both("adagrad.initial_range", 0.25),
            **paths(accessor__fea_dim=11, accessor__embedx_dim=8, accessor__ctr_accessor_param__base_threshold=0.5),
            **paths(table_class="MemorySparseTable", accessor__accessor_class="SparseAccessor"),
        },
    )
    assert (made.rule, made.embed_rule) == (ADAGRAD, None)
    assert made.accessor == Accessor(base_threshold=0.5)
    assert (made.initializer.a, made.initializer.b) == (-0.25, 0.25)
    short = configure_table(PLAIN, {"sparse_optimizer": "adagrad", "learning_rate": 0.5})
    assert short.rule == made.rule
    assert short.accessor == documented_accessor()


def test_a_rule_of_one_part_and_the_limit_beside_the_paths() -> None:
    settings = {**paths(accessor__embed_sgd_param__name="SparseNaiveSGDRule"), "max_rows": 100}
    made = configure_table(PLAIN, settings)
    assert made.rule == PLAIN.rule
    assert made.embed_rule is not None
    assert (made.embed_rule.name, made.embed_rule["learning_rate"]) == ("sgd", 0.05)
    assert made.accessor == Accessor()
    assert made.bounds is not None


def test_a_description_is_of_a_whole_table() -> None:
    tables = settings_of_tables({"own": {}}, {"ads": {"sparse_optimizer": "adagrad", "sparse_embedx_dim": 6}})
    assert tables["own"] == {}
    made = configure_table(PLAIN, tables["ads"])
    assert (made.rule, made.embed_rule) == (rule_from_paddle("adagrad"), None)
    assert made.accessor == documented_accessor("DownpourCtrAccessor")
    assert (made.initializer.a, made.initializer.b) == (-1e-4, 1e-4)
    found = settings_of_tables({}, {"ads": {"embed_sparse_learning_rate": 0.5, "sparse_weight_bounds": [-1, 1]}})
    made = configure_table(PLAIN, found["ads"])
    assert made.embed_rule is not None
    assert (made.embed_rule["learning_rate"], made.rule["learning_rate"], made.rule["upper_bound"]) == (0.5, 0.05, 1)
    plain = settings_of_tables({}, {"use_cvm": False, "ads": {"sparse_accessor_class": "DownpourCtrAccessor"}})
    assert configure_table(PLAIN, plain["ads"]).accessor == documented_accessor()


def test_what_says_how_paddle_keeps_its_files_changes_nothing_and_is_said() -> None:
    with pytest.warns(OptionWarning, match=r"shard_num'\] is accepted and changes nothing: .*files and shards"):
        made = configure_table(PLAIN, {**paths(shard_num=10, accessor__embedx_threshold=0)})
    assert made.accessor == Accessor()
    with pytest.warns(OptionWarning, match=r"fleet_desc_configs\['ads'\]\['sparse_enable_cache'\] is accepted and"):
        settings_of_tables({}, {"ads": {"sparse_enable_cache": True, "sparse_converter": ""}})
    empty = paths(accessor__table_accessor_save_param__converter=["", ""], accessor__embedx_threshold=2)
    assert configure_table(PLAIN, empty).accessor == Accessor(embedx_threshold=2)


@pytest.mark.parametrize(
    ("settings", "error", "reason"),
    [
        (
            paths(accessor__embedx_treshold=1),
            ConfigError,
            "does not exist.*Did you mean 'table_parameters.ads.acc",
        ),
        ({"table_parameters.other.accessor.embedx_threshold": 1}, ConfigError, "paths of this table begin with"),
        ({**paths(accessor__embedx_threshold=1), "base_threshold": 1}, ConfigError, "Write all keys as paths"),
        (both("adagrad.learning_rate", 0.5), ConfigError, "belongs to the rules SparseAdaGradSGDRule, .*name is None"),
        (
            {**both("name", "SparseAdamSGDRule"), **both("adagrad.learning_rate", 0.5)},
            ConfigError,
            "name is 'SparseAdamSGDRule'. Name one",
        ),
        (paths(accessor__fea_dim=9), ConfigError, "embedx_dim is 6"),
        (paths(accessor__fea_dim=9, accessor__embedx_dim=8), ConfigError, "fea_dim is 9; it is embedx_dim"),
        (paths(accessor__table_accessor_save_param__converter=["x"]), ConfigError, "does not exist"),
        (paths(table_class="SSDSparseTable"), UnsupportedOptionError, "in memory"),
        (both("name", "x"), ConfigError, "sparse_optimizer is 'x'; one of"),
    ],
)
def test_paths_that_cannot_be_honoured_are_refused(
    settings: dict[str, Any], error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        configure_table(PLAIN, settings)


def test_descriptions_that_cannot_be_honoured_are_refused() -> None:
    with pytest.raises(ConfigError, match="both have 'ads'"):
        settings_of_tables({"ads": {}}, {"ads": {}})
    with pytest.raises(ConfigError, match="takes a dictionary, got 3"):
        settings_of_tables({}, {"ads": 3})
    for settings, reason in (
        ({"sparse_table_class": "DownpourSparseSSDTable"}, "in memory"),
        ({"sparse_converter": "cat"}, "does not exist"),
        ({"sparse_embedx_dim": 3}, "embedx_dim is 3"),
        ({"sparse_treshold": 3}, "does not exist"),
    ):
        with pytest.raises(ConfigError, match=reason):
            configure_table(replace(PLAIN), settings_of_tables({}, {"ads": settings})["ads"])
