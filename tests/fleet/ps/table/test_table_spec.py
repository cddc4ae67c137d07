"""Table configurations survive JSON, and a specification that cannot be read is refused."""

from __future__ import annotations

import json

import pytest

from fleet.errors import ConfigError
from fleet.ps.table.accessor import Accessor
from fleet.ps.table.dense_table import DenseTableConfig
from fleet.ps.table.entry import CountFilterEntry, ProbabilityEntry, ShowClickEntry
from fleet.ps.table.initializers import Initializer
from fleet.ps.table.layout import SparseTableConfig
from fleet.ps.table.rules import Rule
from fleet.ps.table.table_spec import config_of_spec, spec_of_config

CONFIGS = [
    SparseTableConfig("a", 8),
    SparseTableConfig("b", 3, Rule("adam", {"learning_rate": 0.1, "lower_bound": -1.0}), seed=-5, create_on="push"),
    SparseTableConfig(
        "c",
        9,
        Rule("sgd"),
        Rule("adagrad"),
        Initializer("normal", 0.5, 2.0),
        Accessor("CtrCommonAccessor", embedx_threshold=3.0, zero_init=False),
        CountFilterEntry(4),
    ),
    SparseTableConfig("d", 2, entry=ProbabilityEntry(0.25)),
    SparseTableConfig("e", 2, accessor=Accessor(), entry=ShowClickEntry("s", "c")),
    DenseTableConfig("f", 17, Rule("adam_d2sum")),
    DenseTableConfig("g", 0),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_a_configuration_comes_back_equal(config):
    assert config_of_spec(json.loads(json.dumps(spec_of_config(config), allow_nan=False))) == config


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "graph"},
        {"rule": {"name": "lion"}},
        {"rule": {}},
        {"rule": None},
        {"dim": "8"},
        {"dim": None},
        {"initializer": ["uniform", 1, 2, 3]},
        {"accessor": {"color": 1}},
        {"entry": "x"},
        {"seed": 2**70},
        {"rule": {"name": "sgd", "learning_rate": "x"}},
        {"create_on": 4},
    ],
)
def test_a_wrong_field_is_refused(change):
    with pytest.raises(ConfigError):
        config_of_spec({**spec_of_config(CONFIGS[0]), **change})
    with pytest.raises(ConfigError):
        config_of_spec({})
