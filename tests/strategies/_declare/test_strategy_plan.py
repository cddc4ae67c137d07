"""The plan: problems first, then the order; notes on what changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pytest

from fleet.errors import ConfigError, UnsupportedOptionError
from fleet.options import DistributedStrategy
from fleet.options.explain import explanation
from fleet.strategies import GROUPS, REGISTRY, Stage, Strategy, plan
from fleet.strategies._declare.fields import Config, setting
from fleet.strategies._declare.strategy import Values, top_level
from fleet.strategies._declare.strategy_plan import problems


@pytest.fixture
def extra() -> Iterator[type[Strategy]]:
    """A strategy of another distribution, as an entry point would add it."""

    @dataclass(frozen=True, kw_only=True)
    class ExtraConfig(Config, option="extra_configs"):
        level: int = setting(1, "a level", at_least=1)
        old: bool = setting(False, "an old key", refused="nothing reads it any more")

    @top_level
    @dataclass(frozen=True, kw_only=True)
    class ExtraSettings(Config, owner="extra"):
        extra_size: int = setting(1, "a size", at_least=1)

    class Extra(Strategy):
        name = "extra"
        meaning = "An extra option."
        stage = Stage.STEP
        Config = ExtraConfig
        model_effect = "does something extra"

        @classmethod
        def replaces(cls, options: Values) -> Mapping[str, Sequence[str]]:
            return {"data_parallel": ("fuse_grad_size_in_MB",)}

        @classmethod
        def problem(cls, options: Values, world_size: int) -> str | None:
            return "extra needs an even number of workers." if world_size % 2 else None

    yield Extra
    del REGISTRY["extra"]
    GROUPS.remove(ExtraSettings)


def test_a_new_strategy_is_an_option_at_once(extra: type[Strategy]) -> None:
    """One class adds the switch, its dictionary, its settings and its place in the plan."""
    strategy = DistributedStrategy()
    strategy.extra = True
    strategy.extra_configs = {"level": 2}
    strategy.extra_size = 3
    assert [step.name for step in plan(strategy, 2).steps] == ["extra"]
    assert str(plan(strategy, 2)) == "extra"
    with pytest.raises(ConfigError, match="even number"):
        plan(strategy, 3)
    strategy.extra_configs = {"old": True}
    with pytest.raises(UnsupportedOptionError, match=r"extra_configs\['old'\] = True cannot be .*nothing reads it"):
        plan(strategy, 2)
    strategy.extra = False
    assert problems(strategy, 2) == []


def test_settings_of_what_is_off_are_remarked(extra: type[Strategy]) -> None:
    """A setting that the plan does not read is named, with the reason."""
    strategy = DistributedStrategy()
    strategy.extra_configs = {"level": 2}
    strategy.extra_size = 3
    notes = plan(strategy, 2).notes
    assert "extra_configs was set and changes nothing: 'extra' is off." in notes
    assert "extra_size was set and changes nothing: 'extra' is off." in notes


def test_settings_that_a_model_reads_are_not_remarked() -> None:
    """train_batch of a PipelineLayer reads them with one stage, too; distributed_model remarks them for others."""
    strategy = DistributedStrategy()
    strategy.pipeline_configs = {"accumulate_steps": 2}
    assert not any("pipeline_configs" in note for note in plan(strategy, 2).notes)


IDLE: dict[str, dict[str, object]] = {
    "sharding": {
        "accumulate_steps": 2,
        "split_param": True,
        "comm_overlap": True,
        "use_reduce_avg": False,
        "comm_buffer_size_MB": 64,
    },
    "mp": {
        "sync_param": False,
        "sync_grad": True,
        "sync_moment": True,
        "sync_mode": "average",
        "sync_param_name": ["norm"],
        "need_broadcast_data": False,
        "recompute_allgather": True,
    },
    "pp": {
        "delay_scale_loss": True,
        "clear_every_step_cache": True,
        "enable_dynamic_shape": True,
        "sync_param": True,
        "sync_moment": True,
        "sync_mode": "average",
    },
}


@pytest.mark.parametrize("axis", IDLE)
def test_settings_of_an_axis_are_remarked_where_its_degree_is_1(axis: str) -> None:
    """Each key that holds no default is named, by the plan and by explain; with a degree above 1 none is."""
    strategy = DistributedStrategy()
    strategy.hybrid_configs = {f"{axis}_configs": IDLE[axis]}
    expected = {
        f"hybrid_configs['{axis}_configs']['{key}'] was set and changes nothing: {axis}_degree is 1."
        for key in IDLE[axis]
    }
    assert set(plan(strategy, 2).notes) == expected
    assert expected <= {line.removeprefix("- ") for line in explanation(strategy, 2).splitlines()}
    strategy.hybrid_configs = {f"{axis}_degree": 2}
    assert plan(strategy, 2).notes == ()
    assert plan(DistributedStrategy(), 2).notes == ()


def test_sharding_settings_act_by_the_switch_too() -> None:
    """strategy.sharding shares among all workers, and hybrid_configs' keys for it act."""
    strategy = DistributedStrategy()
    strategy.sharding = True
    strategy.hybrid_configs = {"sharding_configs": {"accumulate_steps": 2}}
    assert plan(strategy, 2).notes == ()


def test_settings_of_what_is_replaced_are_remarked(extra: type[Strategy]) -> None:
    """What the stand-in reads is not remarked; the rest is."""
    strategy = DistributedStrategy()
    strategy.extra = True
    strategy.fuse_grad_size_in_MB = 8
    strategy.find_unused_parameters = True
    assert plan(strategy, 2).notes == (
        "find_unused_parameters was set and changes nothing: 'extra' takes the place of data_parallel.",
    )


