"""How DistributedStrategy behaves as an object (A0.1 to A0.18, 002-16, 003-10 to 003-15)."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest

from fleet.errors import ConfigError, OptionWarning, UnknownOptionError
from fleet.options import ALIASES, RENAMED, BuildStrategy, DistributedStrategy, ExecutionStrategy, schema
from fleet.strategies.a_sync import ps_mode


def test_constructor_takes_no_arguments() -> None:
    """A0.1."""
    with pytest.raises(TypeError):
        DistributedStrategy(True)  # type: ignore[call-arg]
    assert DistributedStrategy() == DistributedStrategy()


@pytest.mark.parametrize("name", ["gradient_merg", "nonsense", "amp_config", "_values"])
def test_unknown_names_raise(name: str) -> None:
    """A0.2: an attribute that does not exist raises TypeError with its name; the nearest name is shown."""
    strategy = DistributedStrategy()
    with pytest.raises(TypeError, match=f"no option '{name}'"):
        setattr(strategy, name, True)
    assert not hasattr(strategy, "nonsense")
    with pytest.raises(AttributeError, match="Did you mean 'gradient_merge'"):
        _ = strategy.gradient_merg


@pytest.mark.parametrize("name", sorted(ALIASES))
def test_proto_only_names_are_real_options(name: str) -> None:
    """A0.3: what Paddle lets land as a plain attribute can be set, is checked, and is read under both names."""
    strategy = DistributedStrategy()
    value: Any = 2.5 if "TFLOPS" in name else True
    if schema()[ALIASES[name]].rule.no_meaning:
        with pytest.warns(OptionWarning):
            setattr(strategy, name, value)
    else:
        setattr(strategy, name, value)
    assert getattr(strategy, name) == getattr(strategy, ALIASES[name]) == value
    with pytest.raises(ConfigError):
        setattr(strategy, name, "x")


@pytest.mark.parametrize("name", ["amp", "a_sync", "adam_d2sum", "fp16_allreduce", "sync_nccl_allreduce"])
def test_wrong_type_raises_and_keeps_the_value(name: str) -> None:
    """A0.4: amp = 1 raises; Paddle warns and stays off."""
    strategy = DistributedStrategy()
    before = getattr(strategy, name)
    with pytest.raises(TypeError, match=rf"DistributedStrategy.{name} takes True or False, got 1\."):
        setattr(strategy, name, 1)
    assert getattr(strategy, name) is before
    assert not strategy.is_set(name)


def test_partial_dictionary_merges() -> None:
    """A0.5: known keys merge, an unknown key is AssertionError and ValueError and changes nothing."""
    strategy = DistributedStrategy()
    strategy.amp_configs = {"init_loss_scaling": 1024}
    strategy.amp_configs = {"incr_ratio": 4.0}
    assert strategy.amp_configs["init_loss_scaling"] == 1024.0
    assert strategy.amp_configs["incr_ratio"] == 4.0
    for kind in (AssertionError, ValueError):
        with pytest.raises(kind, match=r"amp_configs has no key 'incr_ration'. Did you mean 'incr_ratio'\?"):
            strategy.amp_configs = {"decr_ratio": 0.5, "incr_ration": 2.0}
    assert strategy.amp_configs["decr_ratio"] == 0.8


def test_what_is_read_can_be_written() -> None:
    """A0.6, replaced: what is written into a returned dictionary or list is kept and checked, at any depth."""
    strategy = DistributedStrategy()
    strategy.hybrid_configs["mp_configs"]["sync_param"] = False
    strategy.amp_configs["custom_white_list"].append("x")
    strategy.sparse_table_configs["x"] = 1
    strategy.hybrid_parallel_order.reverse()
    other = DistributedStrategy()
    other.hybrid_configs = {"mp_configs": {"sync_param": False}}
    other.amp_configs = {"custom_white_list": ["x"]}
    other.sparse_table_configs = {"x": 1}
    other.hybrid_parallel_order = ["mp", "cp", "sep", "sharding", "pp", "dp"]
    assert strategy == other
    assert strategy.to_dict() == other.to_dict()
    with pytest.raises(ConfigError, match="names each of"):
        strategy.hybrid_parallel_order.append("x")
    assert strategy == other


def test_keys_of_hybrid_configs_read_back_as_the_options_that_say_the_same() -> None:
    """Paddle's test_hybrid_parallel_configs_order and _mp_configs; a view shows it, and the default comes back."""
    strategy = DistributedStrategy()
    view, default = strategy.hybrid_parallel_order, list(strategy.hybrid_parallel_order)
    order = ["sharding", "mp", "dp", "pp"]
    strategy.hybrid_configs = {"order": order, "mp_configs": {"sync_param_name": ["embedding", ".w"]}}
    assert view == strategy.hybrid_parallel_order == copy.deepcopy(strategy).hybrid_parallel_order == order
    assert strategy.sync_param_name == ["embedding", ".w"]
    assert not strategy.is_set("hybrid_parallel_order")
    strategy.hybrid_configs["order"] = []
    strategy.hybrid_configs.mp_configs.sync_param_name = []
    assert view == strategy.hybrid_parallel_order == default
    assert strategy.sync_param_name == DistributedStrategy().sync_param_name


