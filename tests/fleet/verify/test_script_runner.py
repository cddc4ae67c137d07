"""One process leaves out the options that only divide the work."""

import fleet
from fleet.verify.script_runner import alone_options


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
