"""What arguments and strategies are refused, and what arguments turn on in the strategy."""

from __future__ import annotations

from typing import Any

import pytest

from fleet.errors import ConfigError, UnsupportedOptionError
from fleet.integrations._hf_arguments import check_running, checked_options
from fleet.options import DistributedStrategy


def arguments(folder: Any, **changes: Any) -> Any:
    from transformers import TrainingArguments

    return TrainingArguments(**{"output_dir": str(folder), "use_cpu": True, "report_to": [], **changes})


@pytest.mark.parametrize(
    ("changes", "instead"),
    [
        ({"ddp_bucket_cap_mb": 25}, "fuse_grad_size_in_MB"),
        ({"ddp_static_graph": True}, "find_unused_parameters"),
        ({"ddp_broadcast_buffers": False}, "sync_batch_norm"),
        ({"ddp_timeout": 60}, "PADDLE_PG_TIMEOUT"),
        ({"torch_compile": True}, "to_static"),
        ({"bf16_full_eval": True}, "strategy.amp"),
        ({"optim": "adalomo"}, "updates in step"),
        ({"optim": "galore_adamw_layerwise"}, "updates in step"),
    ],
)
def test_arguments_of_trainers_own_training_are_refused(changes: dict[str, Any], instead: str, tmp_path: Any) -> None:
    with pytest.raises(UnsupportedOptionError, match=instead):
        checked_options(None, arguments(tmp_path, **changes))


@pytest.mark.parametrize("name", ["fsdp", "deepspeed", "parallelism_config"])
def test_other_ways_to_divide_a_model_are_refused(name: str, tmp_path: Any) -> None:
    args = arguments(tmp_path)
    setattr(args, name, {"any": "config"})
    with pytest.raises(UnsupportedOptionError, match="strategy"):
        checked_options(None, args)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"a_sync": True}, "parameter servers"),
        ({"hybrid_configs": {"pp_degree": 2}}, "forward and backward together"),
        ({"pipeline": True}, "forward and backward together"),
        ({"hybrid_configs": {"cp_degree": 2}}, "divides rows alone"),
        ({"gradient_merge": True, "gradient_merge_configs": {"k_steps": 4}}, "gradient_accumulation_steps=4"),
        ({"sharding": True, "sharding_configs": {"gradient_merge_acc_step": 2}}, "gradient_accumulation_steps=2"),
        ({"qat": True}, "from_pretrained"),
        ({"reproducible": True}, "each logical worker whole batches"),
    ],
)
def test_options_that_the_loop_cannot_follow_are_refused(options: dict[str, Any], reason: str, tmp_path: Any) -> None:
    with pytest.raises(UnsupportedOptionError, match=reason):
        checked_options(options, arguments(tmp_path))


def test_16_bits_become_amp(tmp_path: Any) -> None:
    args = arguments(tmp_path, bf16=True)
    assert checked_options(None, args).amp_configs["dtype"] == "bfloat16"
    assert checked_options({"amp": True, "amp_configs": {"use_pure_bf16": True}}, args)["amp_configs"].use_pure_bf16
    assert not checked_options(None, arguments(tmp_path))["amp"]
    for said in ({"amp": False}, {"amp": True, "amp_configs": {"dtype": "float16"}}):
        with pytest.raises(ConfigError, match="contradict"):
            checked_options(said, args)


def test_unused_parameters_follow_trainer_where_nothing_is_said(tmp_path: Any) -> None:
    plain, recomputing = arguments(tmp_path), arguments(tmp_path)
    recomputing.gradient_checkpointing = True  # as an argument it warns in newer releases, which have another name
    assert checked_options(None, plain)["find_unused_parameters"]
    assert not checked_options(None, recomputing)["find_unused_parameters"]
    assert not checked_options({"find_unused_parameters": False}, plain)["find_unused_parameters"]
    assert not checked_options({"sharding": True, "sharding_configs": {"stage": 2}}, plain)["find_unused_parameters"]
    with pytest.raises(ConfigError, match="contradict"):
        checked_options({"find_unused_parameters": False}, arguments(tmp_path, ddp_find_unused_parameters=True))


def test_the_strategy_of_the_user_stays_as_it_is(tmp_path: Any) -> None:
    strategy = DistributedStrategy()
    checked_options(strategy, arguments(tmp_path, bf16=True))
    assert not strategy.amp
    with pytest.raises(ConfigError, match="takes a fleet.DistributedStrategy"):
        checked_options("strategy.yaml", arguments(tmp_path))


def test_a_running_job_is_not_changed_by_arguments(tmp_path: Any) -> None:
    check_running(DistributedStrategy(), arguments(tmp_path))
    with pytest.raises(ConfigError, match=r"strategy.amp = True, and fleet.init\(\) has run"):
        check_running(DistributedStrategy(), arguments(tmp_path, bf16=True))
