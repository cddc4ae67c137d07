"""Values of a strategy that are changed in place (A0.6 to A0.8, A0.13)."""

from __future__ import annotations

import copy
import json
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.errors import ConfigError, OptionWarning, UnknownOptionError
from fleet.options import BuildStrategy, DistributedStrategy, mark_copied, schema
from fleet.strategies._declare.fields import Config


class SimpleJob:
    """A job that runs."""

    closed = False


def strategy_with(**options: Any) -> DistributedStrategy:
    """Returns a strategy with ``options`` assigned."""
    strategy = DistributedStrategy()
    strategy.update(options)
    return strategy


WRITES: dict[str, tuple[Callable[[DistributedStrategy], Any], dict[str, Any]]] = {
    "key": (lambda s: s.amp_configs.__setitem__("incr_ratio", 4), {"amp_configs": {"incr_ratio": 4.0}}),
    "attribute": (lambda s: setattr(s.amp_configs, "incr_ratio", 4), {"amp_configs": {"incr_ratio": 4.0}}),
    "update": (
        lambda s: s.amp_configs.update({"incr_ratio": 4.0}, decr_ratio=0.5),
        {"amp_configs": {"incr_ratio": 4.0, "decr_ratio": 0.5}},
    ),
    "pairs": (lambda s: s.amp_configs.update([("incr_ratio", 4.0)]), {"amp_configs": {"incr_ratio": 4.0}}),
    "in place or": (lambda s: s.amp_configs.__ior__({"incr_ratio": 4.0}), {"amp_configs": {"incr_ratio": 4.0}}),
    "nested key": (
        lambda s: s.hybrid_configs["sharding_configs"].__setitem__("accumulate_steps", 2),
        {"hybrid_configs": {"sharding_configs": {"accumulate_steps": 2}}},
    ),
    "nested attributes": (
        lambda s: setattr(s.hybrid_configs.pp_configs.p2p_nccl_config, "nchannels", 2),
        {"hybrid_configs": {"pp_configs": {"p2p_nccl_config": {"nchannels": 2}}}},
    ),
    "nested whole": (
        lambda s: s.hybrid_configs.__setitem__("sharding_configs", {"accumulate_steps": 2}),
        {"hybrid_configs": {"sharding_configs": {"accumulate_steps": 2}}},
    ),
    "list": (
        lambda s: s.recompute_configs["checkpoints"].append("a"),
        {"recompute_configs": {"checkpoints": ["a"]}},
    ),
    "dictionary in a list": (
        lambda s: (
            s.recompute_configs.refined_ops_patterns.append({"num": 1}),
            s.recompute_configs.refined_ops_patterns[0].update(num=2),
        ),
        {"recompute_configs": {"refined_ops_patterns": [{"num": 2}]}},
    ),
    "free keys": (
        lambda s: s.sparse_table_configs.setdefault("emb", {}).setdefault("rule", []).append("a"),
        {"sparse_table_configs": {"emb": {"rule": ["a"]}}},
    ),
    "free key by attribute": (
        lambda s: (
            setattr(s.sparse_table_configs, "emb", {"rate": 1.0}),
            setattr(s.sparse_table_configs.emb, "rate", 0.5),
            setattr(s.sparse_table_configs, "gone", {}),
            delattr(s.sparse_table_configs, "gone"),
        ),
        {"sparse_table_configs": {"emb": {"rate": 0.5}}},
    ),
    "description by attribute": (
        lambda s: setattr(s.fleet_desc_configs, "emb", {"rate": 0.5}),
        {"fleet_desc_configs": {"emb": {"rate": 0.5}}},
    ),
    "build_strategy": (
        lambda s: s.build_strategy.__setitem__("fuse_all_optimizer_ops", True),
        {"build_strategy": {"fuse_all_optimizer_ops": True}},
    ),
}


@pytest.mark.filterwarnings("ignore::fleet.errors.OptionWarning")
@pytest.mark.parametrize("name", WRITES)
def test_a_write_is_an_assignment(name: str, tmp_path: Path) -> None:
    """A0.6, replaced: it reaches the strategy, its repr, its files, and counts as set by the user."""
    write, same = WRITES[name]
    strategy, other = DistributedStrategy(), strategy_with(**same)
    write(strategy)
    option = next(iter(same))
    assert strategy == other
    assert strategy.is_set(option)
    assert repr(strategy) == repr(other)
    assert getattr(strategy, option) == getattr(other, option)
    for made in (copy.deepcopy(strategy), copy.copy(strategy), pickle.loads(pickle.dumps(strategy))):
        assert made == other
    strategy.save(tmp_path / "s.yaml")
    assert DistributedStrategy.load(tmp_path / "s.yaml") == other
    strategy.save_to_prototxt(tmp_path / "s.prototxt")
    read = DistributedStrategy()
    read.load_from_prototxt(tmp_path / "s.prototxt")
    assert read == other


