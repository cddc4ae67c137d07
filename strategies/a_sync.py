"""a_sync: training with parameter servers: synchronous, asynchronous, or geo (local training, periodic exchange).

``a_sync = False`` is synchronous, ``True`` asynchronous, and ``True`` with ``a_sync_configs['k_steps']`` above 0 geo.
The default is asynchronous. It takes no part in a collective job.

``hybrid_configs = {"dp_degree": number of workers}`` makes the job hybrid: rows follow the mode, while the dense
parameters stay with the workers, who average their gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from fleet.errors import ConfigError, UnsupportedOptionError
from fleet.strategies._declare.fields import Config, Values, setting
from fleet.strategies._declare.strategy import REGISTRY, Guide, JobKind, Stage, top_level
from fleet.strategies._shared.casts import scales_gradients
from fleet.strategies._shared.module_names import check_patterns, find_modules
from fleet.strategies._shared.renormalized import check_renormalized
from fleet.strategies._shared.served_optimizer import ServedOptimizer, check_hooks

if TYPE_CHECKING:
    from fleet.job.job import Job
    from fleet.ps.publishing.publication import Publication

_GPU_TABLES = (
    "tables live in the servers' host memory; there are none on GPUs. For GPU workers that average dense gradients "
    "among themselves set hybrid_configs['dp_degree'] to the number of workers"
)
_HADOOP = "servers save to folders; copy them with fleet.utils.fs.HDFSClient, or mount the file system"
_QUEUE_KEYS = (
    "max_merge_var_num",
    "send_queue_size",
    "independent_recv_thread",
    "min_send_grad_num_before_recv",
    "thread_pool_size",
    "send_wait_times",
)


_NAMES = ("sparse_modules", "unbounded_modules")
_SENT = {
    "sync": "sends gradients to the servers, which average those of all workers and update once per step",
    "async": "sends gradients in the background to the servers, which update with those of each worker as they arrive",
}
_SENT_WHOLE = "sends the sum of CPU_NUM batches to the servers and waits until they have updated"


@dataclass(frozen=True, kw_only=True)
class ASyncConfig(Config, option="a_sync_configs"):
    """How workers and servers exchange."""

    k_steps: int = setting(
        -1, "0: every step; above 0: geo, exchange every k steps; assigning a_sync sets it to 0", at_least=-1
    )
    max_merge_var_num: int = setting(
        1,
        "gradients that are merged before they are sent; at 1 only those of plain SGD are, while they wait",
        at_least=1,
    )
    send_queue_size: int = setting(16, "gradients of a parameter that may wait to be sent", at_least=1)
    independent_recv_thread: bool = setting(False, "pull parameters in a thread of its own")
    min_send_grad_num_before_recv: int = setting(1, "gradients to send before parameters are pulled again", at_least=1)
    thread_pool_size: int = setting(1, "threads that send", at_least=1)
    send_wait_times: int = setting(1, "how many times a sender waits 10 ms for max_merge_var_num gradients", at_least=1)
    max_staleness: int = setting(
        -1,
        "async: no step begins before every worker's gradients up to so many steps earlier are applied; -1: no bound",
        at_least=-1,
    )
    publish: str = setting("", "where the servers send changed rows for serving: redis://host:port/0, folder:/path")
    publish_every_s: float = setting(1.0, "seconds from one delta of published rows to the next", above=0)
    publish_values: str = setting("float32", "how published rows are stored", choices=("float32", "bfloat16", "int8"))
    wire: str = setting(
        "float32",
        "form of rows and dense parameters between workers and servers; int8: row gradients as int8, the rest bfloat16",
        choices=("float32", "bfloat16", "int8"),
    )
    sparse_modules: tuple[str, ...] = setting(
        [],
        "nn.Embedding modules of a plain model to train as nn.Embedding(sparse=True), from their own weights: names as "
        "in model.named_modules(), or patterns such as 'embedding_dict.*'",
    )
    unbounded_modules: tuple[str, ...] = setting(
        [],
        "nn.Embedding modules that become tables of any 64-bit id, as fleet.SparseEmbedding: rows begin uniform in "
        "[-1e-4, 1e-4), or as sparse_table_configs says, not with the module's weights",
    )
    runtime_split_send_recv: bool = setting(
        False, "internal switch of Paddle", no_meaning="it splits operators of a static program, and torch runs none"
    )
    launch_barrier: bool = setting(True, "workers and servers wait for each other at the start")
    heter_worker_device_guard: str = setting(
        "cpu", "device of a heterogeneous worker", refused="workers of a second kind are not offered; leave it 'cpu'"
    )
    lr_decay_steps: int = setting(
        10,
        "steps per tick of the learning-rate decay on the servers",
        at_least=1,
        no_meaning="the servers decay nothing by themselves: they use the rate of worker 0's scheduler at each step",
    )
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

    uri: str = setting("", "address of the file system", refused=_HADOOP)
    user: str = setting("", "user name", refused=_HADOOP)
    passwd: str = setting("", "password", refused=_HADOOP)
    hadoop_bin: str = setting("", "path of the hadoop command", refused=_HADOOP)


@top_level
@dataclass(frozen=True, kw_only=True)
class ParameterServerSettings(Config, owner="a_sync"):
    """Further options of the parameter server."""

    adam_d2sum: bool = setting(False, "Update dense tables with the server's Adam with decaying sums of squares.")
    trainer_desc_configs: TrainerDescConfig = setting(TrainerDescConfig, "What train_from_dataset writes.")
    sparse_table_configs: dict[str, Any] = setting({}, "Settings of the sparse tables, by name of the table.")
    fleet_desc_configs: dict[str, Any] = setting({}, "The same as a whole description, for older scripts.")
    fs_client_param: FsClientConfig = setting(FsClientConfig, "The Hadoop file system the servers save to.")


class ASync(JobKind):
    """Hands gradients to the servers and takes parameters from them."""

    name = "a_sync"
    meaning = "Parameter-server mode: False synchronous, True asynchronous, True with k_steps > 0 geo."
    stage = Stage.UPDATE
    Config = ASyncConfig
    default = True
    in_ps_job = True
    in_place = True
    reads = ("hybrid_configs",)
    also_sets = {"a_sync_configs": {"k_steps": 0}}
    model_effect = "looks embedding rows up on the servers"
    optimizer_effect = "sends gradients to the servers, which update, and takes parameters from them"
    guide = Guide(
        when="The model has embeddings of more ids than a worker can hold, or workers that come and go at their own "
        "pace.",
        cost="A round trip to the servers per step (sync), or parameters that are some steps old (async, geo).",
        formula="sync: one update with the mean gradient of all workers. async: one update for each worker. geo: every "
        "k_steps steps the server adds (local - old) / workers. Hybrid: the workers average dense gradients among "
        "themselves and step alike; rows as in sync or async.",
        source="Li et al., Scaling Distributed Machine Learning with the Parameter Server, OSDI 2014",
        example={"a_sync": True},
    )

    def __init__(self, config: Any, job: Job) -> None:
        super().__init__(config, job)
        self.served: ServedOptimizer | None = None

    @classmethod
    def problem(cls, options: Values, world_size: int) -> str | None:
        """Returns the reason when geo is asked for without a_sync, or hybrid with options that it excludes."""
        try:
            mode = ps_mode(options)
            hybrid = hybrid_problem(options, mode) if is_hybrid(options, world_size) else None
            publication_of(options["a_sync_configs"])
            return staleness_problem(options, mode) or wire_problem(options, mode) or hybrid
        except ConfigError as error:
            return str(error)

    @classmethod
    def notes(cls, options: Values, world_size: int) -> tuple[str, ...]:
        """Returns the remark that the mode was left open."""
        if cls.problem(options, world_size):
            return ()  # the mode is refused
        mode = ps_mode(options)
        config = options["a_sync_configs"]
        default = ASyncConfig()
        found = []
        if mode == "async" and not options.is_set("a_sync"):
            found.append("a_sync was not set; the job trains asynchronously. Set a_sync to True or False to choose.")
        for key in () if mode == "async" else _QUEUE_KEYS:
            if getattr(config, key) != getattr(default, key):
                found.append(f"a_sync_configs[{key!r}] was set and changes nothing: {mode} training has no queues.")
        for key in () if config.publish else ("publish_every_s", "publish_values"):
            if getattr(config, key) != getattr(default, key):
                found.append(
                    f"a_sync_configs[{key!r}] was set and changes nothing: a_sync_configs['publish'] is empty."
                )
        if options.is_set("hybrid_configs") and not is_hybrid(options, world_size):
            found.append(
                "hybrid_configs was set and changes nothing: this is a parameter-server job. Set its dp_degree to the "
                f"number of workers, {world_size}, for workers that average dense gradients among themselves."
            )
        return tuple(found)

    @classmethod
    def effects(cls, options: Values, world_size: int) -> tuple[str, str]:
        """Returns the effects of the mode, or those of every mode where it is refused; and the named rows."""
        model, optimizer = cls._effects_of_mode(options, world_size)
        return model + _named_rows(options), optimizer

    @classmethod
    def _effects_of_mode(cls, options: Values, world_size: int) -> tuple[str, str]:
        if cls.problem(options, world_size):
            return cls.model_effect, cls.optimizer_effect
        mode = ps_mode(options)
        if is_hybrid(options, world_size):
            effect = _hybrid_effect(mode, world_size) + _published(options)
            return cls.model_effect + _start(world_size) + _wait(options), effect
        if mode == "geo":
            steps = options["a_sync_configs"].k_steps
            return (
                "trains rows and dense parameters of its own, which start as the servers have them",
                f"steps here; every {steps} steps it hands the servers what has changed, divided by the number of "
                f"workers, and takes what the others have changed{_published(options)}",
            )
        sent = {**_SENT, "half_async": _SENT_WHOLE}[mode]
        return cls.model_effect + _wait(options), f"{sent}, and takes parameters from them{_published(options)}"

    @property
    def mode(self) -> str:
        """The mode in force: "sync", "half_async", "async" or "geo"."""
        return ps_mode(self.job.options)

    @property
    def staleness(self) -> int | None:
        """The number of other workers' steps that a worker may lack; ``None``: any number."""
        bound: int = self.config.max_staleness
        return bound if bound >= 0 else None

    @property
    def hybrid(self) -> bool:
        """Whether the workers train the dense parameters."""
        return is_hybrid(self.job.options, self.job.world_size)

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raises ConfigError when the servers have no rule for ``optimizer``, or there is one already."""
        # Imported here, as below: a collective job loads nothing of the parameter server.
        from fleet.ps.worker.optimizer_rules import check_geo_optimizer, rule_of_group

        if any(other.user_optimizer is not optimizer for other in self.job.optimizers):
            raise ConfigError(
                "distributed_optimizer() was called twice; a parameter-server job has one optimizer. Put all "
                "parameters into its groups."
            )
        if self.mode == "geo":
            check_geo_optimizer(optimizer)
        for group in optimizer.param_groups:
            if not self.hybrid or _rows_among(group["params"]):
                rule_of_group(optimizer, group)
        check_hooks(optimizer, any(_rows_among(group["params"]) for group in optimizer.param_groups))

    def check_model(self, model: nn.Module) -> None:
        """Raises ConfigError when an embedding cannot be served, or its rows would get scaled gradients."""
        from fleet.ps.embeddings.named_embeddings import check_named
        from fleet.ps.embeddings.served_embedding import has_rows

        for key in _NAMES:
            check_patterns(model, getattr(self.config, key), f"a_sync_configs[{key!r}]", self.job)
        named = self._named(model)
        check_named(model, *named)
        if not (self.hybrid or self.mode == "geo"):
            check_renormalized(model, "the parameter servers hold the weight, and their next values would undo it")
        elif self.job.world_size > 1:
            check_renormalized(model)
        if scales_gradients(self.job.options, self.job.device.type) and (any(named) or has_rows(model)):
            raise UnsupportedOptionError(
                "amp computes in float16 here and scales the backward signal; it unscales the gradients of parameters, "
                "and those of rows on the servers would arrive scaled. bfloat16 needs no scale: set "
                "strategy.amp_configs = {'dtype': 'bfloat16'}."
            )

    def prepare_model(self, model: nn.Module) -> None:
        """Makes every ``nn.Embedding(sparse=True)``, and named embeddings, read rows from the servers."""
        from fleet.ps.embeddings.named_embeddings import serve_named
        from fleet.ps.embeddings.served_embedding import serve_embeddings

        serve_named(*self._named(model))
        serve_embeddings(model)

    def _named(self, model: nn.Module) -> list[dict[str, nn.Module]]:
        return [find_modules(model, getattr(self.config, key)) for key in _NAMES]

    def wrap_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Returns an optimizer whose step pushes and pulls."""
        self.served = ServedOptimizer(optimizer, hybrid=self.hybrid)
        return self.served

    def note_clear(self, parameters: Sequence[Tensor]) -> None:
        """Drops the gradients of rows."""
        if self.served is not None:
            self.served.drop_row_gradients()

    def close(self) -> None:
        """Disconnects; the servers wait for this worker to come back unless it has left the job."""
        if self.served is not None and self.served.trainer is not None:
            self.served.trainer.abandon()


