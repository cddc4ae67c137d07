"""DatasetBase: the options, the list of files, and the reading of one file, for both datasets."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from fleet.dataset.dataset_settings import BASE_OPTIONS, DatasetSettings
from fleet.dataset.samples import Samples
from fleet.dataset.source import Source, read_blocks
from fleet.dataset.text import TextForm, parse
from fleet.errors import ConfigError


class DatasetBase:
    """The base of :class:`InMemoryDataset` and :class:`QueueDataset`; it cannot be iterated itself."""

    _feed = "MultiSlotDataFeed"
    _options: tuple[str, ...] = BASE_OPTIONS

    def __init__(self) -> None:
        self._settings = DatasetSettings(data_feed_type=self._feed)
        self._set_apart: dict[str, Any] = {}  # by set_... and _init_distributed_settings; init() does not change these
        self.filelist: list[str] = []
        self._has_filelist = False

    def init(self, **options: Any) -> None:
        """Sets the options; omitted ones keep their defaults.

        Args:
            options: by name:

                - ``batch_size`` (1): samples per batch; the last batch may be smaller.
                - ``thread_num`` (1): threads that read files, each one file at a time.
                - ``use_var``: the slots of a line, all of them in order, as :class:`Slot`.
                - ``pipe_command`` ("cat"): program that reads each file on standard input and writes the text form;
                  ``|`` joins several. No shell is involved.
                - ``input_type`` (0): 1 means that a line is a whole batch.
                - ``download_cmd`` ("cat"): program that is started with the name of each file and writes its bytes;
                  replaces opening the file.
                - ``fs_name``, ``fs_ugi`` (""): address and user of Hadoop, for files named ``hdfs:...`` or ``afs:...``.
                - ``data_feed_type``: only the default is accepted; another reader is refused.

        Raises:
            ConfigError: an unknown option or a wrong value; nothing was changed.
        """
        call = f"{type(self).__name__}.init"
        given = {**self._set_apart, **options}
        # Assigned only once all options are checked: a refused call changes nothing.
        self._settings = DatasetSettings(data_feed_type=self._feed).changed(given, self._options, call)
        self._set_apart = {name: value for name, value in self._set_apart.items() if name not in options}

    def set_filelist(self, filelist: Sequence[str]) -> None:
        """Sets the files of this worker; ``fleet.util.get_file_shard`` gives each worker its shard of a list.

        With ``strategy.reproducible`` these are the files of the whole job, the same on every worker: each logical
        worker reads its shard of them.

        Raises:
            ConfigError: not a list of names.
        """
        if not isinstance(filelist, list | tuple) or not all(isinstance(file, str | os.PathLike) for file in filelist):
            raise ConfigError(f"set_filelist({filelist!r}) takes a list of file names.")
        self.filelist = [os.fspath(file) for file in filelist]
        self._has_filelist = True

    def _change(self, call: str, **options: Any) -> None:
        self._settings = self._settings.changed(options, self._options, f"{type(self).__name__}.{call}")

    def _set(self, call: str, **options: Any) -> None:
        """Changes some options; called by older scripts."""
        self._change(call, **options)
        self._set_apart |= options

    def set_use_var(self, var_list: Sequence[Any]) -> None:
        """Sets ``use_var`` of :meth:`init`."""
        self._set("set_use_var", use_var=var_list)

    def set_batch_size(self, batch_size: int) -> None:
        """Sets ``batch_size`` of :meth:`init`."""
        self._set("set_batch_size", batch_size=batch_size)

    def set_thread(self, thread_num: int) -> None:
        """Sets ``thread_num`` of :meth:`init`."""
        self._set("set_thread", thread_num=thread_num)

    def set_pipe_command(self, pipe_command: str) -> None:
        """Sets ``pipe_command`` of :meth:`init`."""
        self._set("set_pipe_command", pipe_command=pipe_command)

    def set_input_type(self, input_type: int) -> None:
        """Sets ``input_type`` of :meth:`init`."""
        self._set("set_input_type", input_type=input_type)

    def set_download_cmd(self, download_cmd: str) -> None:
        """Sets ``download_cmd`` of :meth:`init`."""
        self._set("set_download_cmd", download_cmd=download_cmd)

    def set_feed_type(self, data_feed_type: str) -> None:
        """Checks ``data_feed_type`` of :meth:`init`."""
        self._set("set_feed_type", data_feed_type=data_feed_type)

    def set_hdfs_config(self, fs_name: str, fs_ugi: str) -> None:
        """Sets ``fs_name`` and ``fs_ugi`` of :meth:`init`."""
        self._set("set_hdfs_config", fs_name=fs_name, fs_ugi=fs_ugi)

    # The names that scripts of Fleet 2.x call.
    _set_use_var = set_use_var
    _set_batch_size = set_batch_size
    _set_thread = set_thread
    _set_pipe_command = set_pipe_command
    _set_input_type = set_input_type
    _set_download_cmd = set_download_cmd
    _set_feed_type = set_feed_type
    _set_hdfs_config = set_hdfs_config

    def _start_reading(self) -> tuple[TextForm, Source]:
        """Returns form and source after checking everything that can be checked before reading."""
        form = self._settings.form
        source = self._settings.source
        if not self._has_filelist:
            raise ConfigError(
                f"{type(self).__name__} has no files: call set_filelist() first. A worker without any takes an empty "
                "list."
            )
        source.check_files(self.filelist)
        return form, source


def read_samples(file: str, form: TextForm, source: Source, stop: threading.Event) -> Iterator[Samples]:
    """Yields the samples of a file, block by block, until ``stop`` is set."""
    line = 1
    for data in read_blocks(file, source):
        if stop.is_set():
            return
        # The numbers of lines go on over the blocks: errors name the line of the file.
        samples = parse(data, form, file, line)
        line += len(samples)
        yield samples
