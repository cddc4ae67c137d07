"""Walks every option and key of the specification and proves what becomes of it (A.1, A.2, A.4; 003-11)."""

from __future__ import annotations

import warnings

import pytest

from fleet.errors import ConfigError, OptionWarning, UnsupportedOptionError
from fleet.options import ALIASES, DistributedStrategy, schema
from fleet.strategies import REGISTRY, plan
from fleet.strategies._declare.fields import Config
from fleet.strategies._declare.strategy_plan import foreign, problems
from tests.strategies.option_oracle import KEYS, NCCL, OWN, SWITCHES, TOP_LEVEL

ALL_KEYS = [(option, *row) for option, rows in KEYS.items() for row in rows]
WRONG_TYPES = {bool: 1, int: "1", float: "1.0", str: 3, list: "x", dict: ["x"]}


ALL_KEY_IDS = [f"{option}.{key}" for option, key, *_ in ALL_KEYS]


def nested(path: str, value: object) -> dict[str, object]:
    head, _, rest = path.partition(".")
    return {head: nested(rest, value) if rest else value}


def read(strategy: DistributedStrategy, option: str, path: str) -> object:
    value = getattr(strategy, option)
    for key in path.split("."):
        value = value[key] if isinstance(value, dict) else getattr(value, key)
    return value


def assign(strategy: DistributedStrategy, option: str, value: object) -> list[warnings.WarningMessage]:
    """Assigns and returns the warnings, which all must point at the line below."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        setattr(strategy, option, value)
    assert all(warning.filename == __file__ for warning in caught)
    assert all(warning.category is OptionWarning for warning in caught)
    return list(caught)


def built_in(value: object) -> type:
    """Returns the type that a user sees: dictionaries and lists are live views."""
    return next((kind for kind in (dict, list) if isinstance(value, kind)), type(value))


def refusals(strategy: DistributedStrategy, collective: bool = True) -> list[str]:
    found = problems(strategy, 2, collective=collective)
    return [str(error) for error in found if isinstance(error, UnsupportedOptionError)]


def test_registry_and_oracle_name_the_same_options() -> None:
    """A.1: nothing is missing, and nothing was added that Fleet does not have."""
    named = {row[0] for row in SWITCHES} | {ALIASES.get(row[0], row[0]) for row in TOP_LEVEL} | KEYS.keys() | OWN
    assert set(schema()) == named


@pytest.mark.parametrize("option", sorted(KEYS))
def test_configs_have_the_keys_of_the_oracle(option: str) -> None:
    """A.2, A.4: each dictionary has exactly the listed keys."""
    strategy = DistributedStrategy()
    found = strategy[option].as_dict()

    def leaves(value: dict[str, object], prefix: str = "") -> list[str]:
        return [leaf for key, item in value.items() for leaf in
                (leaves(item, f"{prefix}{key}.") if isinstance(item, dict) else [f"{prefix}{key}"])]  # fmt: skip

    assert sorted(leaves(found)) == sorted(row[0] for row in KEYS[option])


@pytest.mark.parametrize(("name", "default"), SWITCHES)
def test_switch(name: str, default: bool) -> None:
    """A.1: a switch has Fleet's default, takes booleans only, and then runs or is refused with the reason."""
    strategy = DistributedStrategy()
    assert getattr(strategy, name) is default
    assert REGISTRY[name].meaning
    for wrong in (1, 0, "True", None, 1.0):
        with pytest.raises(ConfigError, match="takes True or False"):
            setattr(strategy, name, wrong)
    assert getattr(strategy, name) is default
    assert assign(strategy, name, True) == []
    assert getattr(strategy, name) is True
    collective = foreign(REGISTRY[name], collective=True) is None
    mentioned = [str(error) for error in problems(strategy, 2, collective=collective)]
    if REGISTRY[name].refused is not None:
        assert f"'{name}' cannot be honoured: {REGISTRY[name].refused}." in mentioned
    elif not mentioned:
        assert name in [step.name for step in plan(strategy, 2, collective=collective).steps]
    else:
        assert all(name in text for text in mentioned)  # it needs a setting beside the switch, and says which


