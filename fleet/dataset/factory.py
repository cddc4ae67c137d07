"""DatasetFactory: how Fleet 1.x scripts create a dataset."""

from __future__ import annotations

from typing import Any

from fleet.dataset.in_memory import InMemoryDataset
from fleet.dataset.queue import QueueDataset
from fleet.errors import ConfigError, UnsupportedOptionError, did_you_mean

_OFFERED = {"InMemoryDataset": InMemoryDataset, "QueueDataset": QueueDataset}


class DatasetFactory:
    """Creates a dataset by the name of its class; ``set_batch_size`` and the like set its options.

    Example:
        >>> dataset = fleet.DatasetFactory().create_dataset("InMemoryDataset")
        >>> dataset.set_batch_size(32)
    """

    def create_dataset(self, datafeed_class: str = "QueueDataset") -> Any:
        """Returns a new dataset; raises ConfigError for an unknown class."""
        if datafeed_class in ("BoxPSDataset", "FileInstantDataset"):
            raise UnsupportedOptionError(
                f"create_dataset({datafeed_class!r}) is not supported; fleet.dataset.{datafeed_class}() says why."
            )
        if datafeed_class not in _OFFERED:
            raise ConfigError(
                f"create_dataset({datafeed_class!r}) takes one of {', '.join(map(repr, _OFFERED))}."
                f"{did_you_mean(str(datafeed_class), _OFFERED)}"
            )
        return _OFFERED[datafeed_class]()
