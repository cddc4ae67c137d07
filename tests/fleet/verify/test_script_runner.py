"""One process leaves out the options that only divide the work."""

import torch

import fleet
from fleet.strategies.pipeline.micro_batches import _rows
from fleet.verify.script_runner import _by_copy, alone_options


def test_one_process_keeps_what_changes_the_training() -> None:
    strategy = fleet.DistributedStrategy()
    strategy.sharding = strategy.amp = True
    made = alone_options(strategy, 2)
    assert made.amp
    assert not made.sharding
    assert strategy.sharding


def test_a_micro_batch_has_the_rows_of_all_copies() -> None:
    strategy = fleet.DistributedStrategy()
    strategy.pipeline = True
    strategy.pipeline_configs = {"accumulate_steps": 4, "micro_batch_size": 3, "split": "auto"}
    strategy.hybrid_configs = {"pp_degree": 2}
    made = alone_options(strategy, 2)
    config = made["pipeline_configs"]
    assert (config.accumulate_steps, config.micro_batch_size, config.split) == (4, 6, ("auto",))
    assert made.hybrid_configs["pp_degree"] == 1


def test_micro_batches_of_one_process_are_those_of_all_copies() -> None:
    own = [torch.arange(6), torch.arange(10, 16)]
    expected = [torch.cat(rows) for rows in zip(*(_rows(part, "x", 3, 2) for part in own), strict=True)]
    found = _by_copy(_rows, 2)(torch.cat(own), "x", 3, 4)
    assert [rows.tolist() for rows in found] == [rows.tolist() for rows in expected]
    assert found[1].tolist() == [2, 3, 12, 13]