REFUSED: dict[str, tuple[Callable[[DistributedStrategy], Any], str]] = {
    "key": (
        lambda s: s.amp_configs.__setitem__("incr_ration", 4),
        r"no key 'incr_ration'. Did you mean 'incr_ratio'\?",
    ),
    "attribute": (lambda s: setattr(s.amp_configs, "incr_ration", 4), "Did you mean 'incr_ratio'"),
    "reading": (lambda s: s.amp_configs["incr_ration"], "Did you mean 'incr_ratio'"),
    "reading an attribute": (lambda s: s.amp_configs.incr_ration, "Did you mean 'incr_ratio'"),
    "nested": (
        lambda s: setattr(s.hybrid_configs["sharding_configs"], "tensor_fussion", True),
        r"hybrid_configs\['sharding_configs'\] has no key 'tensor_fussion'. Did you mean 'tensor_fusion'",
    ),
    "one of two": (lambda s: s.amp_configs.update(decr_ratio=0.5, incr_ratio="x"), r"\['incr_ratio'\] takes a number"),
    "type": (lambda s: s.amp_configs.update(use_dynamic_loss_scaling=1), "takes True or False, got 1"),
    "bound": (lambda s: s.gradient_merge_configs.update(k_steps=0), "at least 1"),
    "item": (lambda s: s.recompute_configs["checkpoints"].append(1), r"\['checkpoints'\]\[0\] takes a string, got 1"),
    "pop": (lambda s: s.amp_configs.pop("incr_ration", None), "Did you mean 'incr_ratio'"),
    "del": (lambda s: s.amp_configs.__delitem__("incr_ration"), "Did you mean 'incr_ratio'"),
    "setdefault": (lambda s: s.amp_configs.setdefault("incr_ration", 1), "Did you mean 'incr_ratio'"),
    "popitem": (lambda s: s.amp_configs.popitem(), "the keys are fixed"),
    "free value": (lambda s: s.sparse_table_configs.update(emb={"rule": {1, 2}}), "takes strings, finite numbers"),
    "free attribute": (lambda s: setattr(s.sparse_table_configs, "emb", {1, 2}), "takes strings, finite numbers"),
    "free method": (lambda s: setattr(s.sparse_table_configs, "items", {}), r"Write \['items'\] = {}"),
    "free key": (lambda s: s.sparse_table_configs.update({1: 2}), "its keys are strings"),
    "build_strategy": (lambda s: s.build_strategy.__setitem__("enable_adto", True), "Did you mean 'enable_addto'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_write_changes_nothing(name: str) -> None:
    """A0.5 for writes in place: the message of an assignment, and everything is as before."""
    write, message = REFUSED[name]
    strategy = DistributedStrategy()
    shown = {option: repr(getattr(strategy, option)) for option in strategy}
    with pytest.raises(ConfigError, match=message):
        write(strategy)
    assert strategy == DistributedStrategy()
    assert {option: repr(getattr(strategy, option)) for option in strategy} == shown
    assert strategy.to_dict() == {}


def test_an_unknown_key_is_a_key_error() -> None:
    """``try: configs[key] except KeyError`` works as with a dict, and so do ``in`` and ``get``."""
    configs = DistributedStrategy().amp_configs
    with pytest.raises(KeyError) as caught:
        _ = configs["incr_ration"]
    assert str(caught.value).startswith("amp_configs has no key 'incr_ration'. Did you mean")
    assert isinstance(caught.value, UnknownOptionError)
    assert "incr_ration" not in configs
    assert configs.get("incr_ration") is None
    assert not hasattr(configs, "incr_ration")


def test_a_view_that_was_kept_stays_live() -> None:
    """It shows what is assigned, reset, loaded or updated later, and writes to the same strategy."""
    strategy = DistributedStrategy()
    a_sync, names, tables = strategy.a_sync_configs, strategy.recompute_configs["checkpoints"], []
    a_sync["k_steps"] = 100
    strategy.a_sync = True  # A0.8
    assert a_sync["k_steps"] == 0
    strategy.recompute_configs = {"checkpoints": ["b"]}
    names.append("c")
    assert strategy.recompute_configs["checkpoints"] == names == ["b", "c"]
    names += ["d"]
    strategy.recompute_configs["checkpoints"] += ["e"]
    assert strategy["recompute_configs"].checkpoints == ("b", "c", "d", "e")
    strategy.update({"a_sync_configs": {"k_steps": 7}})
    assert a_sync["k_steps"] == 7
    strategy.a_sync_configs |= {"k_steps": 8}
    assert a_sync["k_steps"] == 8
    strategy.sparse_table_configs = {"emb": {"a": 1}}
    tables = strategy.sparse_table_configs["emb"]
    tables["a"] = 2
    strategy.sparse_table_configs["other"] = {}
    tables["a"] = 3
    assert strategy.sparse_table_configs == {"emb": {"a": 3}, "other": {}}
    strategy.sparse_table_configs.pop("emb")
    with pytest.raises(ConfigError, match="Read it again"):
        tables["a"] = 4
    first, second = strategy.build_strategy, strategy.build_strategy
    first.fuse_all_optimizer_ops = True
    second.allow_cuda_graph_capture = True
    assert strategy.build_strategy == first == second
    assert strategy["build_strategy"].fuse_all_optimizer_ops


@pytest.mark.filterwarnings("ignore::fleet.errors.OptionWarning")
def test_items_of_a_list_stay_what_they_are() -> None:
    """A dictionary that was read from a list is written where it is, or refused once the list was rearranged."""
    strategy = strategy_with(recompute_configs={"refined_ops_patterns": [{"num": 1}, {"num": 2}]})
    patterns = strategy.recompute_configs["refined_ops_patterns"]
    second = patterns[1]
    second["num"] = 3
    second["num"] = 4
    strategy.recompute_configs["enable_offload"] = True
    second["num"] = 5
    assert patterns == [{"num": 1}, {"num": 5}]
    patterns.pop(0)
    with pytest.raises(ConfigError, match="Read it again"):
        second["num"] = 6
    assert strategy.recompute_configs["refined_ops_patterns"] == [{"num": 5}]


def test_del_pop_and_clear_bring_defaults_back() -> None:
    """The keys are fixed, so taking one away resets it; ``pop`` returns what was there."""
    strategy = strategy_with(amp_configs={"incr_ratio": 4.0, "decr_ratio": 0.5, "custom_white_list": ["a"]})
    configs = strategy.amp_configs
    assert configs.pop("incr_ratio") == 4.0
    del configs["decr_ratio"]
    names = configs.pop("custom_white_list")
    names.append("b")
    assert strategy["amp_configs"] == schema()["amp_configs"].default
    strategy.hybrid_configs = {"dp_degree": 2, "sharding_configs": {"accumulate_steps": 2}}
    del strategy.hybrid_configs.sharding_configs
    assert strategy["hybrid_configs"].changes() == {"dp_degree": 2}
    strategy.hybrid_configs.clear()
    assert strategy["hybrid_configs"] == schema()["hybrid_configs"].default


def test_a_view_is_a_dict_to_others() -> None:
    """json, yaml, ``**``, ``==`` and ``|`` see the values; what is copied or unpickled is plain and independent."""
    strategy = strategy_with(recompute_configs={"checkpoints": ["a"]}, sparse_table_configs={"emb": {"a": [1]}})
    for view in (strategy.recompute_configs, strategy.sparse_table_configs, strategy.hybrid_configs):
        same = json.loads(json.dumps(view))
        assert view == same == {**view} == dict(view) == view | {} == yaml.safe_load(yaml.safe_dump(view))
        assert yaml.safe_load(yaml.dump(view)) == same
        assert repr(view) == repr(same)
    for made in (
        copy.copy(strategy.recompute_configs),
        copy.deepcopy(strategy.recompute_configs),
        strategy.recompute_configs.copy(),
        pickle.loads(pickle.dumps(strategy.recompute_configs)),
    ):
        assert type(made) is dict
        made["checkpoints"].append("b")
        made["nonsense"] = 1
    assert strategy.recompute_configs["checkpoints"] == ["a"]
    twin = copy.deepcopy(strategy)
    twin.recompute_configs["checkpoints"].append("b")
    assert strategy.recompute_configs["checkpoints"] == ["a"]
    twin.recompute_configs = strategy.recompute_configs
    assert twin == strategy
    twin.recompute_configs["enable_offload"] = True
    assert strategy.recompute_configs["enable_offload"] is False


def test_every_key_can_be_reached_by_attribute() -> None:
    """No key has the name of a method of dict, of a list, or of the views."""

    def check(view: Any, config: Config) -> None:
        for key in config.key_names():
            inner = getattr(config, key)
            assert getattr(view, key) is view[key]
            if isinstance(inner, Config):
                check(view[key], inner)

    strategy = DistributedStrategy()
    for name in strategy:
        if isinstance(strategy[name], Config):
            check(getattr(strategy, name), strategy[name])


def test_warnings_come_once_and_at_the_users_line() -> None:
    """A key without meaning warns as in an assignment, only for what is written."""
    strategy = DistributedStrategy()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        strategy.hybrid_configs["sharding_configs"].tensor_fusion = True
        strategy.hybrid_configs["sharding_configs"]["accumulate_steps"] = 2
        strategy.recompute_configs.update(enable_tuning=True, checkpoint_shape=[1])
        strategy.recompute_configs["checkpoint_shape"].append(2)
        del strategy.recompute_configs["enable_tuning"]
        strategy.hybrid_configs |= {"dp_degree": 2}
        built = copy.deepcopy(strategy.build_strategy)
        strategy.build_strategy = built
    texts = [str(warning.message) for warning in caught]
    assert [warning.filename for warning in caught] == [__file__] * 3
    assert "['tensor_fusion']" in texts[0]
    assert "2 settings" in texts[1]
    assert "checkpoint_shape" in texts[2]


def test_a_change_after_the_copy_warns_once_for_each_option() -> None:
    """A0.13: what ``fleet.init`` copied goes on as it was; the object says so, and still takes the value."""
    strategy = DistributedStrategy()
    kept = strategy.amp_configs
    job = SimpleJob()
    mark_copied(strategy, "fleet.init()", job)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kept["incr_ratio"] = 4.0
        strategy.amp_configs = {"incr_ratio": 5.0}
        strategy.fuse_grad_size_in_MB = 16
        strategy.update({"fuse_grad_size_in_MB": 8, "lars": True})
        with pytest.raises(ConfigError):
            strategy.dgc = 1
        copy.deepcopy(strategy).dgc = True
        pickle.loads(pickle.dumps(strategy)).dgc = True
    told = [str(warning.message).split(" was set after fleet.init() had copied")[0] for warning in caught]
    assert told == [f"DistributedStrategy.{name}" for name in ("amp_configs", "fuse_grad_size_in_MB", "lars")]
    assert all("no longer has an effect" in str(warning.message) for warning in caught)
    assert [warning.filename for warning in caught] == [__file__] * 3
    assert kept["incr_ratio"] == 5.0
    mark_copied(strategy, "fleet.distributed_optimizer()", job)
    with pytest.warns(OptionWarning, match=r"Set it before that call\.$"):
        strategy.lars = False
    job.closed = True
    strategy.dgc = True


def test_a_settings_object_of_its_own() -> None:
    """BuildStrategy() is written by key and attribute, is no part of a strategy, and copies and pickles keep it."""
    build = BuildStrategy()
    build["fuse_all_optimizer_ops"] = True
    for made in (copy.copy(build), copy.deepcopy(build), build.copy(), pickle.loads(pickle.dumps(build))):
        assert type(made) is BuildStrategy
        assert made == build
        made.fuse_all_optimizer_ops = False
    assert build.fuse_all_optimizer_ops is True
    strategy = strategy_with(build_strategy=build)
    build.fuse_all_optimizer_ops = False
    assert strategy.build_strategy.fuse_all_optimizer_ops is True


names = st.lists(st.sampled_from("abc"), max_size=3)
list_steps = st.one_of(
    st.tuples(st.just("append"), st.sampled_from("abc")),
    st.tuples(st.just("extend"), names),
    st.tuples(st.just("__iadd__"), names),
    st.tuples(st.just("__imul__"), st.integers(0, 2)),
    st.tuples(st.just("insert"), st.integers(-3, 3), st.sampled_from("abc")),
    st.tuples(st.just("pop"), st.integers(-2, 2)),
    st.tuples(st.just("remove"), st.sampled_from("abc")),
    st.tuples(st.just("__setitem__"), st.integers(-3, 3), st.sampled_from("abc")),
    st.tuples(st.just("__setitem__"), st.builds(slice, st.integers(0, 2), st.integers(0, 3)), names),
    st.tuples(st.just("__delitem__"), st.integers(-2, 2)),
    st.sampled_from([("sort",), ("reverse",), ("clear",)]),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(list_steps, max_size=6))
def test_a_list_behaves_as_a_list(steps: list[tuple[Any, ...]]) -> None:
    """Each change does what it does to a list, or raises the same."""
    strategy, model = DistributedStrategy(), list[str]()
    view = strategy.recompute_configs["checkpoints"]
    for name, *arguments in steps:
        assert outcome(view, name, arguments) == outcome(model, name, arguments)
        assert view == model == list(strategy["recompute_configs"].checkpoints)


values = st.recursive(
    st.one_of(st.integers(0, 3), st.booleans(), st.just(0.5), st.sampled_from("xy")),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(st.sampled_from("abc"), inner, max_size=2)),
    max_leaves=4,
)
free_steps = st.one_of(
    st.tuples(st.just("__setitem__"), st.sampled_from("abc"), values),
    st.tuples(st.just("setdefault"), st.sampled_from("abc"), values),
    st.tuples(st.just("update"), st.dictionaries(st.sampled_from("abc"), values, max_size=2)),
    st.tuples(st.just("__ior__"), st.dictionaries(st.sampled_from("abc"), values, max_size=2)),
    st.tuples(st.just("pop"), st.sampled_from("abc")),
    st.tuples(st.just("pop"), st.sampled_from("abc"), st.just(None)),
    st.tuples(st.just("__delitem__"), st.sampled_from("abc")),
    st.sampled_from([("popitem",), ("clear",)]),
)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["", "a", "b"]), free_steps), max_size=6))
def test_free_keys_behave_as_a_dict(steps: list[tuple[str, tuple[Any, ...]]]) -> None:
    """The same for ``sparse_table_configs`` and the dictionaries inside it."""
    strategy, model = DistributedStrategy(), dict[str, Any]()
    view = strategy.sparse_table_configs
    for place, (name, *arguments) in steps:
        inner = place and isinstance(model.get(place), dict)
        found = outcome(view[place] if inner else view, name, arguments)
        assert found == outcome(model[place] if inner else model, name, copy.deepcopy(arguments))
        assert repr(view) == repr(model) == repr(strategy.to_dict(all_options=True)["sparse_table_configs"])


