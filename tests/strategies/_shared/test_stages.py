"""What is on another stage of the pipeline is not missing."""

from __future__ import annotations

import pytest
from torch import nn

from fleet.errors import ConfigError
from fleet.job.running import running_session
from fleet.strategies._shared.module_names import check_patterns
from fleet.strategies._shared.stages import on_some_stage
from fleet.strategies.amp.amp import AmpConfig
from fleet.strategies.amp.policy import check_stages
from tests.helpers.workers import run_workers
from tests.strategies._shared.norm_jobs import init


def patterns(rank: int, world_size: int) -> list[bool]:
    """Returns what two stages know together; checks patterns of modules that one of them has."""
    init(hybrid_configs={"pp_degree": 2})
    session = running_session()
    assert session is not None
    stage = nn.ModuleDict({f"block{rank}": nn.Linear(1, 1)})
    check_patterns(stage, ("block0", "block1"), "checkpoints", session.job)
    with pytest.raises(ConfigError, match="'block2', which names no module"):
        check_patterns(stage, ("block*", "block2"), "checkpoints", session.job)
    check_stages(
        stage, AmpConfig(custom_black_list=["block0", "Linear"], custom_black_varnames=["block1.bias"]), session.job
    )
    with pytest.raises(ConfigError, match="'block2', which is on no stage"):
        check_stages(stage, AmpConfig(custom_white_list=["block2"]), session.job)
    return on_some_stage([rank == 0, rank == 1, False], session.job.axes)


def test_patterns_of_other_stages() -> None:
    """10: recompute_configs['checkpoints'] names modules of the whole model; a typing error is found on all stages."""
    assert run_workers(patterns, 2) == [[True, True, False]] * 2
