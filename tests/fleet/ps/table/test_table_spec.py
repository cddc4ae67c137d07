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
from fleet.ps.table.table_spec import config_of_spec, difference_of_specs, spec_of_config

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
    DenseTableConfig("h", 3, shapes=((2, 4), (), (5,)), names=("w", "", "b")),
    DenseTableConfig("i", 0, shapes=()),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_a_configuration_comes_back_equal(config):
    found = config_of_spec(json.loads(json.dumps(spec_of_config(config), allow_nan=False)))
    assert found == config
    assert isinstance(config, SparseTableConfig) or found.names == config.names


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


@pytest.mark.parametrize("shapes", [5, [5], [["a"]], [[2.0]], [[-1]], [[True]], "a", [[2], [[1]]], [[2]]])
def test_wrong_shapes_are_refused(shapes):
    with pytest.raises(ConfigError, match="cannot be read|a shape is|parameters of 2 elements, and the table has 17"):
        config_of_spec({**spec_of_config(CONFIGS[5]), "shapes": shapes})


def test_shapes_are_compared_where_both_are_known_and_names_are_not():
    first = spec_of_config(DenseTableConfig("f", 6, shapes=((2, 3),), names=("w",)))
    assert not difference_of_specs(first, {**first, "names": ["v"]})
    assert not difference_of_specs(first, {key: first[key] for key in ("kind", "name", "size", "rule")})
    assert difference_of_specs({**first, "shapes": [[6]]}, first) == "parameter 0 ('w') is [6] there and [2, 3] here"
    both = difference_of_specs({**first, "size": 7, "shapes": [[7]]}, first)
    assert both == "size is 7 there and 6 here, parameter 0 ('w') is [7] there and [2, 3] here"