config_steps = st.one_of(
    st.tuples(st.just("__setitem__"), st.sampled_from(["k_steps", "avg"]), st.integers(1, 3) | st.booleans()),
    st.tuples(st.just("update"), st.fixed_dictionaries({"k_steps": st.integers(-1, 3), "avg": st.booleans()})),
    st.tuples(st.just("pop"), st.sampled_from(["k_steps", "avg"])),
    st.sampled_from([("clear",), ("setdefault", "k_steps", 9)]),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(config_steps, max_size=6))
def test_fixed_keys_behave_as_assignments(steps: list[tuple[Any, ...]]) -> None:
    """A change in place leaves what the assignment of the whole dictionary leaves, and is refused where that is."""
    strategy, other = DistributedStrategy(), DistributedStrategy()
    default = other.gradient_merge_configs.copy()
    view = strategy.gradient_merge_configs
    for name, *arguments in steps:
        readings: dict[str, Callable[[Any], dict[str, Any]]] = {
            "__setitem__": lambda a: {a[0]: a[1]}, "update": lambda a: a[0], "pop": lambda a: {a[0]: default[a[0]]},
            "clear": lambda a: default, "setdefault": lambda a: {},
        }  # fmt: skip
        try:
            other.gradient_merge_configs = readings[name](arguments)
        except ConfigError as error:
            with pytest.raises(type(error)):
                getattr(view, name)(*arguments)
        else:
            getattr(view, name)(*arguments)
        assert strategy == other
        assert view == other.gradient_merge_configs == other["gradient_merge_configs"].as_dict()


def outcome(target: Any, name: str, arguments: list[Any]) -> tuple[str, Any]:
    """Returns what a call gives: its result as text, or the kind of error."""
    try:
        return "", repr(getattr(target, name)(*arguments))
    except (KeyError, IndexError, ValueError) as error:
        return type(error).__name__, None