def test_lists_replace() -> None:
    """A0.7: Paddle appends; here the second list stands alone."""
    strategy = DistributedStrategy()
    strategy.recompute_configs = {"checkpoints": ["a"]}
    strategy.recompute_configs = {"checkpoints": ["b"]}
    assert strategy.recompute_configs["checkpoints"] == ["b"]


def test_a_sync_resets_k_steps() -> None:
    """A0.8: the order of a_sync and a_sync_configs matters, as in Fleet."""
    strategy = DistributedStrategy()
    assert strategy.a_sync_configs["k_steps"] == -1
    strategy.a_sync = True
    assert strategy.a_sync_configs["k_steps"] == 0
    strategy.a_sync_configs = {"k_steps": 100, "send_queue_size": 4}
    strategy.a_sync = True
    assert strategy.a_sync_configs["k_steps"] == 0
    assert strategy.a_sync_configs["send_queue_size"] == 4
    with pytest.raises(ConfigError):
        strategy.a_sync = "yes"
    strategy.a_sync_configs = {"k_steps": 100}
    with pytest.raises(ConfigError):
        strategy.a_sync = 1
    assert strategy.a_sync_configs["k_steps"] == 100


def test_parameter_server_modes() -> None:
    """002-16: False is sync, True is async, True with k_steps is geo; A0.9: untouched is async."""
    strategy = DistributedStrategy()
    assert ps_mode(strategy) == "async"
    strategy.a_sync = False
    assert ps_mode(strategy) == "sync"
    strategy.a_sync = True
    assert ps_mode(strategy) == "async"
    strategy.a_sync_configs = {"k_steps": 100}
    assert ps_mode(strategy) == "geo"
    strategy.a_sync = False
    strategy.a_sync_configs = {"k_steps": 100}
    with pytest.raises(ConfigError, match="geo training is asynchronous"):
        ps_mode(strategy)


def test_repr_shows_what_is_on_and_its_keys() -> None:
    """A0.12."""
    strategy = DistributedStrategy()
    assert repr(strategy) == "DistributedStrategy: every option holds its default."
    strategy.gradient_merge = True
    strategy.gradient_merge_configs = {"k_steps": 4}
    strategy.fuse_grad_size_in_MB = 16
    lines = [line.split() for line in repr(strategy).splitlines()[1:]]
    assert ["gradient_merge", "True"] in lines
    assert ["k_steps", "4"] in lines
    assert ["avg", "True"] in lines
    assert ["fuse_grad_size_in_MB", "16"] in lines
    assert not any(line[0] == "amp" for line in lines)


def test_copies_are_independent() -> None:
    """A0.13, A0.18: later edits of one do not reach the other; deepcopy, copy and pickle all work."""
    strategy = DistributedStrategy()
    strategy.amp = True
    strategy.sparse_table_configs = {"emb": {"k": [1]}}
    strategy.build_strategy.fuse_all_optimizer_ops = True
    for twin in (copy.deepcopy(strategy), copy.copy(strategy), pickle.loads(pickle.dumps(strategy))):
        assert twin == strategy
        assert twin.is_set("amp")
        assert not twin.is_set("lars")
        twin.amp = False
        twin.sparse_table_configs = {"emb": {"k": [2]}}
        twin.build_strategy.fuse_all_optimizer_ops = False
        assert strategy.amp is True
        assert strategy.sparse_table_configs == {"emb": {"k": [1]}}
        assert strategy.build_strategy.fuse_all_optimizer_ops is True


def test_a_pickle_without_a_new_option_gets_its_default() -> None:
    """A0.18: an object stored before an option existed still opens."""
    values, assigned = DistributedStrategy().__getstate__()
    del values["amp"]
    strategy = DistributedStrategy()
    strategy.__setstate__((values, assigned))
    assert strategy.amp is False


@pytest.mark.parametrize(
    ("flag", "option"),
    [("FLAGS_sync_nccl_allreduce", "sync_nccl_allreduce"), ("FLAGS_cudnn_exhaustive_search", "cudnn_exhaustive_search"),
     ("FLAGS_conv_workspace_size_limit", "conv_workspace_size_limit"),
     ("FLAGS_fuse_parameter_memory_size", "fuse_grad_size_in_MB"),
     ("FLAGS_fuse_parameter_groups_size", "fuse_grad_size_in_TFLOPS"),
     ("FLAGS_cudnn_batchnorm_spatial_persistent", "cudnn_batchnorm_spatial_persistent")],
)  # fmt: skip
def test_environment_flags_have_no_effect(monkeypatch: pytest.MonkeyPatch, flag: str, option: str) -> None:
    """A0.14, 003-11: the constructor reads no environment."""
    default = schema()[option].default
    monkeypatch.setenv(flag, "0" if default else "1")
    assert getattr(DistributedStrategy(), option) == default


