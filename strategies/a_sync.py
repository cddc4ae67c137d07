"""a_sync: training with parameter servers: synchronous, asynchronous, or geo (local training, periodic exchange).

``a_sync = False`` is synchronous, ``True`` asynchronous, and ``True`` with ``a_sync_configs['k_steps']`` above 0 geo.
Left untouched it is asynchronous. It plays no part in a collective job.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fleet.errors import ConfigError
from fleet.strategies._base import NOT_YET, Stage, Strategy, Values
from fleet.strategies._config import Config, setting

_GPU_TABLES = "tables live in the servers' host memory; there are none on GPUs"


@dataclass(frozen=True, kw_only=True)
class ASyncConfig(Config, option="a_sync_configs"):
    """How workers and servers exchange."""

    k_steps: int = setting(
        -1, "0: every step; above 0: geo, exchange every k steps; assigning a_sync sets it to 0", at_least=-1
    )
    max_merge_var_num: int = setting(1, "gradients that are added up before they are sent", at_least=1)
    send_queue_size: int = setting(16, "gradients of a parameter that may wait to be sent", at_least=1)
    independent_recv_thread: bool = setting(False, "pull parameters in a thread of its own")
    min_send_grad_num_before_recv: int = setting(1, "gradients to send before parameters are pulled again", at_least=0)
    thread_pool_size: int = setting(1, "threads that send", at_least=1)
    send_wait_times: int = setting(1, "times 10 ms that a sender waits for max_merge_var_num gradients", at_least=0)
    runtime_split_send_recv: bool = setting(
        False, "internal switch of Paddle", no_meaning="it splits operators of a static program, and torch runs none"
    )
    launch_barrier: bool = setting(True, "workers and servers wait for each other at the start")
    heter_worker_device_guard: str = setting(
        "cpu", "device of a heterogeneous worker", refused="workers of a second kind are not offered; leave it 'cpu'"
    )
    lr_decay_steps: int = setting(10, "steps per tick of the learning-rate decay on the servers", at_least=1)
    use_ps_gpu: int = setting(0, "1 keeps the tables on GPUs", choices=(0, 1), refused=_GPU_TABLES)
    use_gpu_graph: int = setting(0, "1 keeps a graph table on GPUs", choices=(0, 1), refused=_GPU_TABLES)


@dataclass(frozen=True, kw_only=True)
class TrainerDescConfig(Config, option="trainer_desc_configs"):
    """What ``train_from_dataset`` writes while it trains."""

    dump_fields_path: str = setting("", "folder for the dumped values")
    dump_fields: tuple[str, ...] = setting([], "outputs to dump, sample by sample")
    dump_param: tuple[str, ...] = setting([], "parameters to dump, batch by batch")
    stat_var_names: tuple[str, ...] = setting([], "values to add up over the workers")
    trainer: str = setting("", "class of Paddle's trainer", no_meaning="there is one trainer: the user's loop")
    device_worker: str = setting("", "class of Paddle's worker", no_meaning="there is one worker: the user's loop")
    local_sparse: tuple[str, ...] = setting(
        [], "tables kept on the worker", no_meaning="Paddle's worker classes read it, and there are none"
    )
    remote_sparse: tuple[str, ...] = setting(
        [], "tables kept on the servers", no_meaning="Paddle's worker classes read it, and there are none"
    )


@dataclass(frozen=True, kw_only=True)
class FsClientConfig(Config, option="fs_client_param"):
    """The Hadoop file system the servers save to."""

    uri: str = setting("", "address of the file system")
    user: str = setting("", "user name")
    passwd: str = setting("", "password")
    hadoop_bin: str = setting("", "path of the hadoop command")


@dataclass(frozen=True, kw_only=True)
class ParameterServerSettings(Config):
    """Further options of the parameter server."""

    adam_d2sum: bool = setting(False, "Update dense tables with the server's Adam with decaying sums of squares.")
    trainer_desc_configs: TrainerDescConfig = setting(TrainerDescConfig, "What train_from_dataset writes.")
    sparse_table_configs: dict[str, Any] = setting({}, "Settings of the sparse tables, by name of the table.")
    fleet_desc_configs: dict[str, Any] = setting({}, "The same as a whole description, for older scripts.")
    fs_client_param: FsClientConfig = setting(FsClientConfig, "The Hadoop file system the servers save to.")


class ASync(Strategy):
    """Hands gradients to the servers and takes parameters from them."""

    name = "a_sync"
    meaning = "Parameter-server mode: False synchronous, True asynchronous, True with k_steps > 0 geo."
    stage = Stage.UPDATE
    Config = ASyncConfig
    Settings = ParameterServerSettings
    default = True
    in_collective_job = False
    in_ps_job = True
    also_sets = {"a_sync_configs": {"k_steps": 0}}
    refused = NOT_YET
    model_effect = "looks embedding rows up on the servers"
    optimizer_effect = "sends gradients to the servers, which update, and takes parameters from them"

    @classmethod
    def chosen(cls, options: Values) -> bool:
        """Returns True: every job with servers exchanges with them in one of the modes."""
        return True

    @classmethod
    def problem(cls, options: Values, world_size: int) -> str | None:
        """Returns the reason when geo is asked for without a_sync."""
        try:
            ps_mode(options)
        except ConfigError as error:
            return str(error)
        return None

    @classmethod
    def notes(cls, options: Values, world_size: int) -> tuple[str, ...]:
        """Returns the remark that the mode was left open."""
        if options.is_set("a_sync") or options["a_sync_configs"].k_steps > 0:
            return ()
        return ("a_sync was not set; the job trains asynchronously. Set a_sync to True or False to choose.",)


def ps_mode(options: Values) -> str:
    """Returns ``"sync"``, ``"async"`` or ``"geo"``.

    Raises:
        ConfigError: ``k_steps`` asks for geo while ``a_sync`` is False.

    Example:
        >>> ps_mode({"a_sync": True, "a_sync_configs": ASyncConfig(k_steps=100)})
        'geo'
    """
    k_steps = options["a_sync_configs"].k_steps
    if options["a_sync"]:
        return "geo" if k_steps > 0 else "async"
    if k_steps > 0:
        raise ConfigError(
            f"a_sync is False and a_sync_configs['k_steps'] is {k_steps}; geo training is asynchronous. "
            f"Set a_sync to True before a_sync_configs, or k_steps to 0."
        )
    return "sync"
