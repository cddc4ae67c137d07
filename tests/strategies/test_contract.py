"""The contract of every strategy and every group of settings: a new option is under test once it exists."""

from __future__ import annotations

import copy
import math
import pickle
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fleet.strategies
from fleet.errors import ConfigError
from fleet.options import DistributedStrategy
from fleet.strategies import GROUPS, REGISTRY, Stage, Strategy
from fleet.strategies._declare.fields import Config, value_types
from fleet.strategies._declare.strategy import GradientKeeper, JobKind
from fleet.strategies._declare.strategy_plan import foreign

STRATEGIES = [pytest.param(strategy, id=name) for name, strategy in REGISTRY.items()]


def all_configs() -> Iterator[type[Config]]:
    def below(config: type[Config]) -> Iterator[type[Config]]:
        yield config
        for key in config.key_names():
            if isinstance(getattr(config(), key), Config):
                yield from below(type(getattr(config(), key)))

    roots = [strategy.Config for strategy in REGISTRY.values() if strategy.Config is not None]
    found: dict[type[Config], None] = {}
    for root in [*roots, *GROUPS]:
        found.update(dict.fromkeys(below(root)))
    yield from found


CONFIGS = [pytest.param(config, id=config.__name__) for config in all_configs()]
NUMBERS = [
    pytest.param(config, key, kind, id=f"{config.__name__}.{key}")
    for config in all_configs()
    for key, kind in value_types(config).items()
    if kind in (int, float) or kind in (tuple[int, ...], tuple[float, ...])
]


@pytest.mark.parametrize("config", CONFIGS)
def test_defaults_are_valid_and_stable(config: type[Config]) -> None:
    """Defaults pass their own rules, survive copy and pickle, and equal themselves."""
    default = config()
    assert default == config()
    assert copy.deepcopy(default) == default
    assert pickle.loads(pickle.dumps(default)) == default
    assert config().updated(default.as_dict()) == default
    assert default.changes() == {}
    assert config.option or config in GROUPS  # a message can name every key


@pytest.mark.parametrize("config", CONFIGS)
def test_fields_are_settings(config: type[Config]) -> None:
    """Every key says what it means, and at most one of 'no meaning' and 'refused' holds."""
    for key in config.key_names():
        rule = config.rule(key)
        assert rule.meaning.strip(), key
        assert not (rule.no_meaning and rule.refused), key
        assert rule.outcome in ("implemented", "no meaning", "refused")


@pytest.mark.parametrize(("config", "key", "kind"), NUMBERS)
def test_numbers_reject_bad_values(config: type[Config], key: str, kind: Any) -> None:
    """003-10: every number has bounds; nan, infinity, text, None and booleans are refused by name."""
    many = kind not in (int, float)
    bad: list[Any] = [math.nan, math.inf, "1", None, True, -(10**9)]
    for value in bad:
        with pytest.raises(ConfigError, match=key):
            config(**{key: [value] if many else value})
    if kind is int:
        with pytest.raises(ConfigError, match=key):
            config(**{key: 1.5})