def _rows_among(parameters: Iterable[nn.Parameter]) -> bool:
    """Returns whether one of ``parameters`` stands for the rows of a table of unbounded ids."""
    from fleet.ps.embeddings.embedding import SparseEmbedding

    return any(getattr(p, SparseEmbedding.MARK, False) for p in parameters)


def is_hybrid(options: Values, world_size: int) -> bool:
    """Returns whether ``hybrid_configs['dp_degree']`` counts all workers: each then has its own dense parameters.

    The default of -1 leaves them on the servers, so that a job is hybrid only when it says so.
    """
    return bool(options["hybrid_configs"].dp_degree == world_size)


def publication_of(config: ASyncConfig) -> Publication | None:
    """Returns the publication that the keys ``publish*`` describe, or ``None``; raises ConfigError for a wrong sink."""
    if not config.publish:
        return None
    from fleet.ps.publishing.publication import Publication

    return Publication(
        sink=config.publish,
        every_s=config.publish_every_s,
        values=config.publish_values,
        origin=f"a_sync_configs['publish'] = {config.publish!r}",
    )


def staleness_problem(options: Values, mode: str) -> str | None:
    """Returns why a job of this mode cannot bound staleness, or ``None``."""
    bound = options["a_sync_configs"].max_staleness
    if bound < 0 or mode in ("async", "half_async"):
        return None
    why = (
        "a step of sync training always sees all steps before it"
        if mode == "sync"
        else "workers of geo training are k_steps apart by design"
    )
    return (
        f"a_sync_configs['max_staleness'] is {bound} and the mode is {mode}: {why}. Leave it -1, or train "
        "asynchronously: a_sync = True with k_steps 0."
    )


