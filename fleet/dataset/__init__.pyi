# Made by `make docs`; a change belongs into the code that it is made from.
"""Data in the MultiSlot text form: datasets that stream files or hold them in memory, and shuffles over all workers.

The programs that write this form are in :mod:`fleet.data_generator`. Names are resolved at first use.

Example:
    >>> slots = [fleet.dataset.Slot("words", lod_level=1), fleet.dataset.Slot("label")]
    >>> dataset = fleet.InMemoryDataset()
    >>> dataset.init(batch_size=32, use_var=slots)
"""

from fleet.dataset.base import DatasetBase as DatasetBase
from fleet.dataset.batch import Batch as Batch
from fleet.dataset.factory import DatasetFactory as DatasetFactory
from fleet.dataset.in_memory import InMemoryDataset as InMemoryDataset
from fleet.dataset.kafka import KafkaSource as KafkaSource
from fleet.dataset.parquet import ParquetDataset as ParquetDataset
from fleet.dataset.queue import QueueDataset as QueueDataset
from fleet.dataset.slots import Slot as Slot
from fleet.dataset.stream import StreamDataset as StreamDataset
from fleet.dataset.training import infer_from_dataset as infer_from_dataset
from fleet.dataset.training import train_from_dataset as train_from_dataset
from fleet.dataset.unsupported import BoxPSDataset as BoxPSDataset
from fleet.dataset.unsupported import FileInstantDataset as FileInstantDataset
from fleet.dataset.unsupported import TreeIndex as TreeIndex
from fleet.dataset.workers import WorkerGroup as WorkerGroup

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
