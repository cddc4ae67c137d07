"""Strategies on disk: YAML and protobuf text round-trip, errors name the line, writing is atomic (A0.11)."""

from __future__ import annotations

import math
import os
import stat
import typing
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fleet.errors import ConfigError, OptionWarning, UnknownOptionError
from fleet.options import DistributedStrategy, schema
from fleet.strategies._declare.fields import Config, FieldRule, value_types

TEXT = st.text(max_size=12)
FREE = st.recursive(
    st.one_of(st.booleans(), st.integers(-(2**40), 2**40), st.floats(allow_nan=False, allow_infinity=False), TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=5,
)


def of_kind(kind: Any, rule: FieldRule) -> st.SearchStrategy[Any]:
    """Draws a valid value of one option or key."""
    choices = list(rule.enum.values()) if rule.enum else rule.choices
    if typing.get_origin(kind) is tuple:
        return st.lists(of_kind(typing.get_args(kind)[0], rule), max_size=3)
    if choices is not None:
        return st.sampled_from(list(choices))
    if isinstance(kind, type) and issubclass(kind, Config):
        keys = {key: of_kind(inner, kind.rule(key)) for key, inner in value_types(kind).items()}
        return st.fixed_dictionaries({}, optional=keys)
    low = rule.at_least if rule.at_least is not None else rule.above
    high = rule.at_most if rule.at_most is not None else rule.below
    if kind is int:
        return st.integers(math.ceil(low) if low is not None else -9, int(high) if high is not None else 10**6)
    if kind is float:
        bounds = {"exclude_min": rule.above is not None, "exclude_max": rule.below is not None and high is not None}
        return st.floats(low, high, allow_nan=False, allow_infinity=False, **bounds)
    if typing.get_origin(kind) is dict:
        return st.dictionaries(TEXT, FREE, max_size=3)
    return st.booleans() if kind is bool else TEXT


ANY_OPTIONS = st.lists(
    st.sampled_from(sorted(schema())).flatmap(
        lambda name: st.tuples(st.just(name), of_kind(schema()[name].kind, schema()[name].rule))
    ),
    max_size=4,
)


def built(assignments: list[tuple[str, Any]]) -> DistributedStrategy:
    """Returns a strategy after the assignments; those that a rule across keys refuses are left out."""
    strategy = DistributedStrategy()
    refused = []
    for name, value in assignments:
        try:
            setattr(strategy, name, value)
        except ConfigError as error:
            refused.append(str(error))
    rules = ("names each of", "both True", "is 0", "both name")
    assert all(any(rule in text for rule in rules) for text in refused), refused
    return strategy


def through_yaml(strategy: DistributedStrategy, folder: Path) -> DistributedStrategy:
    strategy.save(folder / "s.yaml")
    return DistributedStrategy.load(folder / "s.yaml")


def through_prototxt(strategy: DistributedStrategy, folder: Path) -> DistributedStrategy:
    strategy.save_to_prototxt(folder / "s.prototxt")
    loaded = DistributedStrategy()
    loaded.load_from_prototxt(folder / "s.prototxt")
    return loaded


THROUGH = pytest.mark.parametrize("through", [through_yaml, through_prototxt])


@THROUGH
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(assignments=ANY_OPTIONS)
def test_round_trip(
    through: Callable[[DistributedStrategy, Path], DistributedStrategy],
    assignments: list[tuple[str, Any]],
    tmp_path: Path,
) -> None:
    """A0.11: what is saved is what is loaded, and what was assigned is known to be assigned."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OptionWarning)
        strategy = built(assignments)
        loaded = through(strategy, tmp_path)
    assert loaded == strategy
    assert all(loaded.is_set(name) == strategy.is_set(name) for name in schema())


@pytest.mark.parametrize("text", ["0E0", "1e3", ".5e-1", "-2e+4"])
def test_text_that_looks_like_a_number_stays_text(text: str, tmp_path: Path) -> None:
    """A0.11: the file quotes what its reader would take for a number."""
    strategy = DistributedStrategy()
    strategy.fs_client_param = {"uri": text}
    strategy.save(tmp_path / "strategy.yaml")
    assert DistributedStrategy.load(str(tmp_path / "strategy.yaml")) == strategy


@THROUGH
def test_every_option_round_trips(
    through: Callable[[DistributedStrategy, Path], DistributedStrategy], tmp_path: Path
) -> None:
    """A0.11: a file of all of Fleet's own names at their defaults reads back."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OptionWarning)
        strategy = DistributedStrategy()
        strategy.update(strategy.to_dict(all_options=True))
        assert all(strategy.is_set(name) for name in schema())
        assert through(strategy, tmp_path) == strategy


@THROUGH
def test_geo_survives_whatever_the_order(
    through: Callable[[DistributedStrategy, Path], DistributedStrategy], tmp_path: Path
) -> None:
    """A0.8: a_sync resets k_steps when it is assigned, not when a file is read."""
    strategy = DistributedStrategy()
    strategy.a_sync_configs = {"k_steps": 5}
    strategy.a_sync = True
    strategy.a_sync_configs = {"k_steps": 100}
    assert through(strategy, tmp_path).a_sync_configs["k_steps"] == 100
    strategy.a_sync_configs = {"k_steps": -1}
    assert through(strategy, tmp_path).a_sync_configs["k_steps"] == -1


def test_a_file_of_fleets_own_names(tmp_path: Path) -> None:
    """A0.11: text as Fleet writes it: enums by name, nested blocks, repeated keys; it merges into what is set."""
    file = tmp_path / "fleet.prototxt"
    file.write_text(
        """# written by hand
        mode: COLLECTIVE
        amp: true
        amp_configs {
          init_loss_scaling: 1024
          custom_white_list: "Linear"
          custom_white_list: 'Conv2d'
        }
        amp_configs { incr_ratio: 4.0f }
        recompute_configs { checkpoints: ["layer1", "layer2"] }
        hybrid_configs { dp_degree: 2 mp_configs { sync_mode: "average" } }
        build_strategy { fuse_all_optimizer_ops: true }
        _calc_comm_same_stream: 0
        """
    )
    strategy = DistributedStrategy()
    strategy.amp_configs = {"decr_ratio": 0.5, "custom_white_list": ["Old"]}
    strategy.lars = True
    with pytest.warns(OptionWarning) as caught:
        strategy.load_from_prototxt(file)
    assert {warning.filename for warning in caught} == {__file__}
    assert strategy.amp is strategy.lars is True
    assert strategy.amp_configs["init_loss_scaling"] == 1024.0
    assert strategy.amp_configs["incr_ratio"] == 4.0
    assert strategy.amp_configs["decr_ratio"] == 0.5
    assert strategy.amp_configs["custom_white_list"] == ["Linear", "Conv2d"]  # A0.7: replaced, not appended
    assert strategy.recompute_configs["checkpoints"] == ["layer1", "layer2"]
    assert strategy.hybrid_configs["mp_configs"]["sync_mode"] == "average"
    assert strategy.build_strategy.fuse_all_optimizer_ops is True


@pytest.mark.parametrize(
    ("text", "line", "rule"),
    [
        ("amp: true\nlarss: true", 2, r"no option 'larss'. Did you mean 'lars'"),
        ("use_local_sgd: true", 1, "write localsgd"),
        ("\namp: 2", 2, "takes True or False, got 2"),
        ("amp: yes", 1, "amp is 'yes'; it takes true or false"),
        ("amp: true\namp: true", 2, "amp appears twice"),
        ("amp_configs {\n  incr_ration: 2\n}", 2, "no key 'incr_ration'. Did you mean 'incr_ratio'"),
        ("amp_configs {\n  incr_ratio: 0.5\n}", 1, "greater than 1"),
        ("amp_configs {\n\n  incr_ratio: big\n}", 3, "incr_ratio is 'big'; it takes a number"),
        ("amp_configs: 3", 1, "takes a block"),
        ("amp { }", 1, "takes one value, not a block"),
        ("amp: [true]", 1, "takes one value, not a list"),
        ("mode: NOPE", 1, "COLLECTIVE, PS, PIPELINE, HETER"),
        ("fuse_grad_size_in_MB: 1.5", 1, "takes an integer"),
        ("recompute_configs { checkpoints: layer1 }", 1, "it takes a quoted string"),
        ("sparse_table_configs { a: 1 }", 1, "takes blocks { key"),
        ("last_comm_group_size_MB: inf", 1, "finite"),
        ("amp_configs {", 1, "not closed"),
    ],
)
def test_prototxt_errors_name_the_line(tmp_path: Path, text: str, line: int, rule: str) -> None:
    """A wrong file says where, and changes nothing."""
    file = tmp_path / "bad.prototxt"
    file.write_text(text)
    strategy = DistributedStrategy()
    strategy.dgc = True
    with pytest.raises(ConfigError, match=rf"bad.prototxt, line {line}: .*{rule}"):
        strategy.load_from_prototxt(file)
    assert strategy.to_dict() == {"dgc": True}


@pytest.mark.parametrize(
    ("text", "place", "rule"),
    [
        ("amp: true\nlarss: true", ", line 2", "Did you mean 'lars'"),
        ("exec_strategy: {}", ", line 1", "write execution_strategy"),
        ("amp: 1", ", line 1", "takes True or False"),
        ("amp: true\n\namp: false", ", line 3", "'amp' appears twice"),
        ("amp_configs: {incr_ratio: 2, incr_ratio: 3}", ", line 1", "'incr_ratio' appears twice"),
        ("- amp", ", line 1", "a mapping of option to value"),
        ("amp: [true", ", line 1", "not YAML"),
        ("amp: !!python/object/apply:os.getcwd []", ", line 1", "not YAML"),
        ("amp_configs: 3", ", line 1", "takes a dictionary"),
        ("1: 2", ", line 1", "no option '1'"),
    ],
)
def test_yaml_errors_name_the_line(tmp_path: Path, text: str, place: str, rule: str) -> None:
    """A wrong file says where; no object of the file's choice is made."""
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"bad.yaml{place}: .*{rule}"):
        DistributedStrategy.load(file)


