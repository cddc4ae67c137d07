"""FleetTrainer on two workers against transformers' Trainer in one process: scripts, strategies, files, resumption."""

from __future__ import annotations

import traceback
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.hf_scripts import SCRIPTS, Setting, accuracy, bert, finished, llama, run_scripts, sentences, texts
from tests.helpers.workers import run_workers

pytestmark = pytest.mark.slow

OFFLINE: dict[str, str | None] = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
ALONE = {name: None for name in ("PADDLE_TRAINER_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}
NAMES = [script.__name__ for script in SCRIPTS]
TOLERANCE = 2e-6


def stage(number: int) -> dict[str, Any]:
    return {"sharding": True, "sharding_configs": {"stage": number}}


MP2 = {"hybrid_configs": {"mp_degree": 2}, "tensor_parallel_configs": {"plan": "auto"}}


def difference(first: Any, second: Any, place: str = "") -> list[str]:
    """Returns where two results differ by more than rounding."""
    if isinstance(first, dict):
        if first.keys() != second.keys():
            return [f"{place}: {sorted(first.keys() ^ second.keys())} in one of them"]
        return [text for key in first for text in difference(first[key], second[key], f"{place}/{key}")]
    if isinstance(first, list):
        if len(first) != len(second):
            return [f"{place}: {len(first)} and {len(second)} entries"]
        pairs = enumerate(zip(first, second, strict=True))
        return [text for index, (a, b) in pairs for text in difference(a, b, f"{place}/{index}")]
    if isinstance(first, str | int):
        return [] if first == second else [f"{place}: {first!r} and {second!r}"]
    a, b = (torch.as_tensor(value).double() for value in (first, second))
    if a.shape != b.shape:
        return [f"{place}: shapes {tuple(a.shape)} and {tuple(b.shape)}"]
    largest = float((a - b).abs().max()) if a.numel() else 0.0
    return [] if largest <= TOLERANCE * max(1.0, float(b.abs().max())) else [f"{place}: differs by {largest:.1e}"]


def run_all(rank: int, world_size: int, uses_fleet: bool, folder: str) -> dict[str, Any]:
    """Runs everything of this file in one job, whose start takes longer than most of it; errors are results."""
    parts: dict[str, Any] = {"cases": partial(train_cases, uses_fleet=uses_fleet)}
    if uses_fleet:
        parts |= {"resumed": resume_each, "loops": train_as_fleets_own_loop, "refused": agree_and_refuse}
    found = {"scripts": run_scripts(rank, world_size, uses_fleet, NAMES, folder, {})}
    for name, part in parts.items():
        try:
            found[name] = part(rank, world_size, folder=f"{folder}/{name}")
        except Exception:
            found[name] = {"error": traceback.format_exc()}
    return found


def part_of(results: Any, name: str) -> Any:
    """Returns one part of what :func:`run_all` returned."""
    assert "error" not in results[name], results[name]["error"]
    return results[name]


@pytest.fixture(scope="module")
def in_one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What Trainer gives in one process."""
    folder, environment = str(tmp_path_factory.mktemp("one")), {**ALONE, **OFFLINE}
    return dict(run_workers(run_all, 1, False, folder, backend=None, environment=environment, timeout_s=500)[0])


@pytest.fixture(scope="module")
def in_two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What FleetTrainer gives on two workers."""
    folder = str(tmp_path_factory.mktemp("two"))
    return run_workers(run_all, 2, True, folder, backend=None, environment=OFFLINE, timeout_s=600)


@pytest.mark.parametrize("name", NAMES)
def test_a_script_gives_on_two_workers_what_it_gives_in_one_process(
    name: str, in_one: dict[str, Any], in_two: list[dict[str, Any]]
) -> None:
    alone, first, second = (part_of(found["scripts"], name) for found in (in_one, *in_two))
    assert difference(alone, first) == []
    shared = [key for key in alone if key in ("scores", "predictions", "labels", "log", "steps")]
    assert difference({key: alone[key] for key in shared}, {key: second[key] for key in shared}) == []


# Model, changes of the arguments, strategy, the largest difference.
CASES: list[tuple[str, dict[str, Any], dict[str, Any], float]] = [
    ("llama", {"gradient_accumulation_steps": 2}, stage(1), TOLERANCE),
    ("llama", {"gradient_accumulation_steps": 2}, stage(2), TOLERANCE),
    ("tied", {"gradient_accumulation_steps": 2, "gradient_checkpointing": True}, stage(3), TOLERANCE),
    ("tied", {}, MP2, TOLERANCE),
    ("llama", {}, {"recompute": True, "recompute_configs": {"checkpoints": ["model.layers.0"]}}, TOLERANCE),
    ("llama", {"label_smoothing_factor": 0.1}, stage(3), TOLERANCE),
    ("llama", {"bf16": True}, stage(2), 2e-4),
    ("llama", {"gradient_checkpointing": True}, {"fp16_allreduce": True}, 1e-4),
]


def train_cases(rank: int, world_size: int, folder: str, uses_fleet: bool) -> list[dict[str, Tensor]]:
    from transformers import Trainer

    found = []
    for number, (kind, changes, strategy, _) in enumerate(CASES):
        base, options, workers = Trainer, None, world_size
        if uses_fleet:
            from fleet.integrations.hf import FleetTrainer as base

            options = strategy
            workers = world_size // strategy.get("hybrid_configs", {}).get("mp_degree", 1)
        on = Setting(base, workers, Path(folder) / str(number), options)
        trainer = on.trainer(llama(tied=kind == "tied"), on.args(**changes), train_dataset=texts(64))
        trainer.train()
        found.append(finished(trainer))
    return found


def test_strategies_give_the_weights_of_one_process(in_one: dict[str, Any], in_two: list[dict[str, Any]]) -> None:
    """Also the names of a model with tied weights: the file of a divided model holds what Trainer's holds."""
    one, two = part_of(in_one, "cases"), part_of(in_two[0], "cases")
    for (kind, changes, strategy, limit), alone, shared in zip(CASES, one, two, strict=True):
        assert alone.keys() == shared.keys(), (kind, changes, strategy)
        assert max(float((alone[name] - shared[name]).abs().max()) for name in alone) <= limit, (changes, strategy)


# Strategy, and which optimizer the script passes.
RESUMED: list[tuple[dict[str, Any], str]] = [
    ({}, "adamw"),
    (stage(3), "adamw"),
    ({"localsgd": True, "localsgd_configs": {"k_steps": 2, "begin_step": 1}}, "sgd"),
    ({"lamb": True}, "adam"),
    ({"amp": True, "amp_configs": {"dtype": "float16"}}, "adamw"),
]


@lru_cache
def optimizers() -> dict[str, Any]:
    return {
        "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        "adam": lambda model: torch.optim.Adam(model.parameters(), lr=1e-2),
    }


def resume_each(rank: int, world_size: int, folder: str) -> list[dict[str, Any]]:
    from transformers import TrainerCallback

    from fleet.integrations.hf import FleetTrainer

    class Killed(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 4

    def made(place: Path, strategy: dict[str, Any], kind: str, **kwargs: Any) -> Any:
        on, model = Setting(FleetTrainer, world_size, place, strategy), bert(hidden_dropout_prob=0.1)
        given = {"optimizers": (optimizers()[kind](model), None)} if kind in optimizers() else {}
        args = on.args(optim="adamw_torch", learning_rate=1e-2, save_strategy="steps", save_steps=3, max_steps=7)
        return on.trainer(model, args, train_dataset=sentences(40), **given, **kwargs)

    found = []
    for number, (strategy, kind) in enumerate(RESUMED):
        whole, cut = Path(folder) / f"{number}-whole", Path(folder) / f"{number}-cut"
        trainer = made(whole, strategy, kind)
        trainer.train()
        expected = finished(trainer)
        made(cut, strategy, kind, callbacks=[Killed()]).train()
        trainer = made(cut, strategy, kind)
        trainer.train(resume_from_checkpoint=True)
        found.append({"expected": expected, "resumed": finished(trainer)})
    return found


def test_a_resumed_run_gives_the_weights_of_one_that_was_not_interrupted(in_two: list[dict[str, Any]]) -> None:
    """With dropout, bit for bit: optimizer, schedule, rows, random draws; with localsgd what each worker has alone."""
    for (strategy, _), result in zip(RESUMED, part_of(in_two[0], "resumed"), strict=True):
        expected, resumed = result["expected"], result["resumed"]
        assert expected.keys() == resumed.keys()
        assert all(torch.equal(expected[name], resumed[name]) for name in expected), strategy


def train_as_fleets_own_loop(rank: int, world_size: int, folder: str) -> dict[str, list[float]]:
    from fleet import fleet
    from fleet.integrations.hf import FleetTrainer

    differences = {}
    for name, strategy, kind in (
        ("localsgd", {"localsgd": True, "localsgd_configs": {"k_steps": 2, "begin_step": 1}}, "sgd"),
        ("lamb", {"lamb": True}, "adam"),
    ):
        on, model = Setting(FleetTrainer, world_size, Path(folder) / name, strategy), bert()
        args = on.args(lr_scheduler_type="constant", train_sampling_strategy="sequential", max_grad_norm=0.0)
        given = (optimizers()[kind](model), None)
        trainer = on.trainer(model, args, train_dataset=sentences(48), optimizers=given)
        trainer.train()
        options = fleet.DistributedStrategy()
        options.update(strategy)
        fleet.init(is_collective=True, strategy=options)
        own = bert()
        optimizer = fleet.distributed_optimizer(optimizers()[kind](own))
        wrapped = fleet.distributed_model(own)
        for step in range(6):
            rows = sentences(48)[8 * step + 4 * rank : 8 * step + 4 * rank + 4]
            ids = torch.stack([row["input_ids"] for row in rows])
            wrapped(input_ids=ids, labels=torch.tensor([row["labels"] for row in rows])).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        pairs = zip(model.parameters(), own.parameters(), strict=True)
        differences[name] = [float((a - b).abs().max()) for a, b in pairs]
    return differences


def test_localsgd_and_lamb_train_as_in_a_loop_of_ones_own(in_two: list[dict[str, Any]]) -> None:
    for found in in_two:
        loops = part_of(found, "loops")
        assert {name: max(values) for name, values in loops.items()} == {"localsgd": 0.0, "lamb": 0.0}


def agree_and_refuse(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """What the arguments say after the trainer was made without use_cpu, and what a divided model refuses."""
    from transformers import Trainer

    from fleet.errors import ConfigError
    from fleet.integrations.hf import FleetTrainer

    on = Setting(FleetTrainer, world_size, Path(folder) / "a", stage(3))
    args = on.args(use_cpu=False)
    model = bert()
    before = args.world_size
    trainer = on.trainer(model, args, train_dataset=sentences(36), eval_dataset=sentences(9), compute_metrics=accuracy)
    trainer.train()
    trainer.evaluate()
    found: dict[str, Any] = {
        "workers": [before, args.world_size, args.process_index, args.local_process_index],
        "mode": args.parallel_mode.value,
        "saves": args.should_save,
        "device": str(args.device),
        "batch": trainer.get_total_train_batch_size(args),
    }
    try:
        model.save_pretrained(folder)
    except ConfigError as error:
        found["refused"] = str(error)
    # The last batch of an epoch is filled up, as Trainer does in as many processes.
    weights = []
    for base, strategy in ((Trainer, None), (FleetTrainer, {})):
        setting = Setting(base, world_size, Path(folder) / base.__name__, strategy)
        uneven = setting.trainer(llama(), setting.args(max_steps=-1, num_train_epochs=2), train_dataset=texts(21))
        uneven.train()
        weights.append({name: value.detach().clone() for name, value in uneven.model.state_dict().items()})
    found["uneven"] = max(float((weights[0][name] - weights[1][name]).abs().max()) for name in weights[0])
    return found


def test_ranks_agree_with_fleet_and_parts_are_not_saved_as_a_model(in_two: list[dict[str, Any]]) -> None:
    for rank, results in enumerate(in_two):
        found = part_of(results, "refused")
        assert found["workers"][1:] == [2, rank, rank]
        assert (found["mode"], found["saves"], found["device"], found["batch"]) == ("distributed", rank == 0, "cpu", 8)
        assert "trainer.save_model" in found["refused"]
        assert found["uneven"] <= TOLERANCE