@pytest.mark.parametrize(
    ("old", "new"),
    [("exec_strategy", "execution_strategy"), ("forward_recompute", "recompute"),
     ("recompute_checkpoints", "recompute_configs"), ("use_local_sgd", "localsgd"),
     ("sync_mode", "a_sync = False"), ("async_mode", "a_sync = True"), ("half_async_mode", ".*half_async_strategy"),
     ("geo_sgd_mode", "a_sync = True and a_sync_configs"), ("collective_mode", "localsgd = True for 'local_sgd'")],
)  # fmt: skip
def test_old_names_raise_with_the_new_one(old: str, new: str) -> None:
    """A0.15, 003-12 to 003-15."""
    assert old in RENAMED
    with pytest.raises(TypeError, match=f"{old} is the old name; write {new}"):
        setattr(DistributedStrategy(), old, True)
    with pytest.raises(AttributeError, match=new):
        getattr(DistributedStrategy(), old)


def test_execution_strategy_object() -> None:
    """A0.16, 003-12: execution_strategy exists, takes its object, and warns at each key."""
    execution = ExecutionStrategy()
    with pytest.warns(OptionWarning, match=r"execution_strategy\['num_threads'\].*no graph executor"):
        execution.num_threads = 2
    strategy = DistributedStrategy()
    strategy.execution_strategy = execution
    assert strategy.execution_strategy.num_threads == 2
    assert strategy.execution_strategy.num_iteration_per_drop_scope == 10


def test_build_strategy_object() -> None:
    """A.4: set from an object, from a dictionary, or through the attribute; read back as an object."""
    build = BuildStrategy()
    with pytest.warns(OptionWarning, match="to_static"):
        build.fuse_elewise_add_act_ops = True
    with pytest.warns(OptionWarning, match="turn sharding on"):
        build.reduce_strategy = BuildStrategy.ReduceStrategy.Reduce
    strategy = DistributedStrategy()
    strategy.build_strategy = build  # warned of already
    assert isinstance(strategy.build_strategy, BuildStrategy)
    assert strategy.build_strategy == build
    assert strategy.build_strategy.fuse_elewise_add_act_ops is True
    assert strategy.build_strategy.reduce_strategy == 1
    assert repr(build) == "BuildStrategy(fuse_elewise_add_act_ops=True, reduce_strategy=1)"
    strategy.build_strategy.fuse_all_optimizer_ops = True  # reaches the strategy, not a copy
    assert strategy.build_strategy.fuse_all_optimizer_ops is True
    assert build.fuse_all_optimizer_ops is False
    with pytest.raises(UnknownOptionError, match="Did you mean 'enable_addto'"):
        build.enable_adto = True
    with pytest.raises(ConfigError, match="takes True or False"):
        build.enable_addto = 1
    with pytest.raises(ConfigError, match="build_strategy takes"):
        strategy.build_strategy = ExecutionStrategy()
    assert pickle.loads(pickle.dumps(build)) == copy.deepcopy(build) == build


def test_legacy_objects_are_refused() -> None:
    """003-10: an object of another strategy class is no strategy value."""

    class FluidStrategy:
        """A class of the 1.x generation."""

    with pytest.raises(TypeError):
        DistributedStrategy().build_strategy = FluidStrategy()
    assert DistributedStrategy() != FluidStrategy()


def test_every_assignment_warns_once_at_the_users_line() -> None:
    """One warning per assignment, whichever way it is made, and it points here."""
    strategy = DistributedStrategy()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        strategy.sync_nccl_allreduce = True
        strategy.build_strategy.enable_inplace = True
        strategy.build_strategy = {"enable_addto": True}
        strategy.update({"nccl_comm_num": 2})
        strategy.recompute_configs = {"enable_tuning": True, "checkpoint_shape": [1]}
        BuildStrategy().fuse_bn_act_ops = True
        copy.deepcopy(strategy)
        _ = strategy.build_strategy
    assert [warning.filename for warning in caught] == [__file__] * 6
    assert len({warning.lineno for warning in caught}) == 6


def test_update_is_all_or_nothing() -> None:
    """Bad input raises before anything is changed; the order of a dictionary does not matter."""
    strategy = DistributedStrategy()
    with pytest.raises(ConfigError, match="lars takes True or False"):
        strategy.update({"amp": True, "lars": 1})
    assert strategy == DistributedStrategy()
    assert not strategy.is_set("amp")
    strategy.update({"a_sync_configs": {"k_steps": 100}, "a_sync": True})
    assert ps_mode(strategy) == "geo"


def test_dictionaries_for_other_tools() -> None:
    """to_dict holds plain data of the assigned options, or of all."""
    strategy = DistributedStrategy()
    strategy.amp = True
    strategy.dgc_configs = {"sparsity": [0.9]}
    assert strategy.to_dict() == {
        "amp": True, "dgc_configs": {"rampup_begin_step": 0, "rampup_step": 1, "sparsity": [0.9]},
    }  # fmt: skip
    assert set(strategy.to_dict(all_options=True)) == set(strategy) == set(schema())
    assert "amp_configs" in dir(strategy)