def test_settings_of_data_parallel_are_quiet_for_one_worker() -> None:
    """One script for one and for many workers: alone it is not told that nothing is exchanged."""
    strategy = DistributedStrategy()
    strategy.fuse_grad_size_in_MB = 8
    assert plan(strategy, 1).notes == ()


def test_repairable_problems_come_first() -> None:
    """A wrong combination is reported before what cannot be honoured at all."""
    strategy = DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": 3}
    strategy.semi_auto = True
    found = problems(strategy, 2)
    assert [type(error) for error in found] == [ConfigError, UnsupportedOptionError]
    with pytest.raises(ConfigError, match="dp_degree=3 is 3, but 2 processes were started"):
        plan(strategy, 2)


def test_problems_of_switches() -> None:
    """A.5: what Paddle turns off without a word is refused with what to do."""
    strategy = DistributedStrategy()
    strategy.recompute = True
    assert any("recompute_configs['checkpoints'] is []" in str(error) for error in problems(strategy, 2))
    strategy = DistributedStrategy()
    strategy.update({"sharding": True, "sharding_configs": {"sharding_degree": 8}})
    assert any("sharding_degree=8" in str(e) and "4 processes were started" in str(e) for e in problems(strategy, 4))
    assert not any(type(error) is ConfigError for error in problems(strategy, 8))
    strategy.hybrid_configs = {"sharding_degree": 4}
    assert any("Set both to the same number" in str(error) for error in problems(strategy, 8))
    strategy = DistributedStrategy()
    strategy.sharding = True
    strategy.sharding_configs = {"sharding_degree": 1, "dp_degree": 4}
    assert any("divides nothing" in str(error) for error in problems(strategy, 4))
    strategy.sharding_configs = {"sharding_degree": 2, "dp_degree": 2}
    strategy.hybrid_configs = {"dp_degree": 4}
    assert any("leave the second at -1" in str(error) for error in problems(strategy, 4))
    strategy.hybrid_configs = {"dp_degree": -1, "sharding_configs": {"accumulate_steps": 2}}
    assert problems(strategy, 4) == []
    strategy.sharding_configs = {"gradient_merge_acc_step": 2}
    assert any("Set one of them" in str(error) for error in problems(strategy, 4))
    strategy.sharding_configs = {"gradient_merge_acc_step": 1, "stage": 3}
    strategy.sharding_configs = {"sharding_segment_strategy": "segment_anchors"}
    assert any("['segment_anchors'] is []" in str(error) for error in problems(strategy, 4))
    other = DistributedStrategy()
    other.hybrid_configs = {"sharding_degree": 2}
    other.sharding_configs = {"sharding_degree": 4}
    assert any("so hybrid_configs decides" in str(error) for error in problems(other, 4))
    strategy = DistributedStrategy()
    strategy.sharding = True
    strategy.sharding_configs = {"sharding_degree": 2, "dp_degree": 1, "pp_degree": 2}
    assert any("while 'pipeline' is off" in str(error) for error in problems(strategy, 4))
    strategy = DistributedStrategy()
    both = {"dp_comm_overlap": True, "sharding_comm_overlap": True}
    strategy.hybrid_configs = {"pp_degree": 2, "pp_configs": both}
    assert any("Set one of them" in str(error) for error in problems(strategy, 4))
    strategy = DistributedStrategy()
    strategy.use_hierarchical_allreduce = True
    strategy.hierarchical_allreduce_inter_nranks = 3
    assert any("does not divide the 4 processes" in str(error) for error in problems(strategy, 4))


@pytest.mark.parametrize(("name", "axis"), [("tensor_parallel", "mp"), ("pipeline", "pp")])
def test_a_switch_without_a_degree_says_that_it_divides_nothing(name: str, axis: str) -> None:
    """It trained as data parallel without a word, and explain told of stages and parts."""
    strategy = DistributedStrategy()
    strategy.update({name: True})
    note = f"{name} changes nothing: hybrid_configs['{axis}_degree'] is 1"
    assert [text.partition(":")[0] for text in plan(strategy, 2).notes] == [f"{name} changes nothing"]
    text = explanation(strategy, 2)
    assert note in text
    assert "keeps this worker's" not in text
    assert f"   model: keeps all {'weights' if axis == 'mp' else 'layers'}: {axis}_degree is 1" in text
    strategy.hybrid_configs = {f"{axis}_degree": 2}
    assert plan(strategy, 2).notes == ()
    assert "keeps this worker's" in explanation(strategy, 2)


def test_a_degree_elsewhere_divides_layers() -> None:
    """tensor_parallel_configs has a degree of its own; a model that is cut gets train_batch() with one stage, too."""
    strategy = DistributedStrategy()
    strategy.tensor_parallel = True
    strategy.tensor_parallel_configs = {"tensor_parallel_degree": 2}
    assert plan(strategy, 2).notes == ()
    strategy = DistributedStrategy()
    strategy.pipeline = True
    strategy.pipeline_configs = {"split": "auto"}
    assert plan(strategy, 2).notes == ()


def test_notes_of_switches() -> None:
    """A.5: a switch that is on and changes nothing says so."""
    strategy = DistributedStrategy()
    strategy.gradient_merge = True
    merge = REGISTRY["gradient_merge"]
    assert "k_steps" in merge.notes(strategy, 2)[0]
    strategy.gradient_merge_configs = {"k_steps": 2}
    assert merge.notes(strategy, 2) == ()
    for name in ("localsgd", "adaptive_localsgd", "sharding"):
        assert "one worker" in REGISTRY[name].notes(strategy, 1)[0]
        assert REGISTRY[name].notes(strategy, 2) == ()
    strategy.fp16_allreduce = True
    assert "no gradient is exchanged" in REGISTRY["localsgd"].notes(strategy, 2)[0]
