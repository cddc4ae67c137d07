"""Options of datasets: each is honoured, or refused with the reason."""

from __future__ import annotations

from typing import Any

import pytest

from fleet.dataset.dataset_settings import BASE_OPTIONS, MEMORY_OPTIONS, DatasetSettings
from fleet.dataset.in_memory import InMemoryDataset
from fleet.dataset.queue import QueueDataset
from fleet.dataset.slots import Slot
from fleet.errors import ConfigError, OptionWarning, UnknownOptionError, UnsupportedOptionError


def test_defaults_are_those_of_fleet() -> None:
    """B.7: DatasetBase.init and update_settings."""
    settings = DatasetSettings(data_feed_type="MultiSlotDataFeed")
    given = {name: getattr(settings, name) for name in MEMORY_OPTIONS if name not in ("data_feed_type", "use_var")}
    assert given == {
        "batch_size": 1,
        "thread_num": 1,
        "pipe_command": "cat",
        "input_type": 0,
        "fs_name": "",
        "fs_ugi": "",
        "download_cmd": "cat",
        "queue_num": -1,
        "merge_size": -1,
        "parse_ins_id": False,
        "parse_content": False,
        "fleet_send_batch_size": 1024,
        "fleet_send_sleep_seconds": 0,
        "fea_eval": False,
        "candidate_size": 10000,
    }


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"batch_size": 0}, "at least 1"),
        ({"batch_size": True}, "at least 1"),
        ({"thread_num": 1.5}, "at least 1"),
        ({"fleet_send_batch_size": 0}, "at least 1"),
        ({"candidate_size": -1}, "at least 1"),
        ({"parse_ins_id": 1}, "True or False"),
        ({"fs_name": None}, "takes a string"),
        ({"input_type": 2}, "a line is a batch"),
        ({"input_type": 1, "batch_size": 4}, "batch_size is 1"),
        ({"merge_size": 2}, "set parse_ins_id=True"),
        ({"merge_size": 2, "parse_ins_id": True, "input_type": 1}, "has no id"),
        ({"merge_size": "2"}, "integer"),
        ({"fleet_send_sleep_seconds": -1}, "0 or more"),
        ({"pipe_command": "cat; ls"}, "only a shell interprets"),
        ({"download_cmd": "a | b"}, "pipes belong in pipe_command"),
        ({"use_var": [1]}, "holds 1"),
        ({"data_feed_type": "SlotRecordInMemoryDataFeed"}, "Paddle's other readers"),
    ],
)
def test_wrong_values_change_nothing(options: dict[str, Any], rule: str) -> None:
    dataset = InMemoryDataset()
    dataset.init(thread_num=7)
    before = dataset._settings
    for call in (dataset.init, dataset.update_settings):
        with pytest.raises(ConfigError, match=rule):
            call(**options)
    assert dataset._settings is before


def test_unknown_options_get_the_nearest_name() -> None:
    with pytest.raises(UnknownOptionError, match=r"init\(thread=\.\.\.\) is not an option. Did you mean 'thread_num'"):
        InMemoryDataset().init(thread=3)
    for name in set(MEMORY_OPTIONS) - set(BASE_OPTIONS):
        with pytest.raises(UnknownOptionError, match=name):
            QueueDataset().init(**{name: 1})


def test_init_starts_from_the_defaults_and_update_does_not() -> None:
    dataset = InMemoryDataset()
    dataset.init(batch_size=4, thread_num=3)
    dataset.update_settings(batch_size=5)
    assert (dataset._settings.batch_size, dataset._settings.thread_num) == (5, 3)
    dataset.init(use_var=[Slot("x")])
    assert (dataset._settings.batch_size, dataset._settings.thread_num) == (1, 1)


def test_what_has_no_meaning_here_warns() -> None:
    with pytest.warns(OptionWarning, match="queue_num=4.*has no effect"):
        InMemoryDataset().init(queue_num=4)
    InMemoryDataset().init(queue_num=-1, data_feed_type="MultiSlotInMemoryDataFeed")


