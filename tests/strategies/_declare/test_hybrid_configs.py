"""The nested dictionaries of hybrid_configs: merging, modes, and labels that a user can follow (A.2)."""

from __future__ import annotations

import pytest

from fleet.errors import ConfigError, UnknownOptionError, UnsupportedOptionError
from fleet.options import DistributedStrategy
from fleet.strategies._declare.strategy_plan import problems
from fleet.strategies.hybrid import HybridMpConfig, HybridPpConfig, HybridShardingConfig, NcclConfig


def test_nested_dictionaries_merge_at_every_depth() -> None:
    """A0.5: a nested partial dictionary keeps the other keys."""
    strategy = DistributedStrategy()
    strategy.hybrid_configs = {"mp_configs": {"sync_grad": True}, "sharding_configs": {"split_param": True}}
    strategy.hybrid_configs = {"mp_configs": {"sync_mode": "average"}}
    stored = strategy["hybrid_configs"]
    assert stored.mp_configs == HybridMpConfig(sync_grad=True, sync_mode="average")
    assert stored.sharding_configs == HybridShardingConfig(split_param=True)
    assert stored.pp_configs == HybridPpConfig()


def test_sync_mode_is_one_of_two() -> None:
    """A.2: Paddle averages for any other word; here a misspelt word is refused."""
    with pytest.raises(ConfigError, match=r"hybrid_configs\['mp_configs'\]\['sync_mode'\] is 'brodcast'; it takes one"):
        DistributedStrategy().hybrid_configs = {"mp_configs": {"sync_mode": "brodcast"}}


@pytest.mark.parametrize("axis", ["mp_configs", "pp_configs", "sharding_configs"])
def test_unknown_nested_keys_are_refused_by_their_whole_name(axis: str) -> None:
    """A0.5: the message names the inner dictionary."""
    with pytest.raises(UnknownOptionError, match=rf"hybrid_configs\['{axis}'\] has no key 'nope'"):
        DistributedStrategy().hybrid_configs = {axis: {"nope": 1}}


def test_communicator_settings_are_kept() -> None:
    """A.2: NCCL settings mean nothing here, are warned of once, and can be read back."""
    strategy = DistributedStrategy()
    with pytest.warns(UserWarning, match="NCCL_ALGO") as caught:
        strategy.hybrid_configs = {"ep_configs": {"grad_nccl_config": {"algoStr": "Ring", "nchannels": 2}}}
    assert len(caught) == 1
    assert strategy["hybrid_configs"].ep_configs.grad_nccl_config == NcclConfig(algoStr="Ring", nchannels=2)
    with pytest.raises(ConfigError, match="at least -1"):
        strategy.hybrid_configs = {"dp_configs": {"nccl_config": {"nchannels": -2}}}


def test_schedules_that_are_not_offered_are_refused() -> None:
    """A.2 pp_configs: 0r keys are refused with the reason even while the pipeline is off."""
    strategy = DistributedStrategy()
    strategy.hybrid_configs = {"pp_configs": {"use_dualpipev": True}}
    found = problems(strategy, 2)
    assert [type(error) for error in found] == [UnsupportedOptionError]
    assert "two ends of the model" in str(found[0])
