# Made by `make docs`; a change belongs into the code that it is made from.
"""Data in the MultiSlot text form: datasets that stream files or hold them in memory, and shuffles over all workers.

The programs that write this form are in :mod:`fleet.data_generator`. Names are resolved at first use.

Example:
    >>> slots = [fleet.dataset.Slot("words", lod_level=1), fleet.dataset.Slot("label")]
    >>> dataset = fleet.InMemoryDataset()
    >>> dataset.init(batch_size=32, use_var=slots)
"""

from fleet.dataset._base import DatasetBase as DatasetBase
from fleet.dataset._batch import Batch as Batch
from fleet.dataset._factory import DatasetFactory as DatasetFactory
from fleet.dataset._in_memory import InMemoryDataset as InMemoryDataset
from fleet.dataset._kafka import KafkaSource as KafkaSource
from fleet.dataset._parquet import ParquetDataset as ParquetDataset
from fleet.dataset._queue import QueueDataset as QueueDataset
from fleet.dataset._slots import Slot as Slot
from fleet.dataset._stream import StreamDataset as StreamDataset
from fleet.dataset._training import infer_from_dataset as infer_from_dataset
from fleet.dataset._training import train_from_dataset as train_from_dataset
from fleet.dataset._unsupported import BoxPSDataset as BoxPSDataset
from fleet.dataset._unsupported import FileInstantDataset as FileInstantDataset
from fleet.dataset._unsupported import TreeIndex as TreeIndex
from fleet.dataset._workers import WorkerGroup as WorkerGroup

__all__ = [
    "Batch",
    "BoxPSDataset",
    "DatasetBase",
    "DatasetFactory",
    "FileInstantDataset",
    "InMemoryDataset",
    "KafkaSource",
    "ParquetDataset",
    "QueueDataset",
    "Slot",
    "StreamDataset",
    "TreeIndex",
    "WorkerGroup",
    "infer_from_dataset",
    "train_from_dataset",
]