def test_what_cannot_be_honoured_is_refused() -> None:
    with pytest.raises(UnsupportedOptionError, match="tables on GPUs"):
        InMemoryDataset().set_date("20260101")
    with pytest.raises(UnsupportedOptionError, match="tree-based"):
        InMemoryDataset().tdm_sample("tree")


def test_programs_are_started_only_where_they_change_something() -> None:
    settings = DatasetSettings(data_feed_type="x", pipe_command="python 'a b.py'", download_cmd="./get --fast")
    assert settings.source.pipeline == (("python", "a b.py"),)
    assert settings.source.download == ("./get", "--fast")
    assert DatasetSettings(data_feed_type="x").source.commands("f") == ([], False)


@pytest.mark.parametrize("kind", [InMemoryDataset, QueueDataset])
def test_a_dataset_that_was_given_no_list_of_files_says_so(kind: type[InMemoryDataset] | type[QueueDataset]) -> None:
    """B.7: a forgotten set_filelist; an empty list is what a worker gets where there are fewer files than workers."""
    dataset = kind()
    dataset.init(use_var=[Slot("words", lod_level=1)])
    with pytest.raises(ConfigError, match=r"has no files: call set_filelist\(\) first"):
        list(dataset) if isinstance(dataset, QueueDataset) else dataset.load_into_memory()
    dataset.set_filelist([])
    if isinstance(dataset, InMemoryDataset):
        dataset.load_into_memory()
    assert list(dataset) == []


def test_the_calls_of_older_scripts_set_the_same() -> None:
    """B.7: set_... of 1.x and 2.x; what they set survives init(), which resets what init() set."""
    slots = [Slot("words", lod_level=1)]
    dataset = InMemoryDataset()
    dataset.set_use_var(slots)
    dataset.set_batch_size(4)
    dataset.set_thread(3)
    dataset.set_pipe_command("python reader.py")
    dataset.set_download_cmd("./get")
    dataset.set_hdfs_config("hdfs://a", "user,pw")
    dataset.set_merge_by_lineid(3)
    dataset._set_parse_content(True)
    dataset.set_fleet_send_batch_size(10)
    dataset.set_fleet_send_sleep_seconds(1)
    dataset.set_fea_eval(100)
    dataset.set_feed_type("MultiSlotInMemoryDataFeed")
    same = InMemoryDataset()
    same.init(
        use_var=slots, batch_size=4, thread_num=3, pipe_command="python reader.py", download_cmd="./get",
        fs_name="hdfs://a", fs_ugi="user,pw", merge_size=3, parse_ins_id=True, parse_content=True,
        fleet_send_batch_size=10, fleet_send_sleep_seconds=1, fea_eval=True, candidate_size=100,
    )  # fmt: skip
    assert dataset._settings == same._settings
    queue = QueueDataset()
    queue._set_thread(2)
    queue.set_input_type(1)
    assert (queue._settings.thread_num, queue._settings.input_type) == (2, 1)
    with pytest.raises(ConfigError, match=r"QueueDataset.set_batch_size\(batch_size=0\) takes an integer"):
        queue.set_batch_size(0)
    with pytest.warns(OptionWarning, match="set_queue_num") as caught:
        dataset.set_queue_num(4)
    assert caught[0].filename == __file__
    with pytest.raises(UnsupportedOptionError, match="other readers"):
        dataset.set_feed_type("SlotRecordInMemoryDataFeed")


@pytest.mark.parametrize("first", [True, False])
def test_distributed_settings_before_and_after_init(first: bool) -> None:
    """B.7: Paddle's scripts call _init_distributed_settings on either side of init()."""
    dataset = InMemoryDataset()
    if first:
        dataset._init_distributed_settings(merge_size=2, fleet_send_batch_size=7)
    dataset.init(batch_size=4, use_var=[Slot("x")])
    if not first:
        dataset._init_distributed_settings(merge_size=2, fleet_send_batch_size=7)
    made = dataset._settings
    assert (made.batch_size, made.merge_size, made.parse_ins_id, made.fleet_send_batch_size) == (4, 2, True, 7)
    with pytest.raises(UnknownOptionError, match="Did you mean 'merge_size'"):
        dataset._init_distributed_settings(merge_siz=2)