def wire_problem(options: Values, mode: str) -> str | None:
    """Returns why rows of this mode cannot travel rounded, or ``None``."""
    wire = options["a_sync_configs"].wire
    if wire == "float32" or mode != "geo":
        return None
    return (
        f"a_sync_configs['wire'] is {wire!r} and the mode is geo: a worker trains on copies of its own and sends what "
        "has changed in them, so what rounding loses would set its copies apart from the servers' rows for good. Leave "
        "it 'float32', or train with k_steps 0."
    )


def _wait(options: Values) -> str:
    bound = options["a_sync_configs"].max_staleness
    return "" if bound < 0 else f"; waits until every worker's gradients are applied, but for the last {bound} steps"


def _published(options: Values) -> str:
    publication = publication_of(options["a_sync_configs"])
    every = "" if publication is None else f"; the servers publish changed rows every {publication.every_s:g} s"
    return every if publication is None else f"{every} to {publication.address}"


def _named_rows(options: Values) -> str:
    config: ASyncConfig = options["a_sync_configs"]
    found = "; rows with the modules' own weights: " + ", ".join(config.sparse_modules) if config.sparse_modules else ""
    if config.unbounded_modules:
        found += "; tables of any 64-bit id, with new rows: " + ", ".join(config.unbounded_modules)
    return found