@pytest.mark.parametrize(("name", "default", "value", "outcome"), TOP_LEVEL, ids=[row[0] for row in TOP_LEVEL])
def test_top_level(name: str, default: object, value: object, outcome: str) -> None:
    """A.1: type, default, and one of three outcomes of each option that is no switch."""
    strategy = DistributedStrategy()
    assert getattr(strategy, name) == default
    assert built_in(getattr(strategy, name)) is type(default)
    with pytest.raises(ConfigError):
        setattr(strategy, name, WRONG_TYPES[type(default)])
    caught = assign(strategy, name, value)
    assert getattr(strategy, name) == value
    refused = refusals(strategy)
    rule = schema()[ALIASES.get(name, name)].rule
    assert bool(caught) == (outcome == "warns")
    assert len(caught) <= 1
    assert bool(refused) == (outcome == "refused")
    if outcome == "warns":
        assert str(rule.no_meaning) in str(caught[0].message)
    if outcome == "refused":
        assert str(rule.refused) in refused[0]


@pytest.mark.parametrize(("option", "key", "default", "value", "outcome"), ALL_KEYS, ids=ALL_KEY_IDS)
def test_key(option: str, key: str, default: object, value: object, outcome: str) -> None:
    """A.2, A.4: type, default, and one of three outcomes of each key."""
    strategy = DistributedStrategy()
    assert read(strategy, option, key) == default
    assert built_in(read(strategy, option, key)) is type(default)
    with pytest.raises(ConfigError, match=key.split(".")[-1]):
        setattr(strategy, option, nested(key, WRONG_TYPES[type(default)]))
    assert read(strategy, option, key) == default
    caught = assign(strategy, option, nested(key, value))
    assert read(strategy, option, key) == value
    assert len(caught) == (outcome == "warns")
    if outcome == "warns":
        assert key.split(".")[-1] in str(caught[0].message)
        assert len(str(caught[0].message).split(": ", 1)[1]) > 20  # a reason
    switch = option.removesuffix("_configs")
    collective = switch not in REGISTRY or foreign(REGISTRY[switch], collective=True) is None
    if switch in REGISTRY and REGISTRY[switch].default is not None:
        assign(strategy, switch, True)  # the keys of a switch that is off decide nothing
        assign(strategy, option, nested(key, value))
    mentioned = [text for text in refusals(strategy, collective) if f"[{key.split('.')[-1]!r}]" in text]
    assert bool(mentioned) == (outcome == "refused")


def test_seed_keys_of_recompute_are_accepted_together() -> None:
    """003-14: checkpoints, enable_offload and checkpoint_shape in one dictionary; one warning names the last."""
    strategy = DistributedStrategy()
    caught = assign(
        strategy,
        "recompute_configs",
        {"checkpoints": ["x", "y"], "enable_offload": True, "checkpoint_shape": [100, 512, 1024]},
    )
    assert [("checkpoint_shape" in str(w.message)) for w in caught] == [True]
    assert strategy.recompute_configs["checkpoints"] == ["x", "y"]
    assert strategy.recompute_configs["enable_offload"] is True


def test_several_keys_make_one_warning() -> None:
    """A dictionary with many settings that change nothing warns once and names each of them."""
    strategy = DistributedStrategy()
    changes = {key: "x" if default == "" else 64 for key, default in NCCL.items()}
    caught = assign(strategy, "hybrid_configs", {"dp_configs": {"nccl_config": changes}})
    assert len(caught) == 1
    text = str(caught[0].message)
    assert "8 settings" in text
    assert all(f"hybrid_configs['dp_configs']['nccl_config'][{key!r}]" in text for key in NCCL)


def test_keys_at_their_default_do_not_warn() -> None:
    """Reading a dictionary, changing one key and assigning it back warns of nothing else."""
    strategy = DistributedStrategy()
    for option in KEYS:
        whole = strategy[option].as_dict()
        assert assign(strategy, option, whole) == []


def test_every_reason_is_a_phrase() -> None:
    """Reasons are put into sentences, so none ends with a full stop and none is empty."""

    def rules(kind: type[Config]) -> list[str]:
        found = []
        for key in kind.key_names():
            value = getattr(kind(), key)
            found += rules(type(value)) if isinstance(value, Config) else []
            found += [reason for reason in (kind.rule(key).no_meaning, kind.rule(key).refused) if reason is not None]
            assert kind.rule(key).meaning.strip(), key
        return found

    reasons = [r for o in schema().values() for r in (o.rule.no_meaning, o.rule.refused) if r is not None]
    for option in schema().values():
        if isinstance(option.default, Config):
            reasons += rules(type(option.default))
    assert len(reasons) > 50
    for reason in reasons:
        assert len(reason) > 10
        assert not reason.endswith(".")
