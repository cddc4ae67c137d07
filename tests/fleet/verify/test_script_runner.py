"""One process leaves out the options that only divide the work."""

import fleet
from fleet.verify.script_runner import alone_options


def test_one_process_keeps_what_changes_the_training() -> None:
    strategy = fleet.DistributedStrategy()
    strategy.sharding = strategy.amp = True
    made = alone_options(strategy)
    assert made.amp
    assert not made.sharding
    assert strategy.sharding