@pytest.mark.parametrize("config", CONFIGS)
def test_unknown_keys_are_refused(config: type[Config]) -> None:
    """A0.5: a key that does not exist is refused, as AssertionError and as ValueError."""
    with pytest.raises(AssertionError, match="no key 'no_such_key'"):
        config().updated({"no_such_key": 1})
    with pytest.raises(ValueError, match="takes a dictionary"):
        config().updated(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategy_describes_itself(strategy: type[Strategy]) -> None:
    """Name, meaning, stage and effect are there, and the name is that of the file."""
    assert strategy.__module__.rpartition(".")[2] == strategy.name
    assert strategy.meaning.endswith(".")
    assert isinstance(strategy.stage, Stage)
    assert strategy.model_effect or strategy.optimizer_effect
    assert not strategy.model_effect.endswith(".")
    assert not strategy.optimizer_effect.endswith(".")
    assert foreign(strategy, collective=True) is None or foreign(strategy, collective=False) is None
    if strategy.Config is not None:
        assert strategy.Config.option == f"{strategy.name}_configs"
    if strategy.refused is not None:
        assert not strategy.refused.endswith(".")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_names_of_others_are_registered(strategy: type[Strategy]) -> None:
    """A name in after, conflicts, replaces or reads exists, and each conflict has a reason."""
    divided = DistributedStrategy()
    divided.sharding_configs = {"stage": 2}
    replaced = strategy.replaces(divided)
    assert strategy.name not in (*strategy.after, *replaced, *strategy.conflicts)
    for other in strategy.after:
        assert other in REGISTRY
        assert REGISTRY[other].stage == strategy.stage, "after orders inside a stage only"
    for other in replaced:
        assert issubclass(REGISTRY[other], JobKind | GradientKeeper)
    for other, reason in strategy.conflicts.items():
        assert other in REGISTRY
        assert not issubclass(REGISTRY[other], JobKind)
        assert strategy.name not in REGISTRY[other].conflicts, "each pair is written once"
        assert len(reason) > 15
        assert not reason.endswith(".")
    known = set(DistributedStrategy())
    assert {option for options in replaced.values() for option in options} <= known
    if issubclass(strategy, JobKind):
        assert set(strategy.reads) <= known
        for option, changes in strategy.also_sets.items():
            assert DistributedStrategy()[option].updated(changes)


def test_after_has_no_cycle() -> None:
    """The finer order inside the stages is an order."""
    from fleet.strategies._declare.strategy_plan import ordered

    assert len(ordered(list(REGISTRY.values()))) == len(REGISTRY)


def test_every_public_module_declares_an_option() -> None:
    """One public file or folder, one option or one group of options."""
    folder = Path(fleet.strategies.__file__).parent
    public = {name for _, name, _ in pkgutil.iter_modules([str(folder)]) if not name.startswith("_")}
    declared = {strategy.__module__ for strategy in REGISTRY.values()} | {group.__module__ for group in GROUPS}
    assert public == {name.split(".")[2] for name in declared if "fleet." in name}


def test_what_one_file_alone_uses_is_no_member_of_strategy() -> None:
    """Attributes, methods and properties of the class body, those of its bases included."""
    bases = [base for base in Strategy.__mro__ if base is not object]
    members = {name for base in bases for name in (*vars(base), *base.__annotations__) if not name.startswith("__")}
    assert len(members) <= 28, sorted(members)


@pytest.mark.parametrize(
    ("members", "rule"),
    [
        ({"name": "extra", "stage": Stage.STEP}, "must also define meaning"),
        ({"replaces": ("amp",)}, "replaces must be a class method"),
        ({"name": "extra", "meaning": "x."}, "must also define stage"),
        ({"problem": lambda self, options, world_size: None}, "problem must be a class method"),
        ({"notes": lambda self, options, world_size: ()}, "notes must be a class method"),
        ({"name": "extra", "meaning": "x.", "stage": Stage.STEP, "Config": dict}, "derived from Config"),
    ],
)
def test_a_strategy_with_a_wrong_member_is_refused_where_it_is_declared(members: dict[str, Any], rule: str) -> None:
    with pytest.raises(TypeError, match=rf"Extra.*{rule}"):
        type("Extra", (Strategy,), members)
    assert "extra" not in REGISTRY


@pytest.mark.parametrize("hook", ["wrap_model", "wrap_optimizer"])
def test_a_strategy_that_returns_nothing_is_named(hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(REGISTRY["amp"], hook, lambda self, inner: None)
    strategy = DistributedStrategy()
    strategy.amp = True
    fleet.init(is_collective=True, strategy=strategy)
    net = torch.nn.Linear(1, 1)
    with pytest.raises(ConfigError, match=rf"'amp': Amp\.{hook}\(\) returned None"):
        _ = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.1)), fleet.distributed_model(net)


def test_an_option_cannot_be_defined_twice() -> None:
    """A second class of the same name is refused when it is declared."""
    with pytest.raises(TypeError, match="'amp' is defined by both"):

        class Again(Strategy):
            name = "amp"


def test_no_option_is_declared_by_two_groups() -> None:
    """A top-level name has one owner."""
    names = [key for group in GROUPS for key in group.key_names()]
    names += [name for name, strategy in REGISTRY.items() if strategy.default is not None]
    names += [f"{name}_configs" for name, strategy in REGISTRY.items() if strategy.Config is not None]
    assert sorted(names) == sorted(set(names))
