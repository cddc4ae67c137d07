"""Every option, argument and variable of parameter-server training, set to wrong values: an error, and no change.

The message says what was written, the value received and the rule (F.2, F.3, D.4 to D.8; a_sync_configs of A.2).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fleet
from fleet.errors import ConfigError, FleetError, UnknownOptionError, UnsupportedOptionError
from fleet.facade import Fleet
from fleet.ps import Accessor, Initializer, Rule, SparseTableConfig
from fleet.ps.worker.table_configs import configure_table
from fleet.role_maker import Role, UserDefinedRoleMaker
from tests.fleet.ps_job.test_server_job import make_sgd, served, strategy
from tests.helpers.served import WideAndDeep

NAN, INFINITE = float("nan"), float("inf")
COUNTS = (
    "max_merge_var_num",
    "send_queue_size",
    "min_send_grad_num_before_recv",
    "thread_pool_size",
    "send_wait_times",
)
SWITCHES = ("independent_recv_thread", "runtime_split_send_recv", "launch_barrier")


def cases(values: dict[str, list[Any]]) -> list[Any]:
    return [pytest.param(name, value, id=f"{name}-{value!r}") for name, found in values.items() for value in found]


A_SYNC = {
    "k_steps": [-2, 1.5, "x", True],
    **{name: [0, -1, 1.5, "1", True] for name in (*COUNTS, "lr_decay_steps")},
    **{name: ["x", 1, None] for name in SWITCHES},
    "max_staleness": [-2, 1.5, "1", True],
    "wire": ["float16", 3, None],
    "publish": [3, True],
    "publish_every_s": [0, -1.0, "x", True],
    "publish_values": ["fp8", 3],
    **{name: ["embedding.*", 3, True] for name in ("sparse_modules", "unbounded_modules")},
    "heter_worker_device_guard": [3],
    "use_ps_gpu": [2, "x"],
    "use_gpu_graph": [2, "x"],
}


@pytest.mark.parametrize(("key", "value"), cases(A_SYNC))
def test_a_sync_configs(key: str, value: object) -> None:
    made = fleet.DistributedStrategy()
    before = dict(made.a_sync_configs)
    with pytest.raises(ConfigError) as caught:
        made.a_sync_configs = {key: value}
    assert f"a_sync_configs[{key!r}]" in str(caught.value)
    assert f"{value!r}" in str(caught.value)
    assert dict(made.a_sync_configs) == before


def test_every_key_of_a_sync_configs_is_tried() -> None:
    assert set(A_SYNC) == set(fleet.DistributedStrategy().a_sync_configs)
    with pytest.raises(UnknownOptionError, match=r"no key 'k_step'.*Did you mean 'k_steps'"):
        fleet.DistributedStrategy().a_sync_configs = {"k_step": 1}


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("a_sync", "yes", "True or False"),
        ("a_sync", 2, "True or False"),
        ("a_sync_configs", 3, "takes a dictionary"),
        ("adam_d2sum", "x", "True or False"),
        ("sparse_table_configs", 3, "takes a dictionary"),
        ("trainer_desc_configs", {"dump_fields_path": 3}, "takes a string"),
        ("trainer_desc_configs", {"dump_field": []}, "Did you mean 'dump_fields'"),
    ],
)
def test_options(name: str, value: object, rule: str) -> None:
    made = fleet.DistributedStrategy()
    before = getattr(made, name)
    with pytest.raises(ConfigError, match=rule):
        setattr(made, name, value)
    assert getattr(made, name) == before


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("a_sync_configs", {"heter_worker_device_guard": "gpu"}, "leave it 'cpu'"),
        ("a_sync_configs", {"use_ps_gpu": 1}, "none on GPUs"),
        ("a_sync_configs", {"use_gpu_graph": 1}, "none on GPUs"),
        ("fs_client_param", {"uri": "hdfs://localhost"}, "HDFSClient"),
    ],
)
def test_what_cannot_be_honoured_is_refused_when_training_begins(name: str, value: object, reason: str) -> None:
    made, own = strategy("async"), Fleet()
    setattr(made, name, value)
    with pytest.raises(UnsupportedOptionError, match=reason) as caught:
        own.init(UserDefinedRoleMaker(server_endpoints=["127.0.0.1:1"]), strategy=made, log_level="ERROR")
    assert name in str(caught.value)


EMBEDDING = {
    "dim": [0, -1, 1.5, "8", True, None, 10**9],
    "name": ["", 3],
    "combiner": ["max", 1, None],
    "num_slots": [0, True, 1.5],
    "separate_slots": ["yes", 1, None],
    "padding_idx": ["x", 1.5, True, 2**70],
    "entry": ["count_filter_entry:10", 3],
    "initializer": ["uniform", 3],
    "accessor": ["CtrCommonAccessor", 3],
    "rule": ["sgd", 3],
    "seed": ["x", 1.5, 2**70, True, None],
    "slot": ["x", -1, 1.5, 2**40, True],
    "max_rows": [0, -1, 1.5, "100", True],
    "max_bytes": [0, 1.5, "1 GB", True],
    "evict": ["fifo", 3],
    "ttl_days": [0, -1, 1.5, "2", True],
    "rows": ["ssd", 3, True],
    "memory_bytes": [0, -1, 1.5, "1 GB", True],
}


@pytest.mark.parametrize(("name", "value"), cases(EMBEDDING))
def test_sparse_embedding(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match="takes|one of") as caught:
        fleet.SparseEmbedding(**{"dim": 4, name: value})  # type: ignore[arg-type]
    assert name in str(caught.value)
    assert f"{value!r}" in str(caught.value)


def test_every_argument_of_sparse_embedding_is_tried() -> None:
    import inspect

    assert set(EMBEDDING) == set(inspect.signature(fleet.SparseEmbedding).parameters)


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        *((lambda value=value: fleet.CountFilterEntry(value), r"CountFilterEntry\(.*integer|must lie in")
          for value in (-1, 1.5, "3", True, 2**40)),
        *((lambda value=value: fleet.ProbabilityEntry(value), r"ProbabilityEntry\(.*between 0 and 1|takes a float")
          for value in (0.0, 1.0, 1, "x", NAN, -0.1)),
        (lambda: fleet.ShowClickEntry("", "click"), "show_name is ''"),
        (lambda: fleet.ShowClickEntry("show", "a:b"), "click_name is 'a:b'"),
        (lambda: fleet.ShowClickEntry(1, "click"), "show_name is 1"),  # type: ignore[arg-type]
        (lambda: Initializer("unifrom"), "'unifrom' does not exist.*Did you mean 'uniform'"),
        (lambda: Initializer(3), "the initializer 3 does not exist"),  # type: ignore[arg-type]
        (lambda: Initializer("normal", "a", 1), "'a'; it takes a number"),  # type: ignore[arg-type]
        (lambda: Initializer("uniform", 1, 0), "must not be empty"),
        (lambda: Initializer("normal", 0, -1), "must not be negative"),
        (lambda: Initializer("constant", INFINITE), "must be finite"),
        (lambda: Accessor("CtrComonAccessor"), "Did you mean 'CtrCommonAccessor'"),
        (lambda: Accessor(3), "the accessor 3 does not exist"),  # type: ignore[arg-type]
        (lambda: Accessor("CtrDymfAccessor"), "GPU memory"),
        *((lambda name=name: Accessor(**{name: "x"}), f"{name} is 'x'; it takes")
          for name in Accessor.__dataclass_fields__ if name != "kind"),
        (lambda: Accessor(nonclk_coeff=NAN), "nonclk_coeff is nan; it takes a finite number"),
        (lambda: Accessor(show_click_decay_rate=2), r"must lie in \[0, 1\]"),
        (lambda: Accessor(delete_after_unseen_days=-1), "is -1; it takes days, 0 or more"),
        (lambda: Accessor(delta_keep_days=-1), "is -1; it takes days, 0 or more"),
        (lambda: Rule("adagard"), "Did you mean 'adagrad'"),
        (lambda: Rule(3), "the rule 3 does not exist"),  # type: ignore[arg-type]
        (lambda: Rule("sgd", 3), "are 3; they are a dictionary"),  # type: ignore[arg-type]
        (lambda: Rule("sgd", {"lr": 1}), "does not read 'lr'; it reads"),
        (lambda: Rule("sgd", {"learning_rate": -1}), "is -1; it must be finite in float32 and not negative"),
        (lambda: Rule("adam", {"beta1": 2}), r"beta1 is 2; it must lie in \[0, 1\]"),
        (lambda: Rule("adam", {"epsilon": "x"}), "epsilon is 'x'; it takes a number"),
        (lambda: fleet.StrategyFactory.create_geo_strategy(0), r"update_frequency=0\) takes an integer of 1"),
        (lambda: fleet.MultiSlotDataGenerator().set_batch("x"), r"set_batch\('x'\) takes an integer"),
    ],
)  # fmt: skip
def test_entries_accessors_rules(make: Callable[[], Any], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        make()


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        (3, r"\['ads'\] takes a dictionary, got 3"),
        ({"embedx_treshold": 1}, "does not exist.*Did you mean 'embedx_threshold'"),
        ({"sparse_optimizer": "adagard"}, "is 'adagard'; one of"),
        ({"sparse_optimizer": 3}, "is 3; one of"),
        ({"learning_rate": "x"}, "learning_rate is 'x'; it takes a number"),
        ({"learning_rate": -1}, "must be finite in float32 and not negative"),
        ({"initial_range": "x"}, "initial_range is 'x'; it takes a number"),
        ({"initial_range": -1}, "must not be empty"),
        ({"weight_bounds": 3}, "weight_bounds is 3; it takes two numbers"),
        ({"weight_bounds": [1, -1]}, "must not exceed"),
        ({"embedx_threshold": "x"}, "embedx_threshold is 'x'; it takes a finite number"),
        ({"zero_init": "x"}, "zero_init is 'x'; it takes True or False"),
        ({"delete_after_unseen_days": -1}, "0 or more"),
        ({"sparse_accessor_class": 3}, "the accessor 3 does not exist"),
        ({"embedx_dim": "x"}, "embedx_dim is 'x'"),
        ({"shard_num": 3}, "cannot be honoured"),
        ({"sparse_table_class": "x"}, "MemorySparseTable or"),
        ({"enable_cache": True}, "cannot be honoured"),
    ],
)
def test_sparse_table_configs(settings: Any, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        configure_table(SparseTableConfig("ads", 9), settings)


@pytest.fixture(scope="module")
def worker() -> Iterator[Fleet]:
    own = Fleet()
    own.init(strategy=strategy("sync"), log_level="ERROR")
    served(own, strategy("sync"), make_sgd)
    yield own
    own.stop_worker()
    own.session.close()


CALLS: list[tuple[str, dict[str, Any], str]] = [
    *(
        ("save_persistables", {"dirname": value}, "takes the path of a folder")
        for value in (None, 3, "", b"x", __file__)
    ),
    *(("save_persistables", {"dirname": "x", "mode": value}, "it must be 0") for value in (4, -1, "0", True, 1.0)),
    ("save_inference_model", {"dirname": 3}, "takes the path of a folder"),
    ("save_inference_model", {"dirname": "x", "mode": 9}, "it must be 0"),
    *(
        ("save_one_table", {"table_id": value, "path": "x"}, "does not exist; the tables are")
        for value in (9, "0", True)
    ),
    ("save_one_table", {"table_id": 0, "path": 3}, "takes the path of a folder"),
    ("save_one_table", {"table_id": 0, "path": "x", "mode": "1"}, "it must be 0"),
    *(("load_model", {"path": value}, "takes the path of a folder") for value in (3, "", __file__)),
    ("load_model", {"path": "x", "mode": 7}, "it must be 0"),
    ("load_one_table", {"table_id": 7, "path": "x"}, "does not exist; the tables are"),
    ("load_one_table", {"table_id": 0, "path": 3}, "takes the path of a folder"),
    *(("shrink", {"threshold": value}, "takes a number of 0 or more") for value in ("x", NAN, INFINITE, True, -1, [1])),
    ("set_date", {"table_id": 9, "day_id": "20260101"}, "does not exist; the tables are"),
    *(("set_date", {"table_id": 0, "day_id": value}, "takes the day") for value in (None, 3.5, "", [], True)),
    ("print_table_stat", {"table_id": 9}, "does not exist; the tables are"),
    ("print_table_stat", {"table_id": 0, "threshold": 1.0}, "without a threshold; use 0"),
    ("print_table_stat", {"table_id": 0, "pass_id": "x"}, "takes an integer"),
    ("init_worker", {}, "called twice"),
    ("init_server", {}, "for servers; this process is a worker"),
]


@pytest.mark.parametrize(
    ("call", "arguments", "rule"), [pytest.param(*case, id=f"{case[0]}-{case[1]!r}") for case in CALLS]
)
def test_calls_of_a_worker(
    call: str,
    arguments: dict[str, Any],
    rule: str,
    worker: Fleet,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = worker.session.server_job.running()
    records = trainer.connection.client.stat()[0]["records"]
    with pytest.raises(FleetError, match=rule):
        getattr(worker, call)(**arguments)
    assert trainer.connection.client.stat()[0]["records"] == records  # no server has changed
    assert not list(tmp_path.iterdir())


def test_a_save_that_is_not_there_is_named_and_the_tables_stay(worker: Fleet, tmp_path: Path) -> None:
    before = worker.session.models[0].state_dict()["words.weight"].clone()
    with pytest.raises(FleetError, match=r"no saved table here.*check the directory"):
        worker.load_model(tmp_path / "missing")
    assert torch.equal(worker.session.models[0].state_dict()["words.weight"], before)


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ({"dirname": 3}, r"init_server\(dirname=3\) takes the path of a folder"),
        ({"dirname": b"x"}, r"init_server\(dirname=b'x'\) takes the path of a folder"),
        ({"dirname": ""}, r"init_server\(dirname=''\) takes the path of a folder"),
        ({"dirname": __file__}, "this is a file"),
        ({"dirname": "no/such"}, "there is no such folder"),
        ({"dirname": ".", "var_names": "ads"}, "takes a list of names"),
        ({"dirname": ".", "var_names": 3}, "takes a list of names"),
        ({"dirname": ".", "var_names": [3]}, "takes a list of names"),
        (
            {"dirname": ".", "var_names": ["add"]},
            r"var_names: 'add' is not a sparse table of this model; those are \['ads'",
        ),
        ({"var_names": ["ads"]}, "give the folder as dirname"),
    ],
)
def test_init_server(arguments: dict[str, Any], rule: str) -> None:
    """003-07, 002-19: nothing is kept of a call that fails, so the server does not run."""
    own = Fleet()
    role = UserDefinedRoleMaker(current_id=0, role=Role.SERVER, worker_num=1, server_endpoints=["127.0.0.1:1"])
    own.init(role, strategy=strategy("sync"), log_level="ERROR")
    net = WideAndDeep()
    own.distributed_optimizer(make_sgd(net.parameters()), strategy("sync"))
    own.distributed_model(net)
    with pytest.raises(ConfigError, match=rule):
        own.init_server(**arguments)
    with pytest.raises(FleetError, match=r"run_server\(\) needs fleet.init_server\(\) first"):
        own.run_server()
    own.session.close()


VARIABLES = {
    "FLEET_PS_DEADLINE": ["0", "-1", "x", "nan", "inf"],
    "FLEET_PS_LEASE": ["0", "x", "nan"],
    "FLEET_PS_LEVEL": ["3", "4", "x", "2"],
    "FLEET_PS_SKIP_DAMAGE": ["x", "2"],
    "FLEET_PS_STANDBY": ["x", "1"],
    "FLEET_PS_STANDBY_ENDPOINTS": ["127.0.0.1:1"],
    "FLEET_PS_METRICS_PORT": ["0", "x", "65535"],
    "FLEET_PS_MAX_CONNECTIONS": ["0", "-1", "x", "1.5"],
    "FLEET_PS_SHARED_MEMORY": ["x", "2"],
    "FLAGS_stop_check_timeout": ["0", "x"],
    "FLAGS_check_nan_inf": ["x"],
    "CPU_NUM": ["0", "-3", "x"],
    **{f"FLAGS_communicator_{name}": ["0", "x"] for name in COUNTS},
    "FLAGS_communicator_independent_recv_thread": ["x", "2"],
}


@pytest.mark.parametrize(("name", "value"), cases(VARIABLES))
def test_variables(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    own = Fleet()

    def start() -> None:
        own.init(strategy=strategy("async"), log_level="ERROR")
        served(own, strategy("async"), make_sgd)

    with pytest.raises(ConfigError, match="takes|it is|is not set") as caught:
        start()
    assert f"{name} is {value!r} in the environment" in str(caught.value)
    if own._session is not None:
        assert own.session.server_job.trainer is None
        own.session.close()


def test_a_refused_setting_leaves_no_server_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEET_PS_DEADLINE", "0")
    own = Fleet()
    own.init(strategy=strategy("async"), log_level="ERROR")
    before = set(threading.enumerate())
    with pytest.raises(ConfigError, match="FLEET_PS_DEADLINE is '0'"):
        served(own, strategy("async"), make_sgd)
    assert not [thread.name for thread in threading.enumerate() if thread not in before]
    own.session.close()


def test_every_variable_of_parameter_servers_is_tried() -> None:
    from fleet.env import VARIABLES as KNOWN

    own = {name for name in KNOWN if name.startswith(("FLEET_PS_", "FLAGS_communicator_"))}
    files = {"FLEET_PS_CERT", "FLEET_PS_KEY", "FLEET_PS_CA"}  # tests/fleet/ps_job/test_server_tls.py tries these
    launcher = {"FLEET_PS_SOCKET", "FLEET_PS_SHARD_ENDPOINTS"}  # tests/fleet/ps_job/test_server_settings.py tries these
    assert own - set(VARIABLES) == {"FLEET_PS_FOLDER"} | files | launcher  # any text is a path
