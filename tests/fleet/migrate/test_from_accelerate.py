"""Scripts of Accelerate: what is moved, and what is named."""

from __future__ import annotations

import pytest

from fleet.migrate.from_accelerate import ATTRIBUTES
from tests.fleet.migrate.cases import accelerate, hand


def without_batches(text: str) -> str:
    """Returns findings apart from the one on batches."""
    return "\n".join(line for line in text.splitlines() if "moved its batches" not in line)


def test_a_plain_script_is_moved_whole() -> None:
    made = accelerate()
    assert made.by_hand == []
    assert "accelerate" not in made.text.lower().replace("accelerator", "")
    assert "\nfleet.init(is_collective=True)\n" in made.text  # nothing uses the object itself
    assert "optimizer = fleet.distributed_optimizer(optimizer)\nmodel = fleet.distributed_model(model)\n" in made.text
    assert "        loss.backward()\n" in made.text
    assert "loader.sampler.set_epoch(epoch)" in made.text
    assert "x, y = (t.to(" in made.text  # prepare() moved the batches


def test_attributes_are_moved() -> None:
    made = accelerate(after="\n".join(f"print(accelerator.{name})" for name in ATTRIBUTES))
    assert made.by_hand == []
    assert [new for new in ATTRIBUTES.values() if f"print({new})" not in made.text] == []


@pytest.mark.parametrize(
    ("line", "moved"),
    [
        ("accelerator.print('x', 1)", "print('x', 1)"),
        ("accelerator.wait_for_everyone()", "fleet.barrier_worker()"),
        ("s = accelerator.unwrap_model(model).state_dict()", "s = model.module.state_dict()"),
        ("s = accelerator.get_state_dict(model)", "s = model.full_state_dict()"),
        ("accelerator.save(s, 'x')", "if fleet.is_first_worker():\n    torch.save(s, 'x')"),
        (
            "v = accelerator.gather(loss).mean()",
            "torch.tensor(fleet.all_reduce(loss.mean().item()) / fleet.worker_num())",
        ),
        ("with accelerator.no_sync(model):\n    pass", "with model.no_sync():\n    pass"),
        ("for x, y in test:\n    r = accelerator.gather_for_metrics((x, y))", "    r = (x, y)"),
        ("k = accelerator.distributed_type == DistributedType.XLA", "k = False"),
        ("k = accelerator.mixed_precision != 'no'", "k = fleet.session.options.amp"),
    ],
)
def test_calls_are_moved(line: str, moved: str) -> None:
    made = accelerate(after=line)
    assert without_batches(hand(made)) == ""
    assert moved in made.text


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("accelerator.save_state('x')", "fleet.checkpoint.save"),
        ("accelerator.log({'a': 1})", "Write the values"),
        ("all = accelerator.gather_for_metrics(found)", "fleet.all_reduce"),
        ("with accelerator.autocast():\n    pass", "strategy.amp"),
        ("with accelerator.main_process_first():\n    pass", "barrier_worker"),
        ("accelerator.something_new()", "recipes"),
        ("print(accelerator.something_new)", "recipes"),
        ("with accelerator.split_between_processes(x) as y:\n    pass", "items["),
    ],
)
def test_what_has_no_rule_is_named(line: str, advice: str) -> None:
    made = accelerate(after=line)
    assert len(made.by_hand) == 1, hand(made)
    assert advice in hand(made)


@pytest.mark.parametrize(
    ("argument", "lines"),
    [
        ("mixed_precision='bf16'", ['strategy.amp_configs = {"dtype": "bfloat16"}', "strategy.amp = True"]),
        ("mixed_precision=kind", ['strategy.amp = kind in ("fp16", "bf16")']),
        ("mixed_precision='no', cpu=True", []),
        ("gradient_accumulation_steps=4", ['strategy.gradient_merge_configs = {"k_steps": 4}']),
    ],
)
def test_arguments_become_a_strategy(argument: str, lines: list[str]) -> None:
    made = accelerate(argument)
    assert made.by_hand == []
    assert all(f"{line}\n" in made.text for line in lines)
    assert ("strategy=strategy" in made.text) == bool(lines)


@pytest.mark.parametrize(
    ("argument", "advice"),
    [
        ("kwargs_handlers=[k]", "find_unused_parameters"),
        ("split_batches=True", "Divide it"),
        ("mixed_precision='fp8'", "bfloat16"),
    ],
)
def test_arguments_without_a_rule_are_named(argument: str, advice: str) -> None:
    made = accelerate(argument)
    assert len(made.by_hand) == 1
    assert advice in hand(made)


def test_accumulate_is_moved_and_what_differs_is_named() -> None:
    after = "with accelerator.accumulate(model):\n    pass"
    made = accelerate("gradient_accumulation_steps=2", "accelerator.clip_grad_norm_(model.parameters(), 1.0)", after)
    assert "with contextlib.nullcontext():" in made.text
    assert "import contextlib\n" in made.text
    assert "last batch of a loader" in hand(made)
    assert "it would clip each batch" in hand(made)


def test_imports_that_need_an_accelerator_are_named() -> None:
    made = accelerate(after="from accelerate.logging import get_logger\nfrom accelerate.utils import set_seed")
    assert "logging.getLogger" in hand(made)
    assert len(made.by_hand) == 1


def test_a_scheduler_that_is_called_as_its_module_is_known() -> None:
    after = "lr_scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)\n"
    made = accelerate(after=after + "lr_scheduler = accelerator.prepare(lr_scheduler)")
    assert "once for each process" in hand(made)
    assert "was not found" not in hand(made)
