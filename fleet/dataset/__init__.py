"""Data in the MultiSlot text form: datasets that stream files or hold them in memory, and shuffles over all workers.

The programs that write this form are in :mod:`fleet.data_generator`. Names are resolved at first use.

Example:
    >>> slots = [fleet.dataset.Slot("words", lod_level=1), fleet.dataset.Slot("label")]
    >>> dataset = fleet.InMemoryDataset()
    >>> dataset.init(batch_size=32, use_var=slots)
"""

from __future__ import annotations

from fleet.common.lazy_names import lazy_names

_HOMES = {
    "Batch": "batch",
    "BoxPSDataset": "unsupported",
    "DatasetBase": "base",
    "DatasetFactory": "factory",
    "FileInstantDataset": "unsupported",
    "InMemoryDataset": "in_memory",
    "KafkaSource": "kafka",
    "ParquetDataset": "parquet",
    "QueueDataset": "queue",
    "Slot": "slots",
    "StreamDataset": "stream",
    "TreeIndex": "unsupported",
    "WorkerGroup": "workers",
    "infer_from_dataset": "training",
    "train_from_dataset": "training",
}

__all__ = sorted(_HOMES)

__getattr__, __dir__ = lazy_names(__name__, {name: f".{home}" for name, home in _HOMES.items()})
