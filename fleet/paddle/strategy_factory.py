"""StrategyFactory: the four modes of parameter-server training, as Fleet 1.x scripts choose them.

Each returns a :class:`fleet.DistributedStrategy`; ``half_async`` is available only here.
"""

from __future__ import annotations

from fleet.env import Environment
from fleet.errors import ConfigError
from fleet.options import DistributedStrategy
from fleet.ps_job.server_settings import read_count

__all__ = ["HalfAsyncStrategy", "StrategyFactory"]


class HalfAsyncStrategy(DistributedStrategy):
    """A strategy whose workers push the sum of CPU_NUM batches and wait for the push, never for each other."""

    _half_async = True


class StrategyFactory:
    """Creates a strategy for each mode; pass it to ``fleet.distributed_optimizer``.

    Example:
        >>> StrategyFactory.create_geo_strategy(100).a_sync_configs["k_steps"]
        100
    """

    @staticmethod
    def create_sync_strategy() -> DistributedStrategy:
        """Returns a strategy whose servers average the gradients of all workers in each step."""
        strategy = DistributedStrategy()
        strategy.a_sync = False
        return strategy

    @staticmethod
    def create_half_async_strategy() -> DistributedStrategy:
        """Returns a strategy whose workers push and wait every CPU_NUM batches."""
        strategy = HalfAsyncStrategy()
        strategy.a_sync = True
        return strategy

    @staticmethod
    def create_async_strategy() -> DistributedStrategy:
        """Returns a strategy whose workers push in the background."""
        strategy = DistributedStrategy()
        strategy.a_sync = True
        threads = read_count(Environment(), "CPU_NUM")
        if threads > 1:  # Fleet 1.x merged and queued as many gradients as it had threads
            strategy.a_sync_configs = {"max_merge_var_num": threads, "send_queue_size": max(threads, 16)}
        return strategy

    @staticmethod
    def create_geo_strategy(update_frequency: int = 100) -> DistributedStrategy:
        """Returns a strategy whose workers train alone and exchange every ``update_frequency`` steps."""
        if isinstance(update_frequency, bool) or not isinstance(update_frequency, int) or update_frequency < 1:
            raise ConfigError(
                f"create_geo_strategy(update_frequency={update_frequency!r}) takes an integer of 1 or more."
            )
        strategy = DistributedStrategy()
        strategy.a_sync = True
        strategy.a_sync_configs = {"k_steps": update_frequency}
        return strategy
