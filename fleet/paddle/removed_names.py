"""Names of older releases of Fleet, and what to use instead."""

from __future__ import annotations

REMOVED_NAMES = {
    "fluid": "the paddle.fluid packages of Fleet 1.x are gone; the calls are those of this package, fleet",
    "main_program": "torch has no programs: use your nn.Module (Fleet: paddle.static.default_main_program())",
    "_origin_program": "torch has no programs: use your nn.Module (Fleet: paddle.static.default_main_program())",
    "startup_program": "torch has no programs: modules are initialised when they are made "
    "(Fleet: paddle.static.default_startup_program())",
    "Distributedstrategy": "write DistributedStrategy",
    **dict.fromkeys(
        ("DistributeTranspiler", "DistributeTranspilerConfig", "TrainerRuntimeConfig"),
        "set the mode with a_sync and a_sync_configs of DistributedStrategy (sync_mode: a_sync = False)",
    ),
    "CollectiveOptimizer": "write fleet.distributed_optimizer(optimizer, strategy)",
    **{
        f"{mode}Strategy": f"write StrategyFactory.create_{call}_strategy()"
        for mode, call in (("Sync", "sync"), ("Async", "async"), ("HalfAsync", "half_async"), ("Geo", "geo"))
    },
    **dict.fromkeys(
        ("BoxPSDataset", "FileInstantDataset", "TreeIndex"),
        "it is not supported, and fleet.dataset gives the reason under this name; use InMemoryDataset or QueueDataset",
    ),
}
