"""sparse_table_configs: Fleet's keys become accessor and rule, unknown ones are refused (D.4)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fleet.errors import ConfigError, UnsupportedOptionError
from fleet.ps.table.accessor import Accessor
from fleet.ps.table.layout import SparseTableConfig
from fleet.ps.table.rules import Rule
from fleet.ps.worker.table_configs import configure_table

PLAIN = SparseTableConfig("ads", 9, Rule("sgd", {"learning_rate": 0.3}))


def test_without_settings_nothing_changes() -> None:
    assert configure_table(PLAIN, None) is PLAIN


def test_documented_values_stand_for_keys_that_are_left_away() -> None:
    """D.4: a table whose configuration is written out has the documented defaults."""
    made = configure_table(PLAIN, {"embedx_threshold": 5, "show_click_decay_rate": 0.9})
    assert made.accessor is not None
    assert (made.accessor.embedx_threshold, made.accessor.show_click_decay_rate) == (5, 0.9)
    assert (made.accessor.delete_threshold, made.accessor.base_threshold) == (0.8, 1.5)
    assert made.rule == PLAIN.rule
    assert made.embed_rule is None


def test_rules_of_both_parts() -> None:
    settings = {
        "sparse_optimizer": "adam",
        "learning_rate": 0.01,
        "beta1_decay_rate": 0.8,
        "weight_bounds": [-1, 1],
        "embed_sparse_optimizer": "naive",
        "embed_learning_rate": 0.5,
        "initial_range": 0.25,
    }
    with pytest.raises(ConfigError, match="does not read 'beta1'"):
        configure_table(PLAIN, settings)
    del settings["beta1_decay_rate"]
    made = configure_table(PLAIN, {**settings, "sparse_accessor_class": "CtrCommonAccessor"})
    assert (made.rule.name, made.rule["learning_rate"], made.rule["upper_bound"]) == ("adam", 0.01, 1.0)
    assert made.embed_rule is not None
    assert (made.embed_rule.name, made.embed_rule["learning_rate"]) == ("sgd", 0.5)
    assert made.accessor is not None
    assert made.accessor.pulls_counters
    assert (made.initializer.a, made.initializer.b) == (-0.25, 0.25)


def test_the_optimizers_rule_with_a_rate_of_its_own() -> None:
    assert configure_table(PLAIN, {"learning_rate": 0.7}).rule == Rule("sgd", {"learning_rate": 0.7})


@pytest.mark.parametrize("settings", [{"learning_rate": 0.7}, {"weight_bounds": [-1, 1]}, {"initial_range": 0.1}])
def test_a_rate_or_a_range_adds_no_accessor(settings: dict[str, Any]) -> None:
    """Rows would start at zeros, train their first column only, and be deleted by the next shrink."""
    assert configure_table(PLAIN, settings).accessor is None
    own = Accessor(zero_init=False, delete_threshold=0.0, embedx_threshold=0.0)
    assert configure_table(replace(PLAIN, accessor=own), settings).accessor == own


def test_the_accessor_of_a_module_keeps_what_is_not_named() -> None:
    own = Accessor(zero_init=False, delete_threshold=0.0, embedx_threshold=0.0)
    table = replace(PLAIN, accessor=own)
    assert configure_table(table, {"sparse_optimizer": "adagrad", "max_rows": 100}).accessor == own
    assert configure_table(table, {"embedx_threshold": 5}).accessor == replace(own, embedx_threshold=5)
    assert configure_table(table, {"sparse_accessor_class": "CtrCommonAccessor"}).accessor == replace(
        own, kind="CtrCommonAccessor"
    )


def test_the_range_of_the_columns_that_do_not_start_at_0() -> None:
    """D.4: zero_init leaves embedx the only columns with a range."""
    made = configure_table(PLAIN, {"embedx_initial_range": 0.5})
    assert (made.initializer.a, made.initializer.b) == (-0.5, 0.5)


@pytest.mark.parametrize(
    ("settings", "error", "reason"),
    [
        ({"embed_threshold": 1}, ConfigError, "does not exist"),
        ({"sparse_optimizer": "lamb"}, ConfigError, "one of"),
        ({"embedx_dim": 3}, ConfigError, "embedx"),
        ({"weight_bounds": 3}, ConfigError, "weight_bounds"),
        ({"learning_rate": "x"}, ConfigError, "number"),
        ({"sparse_table_class": "SSDSparseTable"}, UnsupportedOptionError, "in memory"),
        ({"sparse_accessor_class": "CtrDymfAccessor"}, UnsupportedOptionError, "GPU"),
        ({"enable_cache": True}, UnsupportedOptionError, "whole tables are in memory"),
        ({"shard_num": 10}, UnsupportedOptionError, "one checked file"),
        ({"embed_initial_range": 1.0, "embedx_initial_range": 2.0}, UnsupportedOptionError, "one initializer"),
        ({"scale_sparse_gradient_with_batch_size": 1}, ConfigError, "True or False"),
        ({"embed_initial_range": 1.0}, UnsupportedOptionError, "one initializer"),
        ({"embedx_initial_range": 1.0, "zero_init": False}, UnsupportedOptionError, "one initializer"),
        ("adam", ConfigError, "dictionary"),
    ],
)
def test_what_cannot_be_honoured_is_refused(settings: Any, error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason):
        configure_table(PLAIN, settings)