def _start(world_size: int) -> str:
    return "" if world_size == 1 else "; dense parameters and buffers start as worker 0's"


def _hybrid_effect(mode: str, world_size: int) -> str:
    alone = world_size == 1
    average = "" if alone else f"averages dense gradients over the {world_size} workers and "
    rates = "" if alone else ", with worker 0's learning rates"
    return f"{average}steps dense parameters here{rates}; of rows it {_SENT[mode]}"


def hybrid_problem(options: Values, mode: str) -> str | None:
    """Returns why a hybrid job cannot have these options, or ``None``."""
    asked = "hybrid_configs['dp_degree'] is the number of workers, so they average dense gradients in every step"
    if mode in ("geo", "half_async"):
        return (
            f"{asked}, and the mode is {mode}, in which no worker waits for another. Use a_sync = False or True, with "
            "k_steps 0, or leave dp_degree -1."
        )
    if options["adam_d2sum"]:
        return f"{asked}, and adam_d2sum is a rule of servers for dense tables. Turn it off, or leave dp_degree -1."
    if options["hybrid_configs"].sharding_degree > 1:
        return (
            f"{asked}, and hybrid_configs['sharding_degree'] is {options['hybrid_configs'].sharding_degree}: with "
            "parameter servers every worker holds all dense parameters. Leave it 1."
        )
    others = (s for s in REGISTRY.values() if not s.in_ps_job and not s.refused and not issubclass(s, JobKind))
    on = sorted(strategy.name for strategy in others if strategy.chosen(options))
    if on:
        return (
            f"{asked}, and {', '.join(on)} would act on the dense half of the model alone, which a job with parameter "
            "servers does not offer. Turn it off."
        )
    if options["asp"]:
        return (
            f"{asked}, even when a worker has run out of batches, and asp would not mask weights after such a step. "
            "Turn it off, or leave dp_degree -1."
        )
    return None


def ps_mode(options: Values) -> str:
    """Returns ``"sync"``, ``"half_async"`` (of a strategy that ``StrategyFactory`` made), ``"async"`` or ``"geo"``.

    Raises:
        ConfigError: ``k_steps`` asks for geo while ``a_sync`` is False.

    Example:
        >>> ps_mode({"a_sync": True, "a_sync_configs": ASyncConfig(k_steps=100)})
        'geo'
    """
    k_steps = options["a_sync_configs"].k_steps
    if options["a_sync"]:
        return "geo" if k_steps > 0 else "half_async" if getattr(options, "_half_async", False) else "async"
    if k_steps > 0:
        raise ConfigError(
            f"a_sync is False and a_sync_configs['k_steps'] is {k_steps}; geo training is asynchronous. "
            f"Set a_sync to True before a_sync_configs, or k_steps to 0."
        )
    return "sync"