def test_yaml_numbers_and_order(tmp_path: Path) -> None:
    """1e-3 is a number, a_sync may stand after its settings, and an empty file is an empty strategy."""
    file = tmp_path / "s.yaml"
    file.write_text("lars_configs: {lars_coeff: 1e-3, epsilon: 1E-9}\na_sync_configs: {k_steps: 7}\na_sync: true\n")
    strategy = DistributedStrategy.load(file)
    assert strategy.lars_configs["lars_coeff"] == 0.001
    assert strategy.a_sync_configs["k_steps"] == 7
    file.write_text("# nothing\n")
    assert DistributedStrategy.load(str(file)) == DistributedStrategy()


def test_unknown_names_keep_their_class(tmp_path: Path) -> None:
    """The line is added without changing what can be caught."""
    file = tmp_path / "s.yaml"
    file.write_text("amp_configs: {nope: 1}")
    with pytest.raises(UnknownOptionError):
        DistributedStrategy.load(file)


def test_missing_and_binary_files(tmp_path: Path) -> None:
    """A file that cannot be read is named."""
    with pytest.raises(ConfigError, match=r"absent.yaml cannot be read: No such file"):
        DistributedStrategy.load(tmp_path / "absent.yaml")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        DistributedStrategy().load_from_prototxt(tmp_path / "binary")


def test_files_are_short(tmp_path: Path) -> None:
    """Only what differs from a new strategy is written."""
    strategy = DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": 2}
    strategy.save(tmp_path / "s.yaml")
    assert (tmp_path / "s.yaml").read_text() == "hybrid_configs: {dp_degree: 2}\n"
    strategy.save_to_prototxt(tmp_path / "s.prototxt")
    assert (tmp_path / "s.prototxt").read_text() == "hybrid_configs {\n  dp_degree: 2\n}\n"


def test_writing_replaces_the_file_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that fails leaves the old file and no other; the mode of the file stays."""
    file = tmp_path / "s.yaml"
    strategy = DistributedStrategy()
    strategy.amp = True
    strategy.save(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o666 & ~current_umask()
    file.chmod(0o640)
    strategy.save(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    before = file.read_bytes()

    def fail(*args: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(os, "replace", fail)
    strategy.lars = True
    with pytest.raises(OSError, match="no space"):
        strategy.save(file)
    assert file.read_bytes() == before
    assert os.listdir(tmp_path) == ["s.yaml"]


def current_umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
