"""Settings: every option of a dataset, checked when it is set."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from fleet.dataset.slots import Slot, read_slots
from fleet.dataset.source import Source, split_pipeline
from fleet.dataset.text import TextForm
from fleet.errors import ConfigError, OptionWarning, UnknownOptionError, UnsupportedOptionError, did_you_mean
from fleet.launch.processes.redact import HIDDEN, is_secret_name, redact

_WHOLE = {"batch_size": 1, "thread_num": 1, "fleet_send_batch_size": 1, "candidate_size": 1}
_SWITCHES = ("parse_ins_id", "parse_content", "fea_eval")
_TEXTS = ("fs_name", "fs_ugi")


@dataclass(frozen=True, kw_only=True)
class DatasetSettings:
    """The options of a dataset; the docstrings of the datasets explain them."""

    data_feed_type: str
    batch_size: int = 1
    thread_num: int = 1
    use_var: tuple[Slot, ...] = ()
    pipe_command: str = "cat"
    input_type: int = 0
    fs_name: str = ""
    fs_ugi: str = ""
    download_cmd: str = "cat"
    # The options below are InMemoryDataset's alone.
    queue_num: int = -1
    merge_size: int = -1
    parse_ins_id: bool = False
    parse_content: bool = False
    fleet_send_batch_size: int = 1024
    fleet_send_sleep_seconds: float = 0
    fea_eval: bool = False
    candidate_size: int = 10000

    def changed(self, given: Mapping[str, Any], known: tuple[str, ...], call: str) -> DatasetSettings:
        """Returns the settings updated with ``given``.

        Raises:
            ConfigError: an unknown option, or a value that breaks its rule; these settings do not change.
        """
        for name in given:
            if name not in known:
                raise UnknownOptionError(f"{call}({name}=...) is not an option.{did_you_mean(name, known)}")
        values = dict(given)
        if "use_var" in values:
            values["use_var"] = read_slots(values["use_var"])
        for name, value in values.items():
            _check_value(name, value, call)
        if values.get("data_feed_type", self.data_feed_type) != self.data_feed_type:
            raise UnsupportedOptionError(
                f"{call}(data_feed_type={values['data_feed_type']!r}): here it is {self.data_feed_type!r}, the "
                "MultiSlot text form; Paddle's other readers are not supported."
            )
        # Replaced before it is checked: the rules between options hold for the options of earlier calls, too.
        changed = replace(self, **values)
        changed._check_together(call)
        if values.get("queue_num", -1) != -1:
            warnings.warn(
                f"{call}(queue_num={values['queue_num']!r}) has no effect: batches come from one queue, whatever the "
                "number of threads that take them.",
                OptionWarning,
                stacklevel=4,
            )
        return changed

    def _check_together(self, call: str) -> None:
        if self.input_type == 1 and self.batch_size != 1:
            raise ConfigError(
                f"{call}(input_type=1, batch_size={self.batch_size!r}): with input_type=1 a line is a whole batch, so "
                "batch_size is 1."
            )
        if self.merge_size > 0 and not self.parse_ins_id:
            raise ConfigError(
                f"{call}(merge_size={self.merge_size!r}) merges samples with the same id; set parse_ins_id=True and "
                "write the ids in the data generator."
            )
        if self.merge_size > 0 and self.input_type == 1:
            raise ConfigError(
                f"{call}(merge_size={self.merge_size!r}, input_type=1): a line that is a batch has no id."
            )

    @property
    def form(self) -> TextForm:
        """The fields of a line; raises ConfigError without slots."""
        if not self.use_var:
            raise ConfigError("The dataset has no slots. Call init(use_var=[fleet.dataset.Slot(...), ...]) first.")
        return TextForm(self.use_var, self.parse_ins_id, self.parse_content, self.input_type == 1)

    @property
    def source(self) -> Source:
        """How a file is read; plain ``cat`` needs no program."""
        pipeline = split_pipeline(self.pipe_command, "pipe_command")
        download = split_pipeline(self.download_cmd, "download_cmd")
        return Source(
            pipeline=() if pipeline == [["cat"]] else tuple(map(tuple, pipeline)),
            download=None if download == [["cat"]] else tuple(download[0]),
            fs_name=self.fs_name,
            fs_ugi=self.fs_ugi,
        )


def check_integers(dataset: str, **integers: tuple[Any, int]) -> None:
    """Raises ConfigError unless each argument, ``NAME=(value, least)``, is an integer of at least its least value."""
    for name, (value, least) in integers.items():
        if type(value) is not int or value < least:
            raise ConfigError(f"{dataset}({name}={value!r}): it is an integer of at least {least}.")


def _check_value(name: str, value: Any, call: str) -> None:
    wrong = ""
    if name in _WHOLE and (type(value) is not int or value < _WHOLE[name]):
        wrong = f"takes an integer of at least {_WHOLE[name]}"
    elif name in _SWITCHES and not isinstance(value, bool):
        wrong = "takes True or False"
    elif name in _TEXTS and not isinstance(value, str):
        wrong = "takes a string"
    elif name == "input_type" and (type(value) is not int or value not in (0, 1)):
        wrong = "takes 0 (a line is a sample) or 1 (a line is a batch)"
    elif name in ("merge_size", "queue_num") and type(value) is not int:
        wrong = "takes an integer; -1 turns it off"
    elif name == "fleet_send_sleep_seconds" and (
        isinstance(value, bool) or not isinstance(value, int | float) or value < 0
    ):
        wrong = "takes seconds, 0 or more"
    elif name in ("pipe_command", "download_cmd"):
        programs = split_pipeline(value, name)
        if name == "download_cmd" and len(programs) > 1:
            wrong = "takes one program, which gets the file name as its last argument; pipes belong in pipe_command"
    if wrong:
        shown = HIDDEN if is_secret_name(name) else redact(f"{value!r}")
        raise ConfigError(f"{call}({name}={shown}) {wrong}.")


MEMORY_OPTIONS = tuple(field.name for field in fields(DatasetSettings))
BASE_OPTIONS = MEMORY_OPTIONS[: MEMORY_OPTIONS.index("queue_num")]
