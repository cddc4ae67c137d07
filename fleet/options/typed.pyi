# Made by `make docs`; a change belongs into the code that it is made from.
# mypy: disable-error-code="override"
# The keys of a view are fixed; those of a dict are any text.
"""The options of DistributedStrategy as type checkers and editors see them."""

from typing import Any, Literal, TypeAlias, TypedDict, overload

from typing_extensions import Unpack

from fleet.options import BuildStrategy, ExecutionStrategy
from fleet.options.views import ConfigView

class ASyncConfigDict(TypedDict, total=False):
    """The keys of a_sync_configs."""

    k_steps: int
    """0: every step; above 0: geo, exchange every k steps; assigning a_sync sets it to 0. Default: -1."""
    max_merge_var_num: int
    """Gradients that are merged before they are sent; at 1 only those of plain SGD are, while they wait. Default:
    1.
    """
    send_queue_size: int
    """Gradients of a parameter that may wait to be sent. Default: 16."""
    independent_recv_thread: bool
    """Pull parameters in a thread of its own. Default: False."""
    min_send_grad_num_before_recv: int
    """Gradients to send before parameters are pulled again. Default: 1."""
    thread_pool_size: int
    """Threads that send. Default: 1."""
    send_wait_times: int
    """How many times a sender waits 10 ms for max_merge_var_num gradients. Default: 1."""
    max_staleness: int
    """Async: no step begins before every worker's gradients up to so many steps earlier are applied; -1: no bound.
    Default: -1.
    """
    publish: str
    """Where the servers send changed rows for serving: redis://host:port/0, folder:/path. Default: ''."""
    publish_every_s: float
    """Seconds from one delta of published rows to the next. Default: 1.0."""
    publish_values: str
    """How published rows are stored. One of 'float32', 'bfloat16', 'int8'. Default: 'float32'."""
    wire: str
    """Form of rows and dense parameters between workers and servers; int8: row gradients as int8, the rest
    bfloat16. One of 'float32', 'bfloat16', 'int8'. Default: 'float32'.
    """
    sparse_modules: list[str] | tuple[str, ...]
    """Nn.Embedding modules of a plain model to train as nn.Embedding(sparse=True), from their own weights: names as
    in model.named_modules(), or patterns such as 'embedding_dict.*'. Default: [].
    """
    unbounded_modules: list[str] | tuple[str, ...]
    """Nn.Embedding modules that become tables of any 64-bit id, as fleet.SparseEmbedding: rows begin uniform in
    [-1e-4, 1e-4), or as sparse_table_configs says, not with the module's weights. Default: [].
    """
    runtime_split_send_recv: bool
    """Internal switch of Paddle. Accepted with one warning: it splits operators of a static program, and torch runs
    none. Default: False.
    """
    launch_barrier: bool
    """Workers and servers wait for each other at the start. Default: True."""
    heter_worker_device_guard: str
    """Device of a heterogeneous worker. Refused: workers of a second kind are not offered; leave it 'cpu'. Default:
    'cpu'.
    """
    lr_decay_steps: int
    """Steps per tick of the learning-rate decay on the servers. Accepted with one warning: the servers decay
    nothing by themselves: they use the rate of worker 0's scheduler at each step. Default: 10.
    """
    use_ps_gpu: int
    """1 keeps the tables on GPUs. Refused: tables live in the servers' host memory; there are none on GPUs. For GPU
    workers that average dense gradients among themselves set hybrid_configs['dp_degree'] to the number of
    workers. One of 0, 1. Default: 0.
    """
    use_gpu_graph: int
    """1 keeps a graph table on GPUs. Refused: tables live in the servers' host memory; there are none on GPUs. For
    GPU workers that average dense gradients among themselves set hybrid_configs['dp_degree'] to the number of
    workers. One of 0, 1. Default: 0.
    """

ASyncConfigKey: TypeAlias = Literal[
    "k_steps",
    "max_merge_var_num",
    "send_queue_size",
    "independent_recv_thread",
    "min_send_grad_num_before_recv",
    "thread_pool_size",
    "send_wait_times",
    "max_staleness",
    "publish",
    "publish_every_s",
    "publish_values",
    "wire",
    "sparse_modules",
    "unbounded_modules",
    "runtime_split_send_recv",
    "launch_barrier",
    "heter_worker_device_guard",
    "lr_decay_steps",
    "use_ps_gpu",
    "use_gpu_graph",
]

class ASyncConfigView(ConfigView):
    """The settings of a_sync_configs; see ASyncConfigDict."""

    k_steps: int
    max_merge_var_num: int
    send_queue_size: int
    independent_recv_thread: bool
    min_send_grad_num_before_recv: int
    thread_pool_size: int
    send_wait_times: int
    max_staleness: int
    publish: str
    publish_every_s: float
    publish_values: str
    wire: str
    @property
    def sparse_modules(self) -> list[str]: ...
    @sparse_modules.setter
    def sparse_modules(self, value: list[str] | tuple[str, ...]) -> None: ...
    @property
    def unbounded_modules(self) -> list[str]: ...
    @unbounded_modules.setter
    def unbounded_modules(self, value: list[str] | tuple[str, ...]) -> None: ...
    runtime_split_send_recv: bool
    launch_barrier: bool
    heter_worker_device_guard: str
    lr_decay_steps: int
    use_ps_gpu: int
    use_gpu_graph: int
    @overload
    def __getitem__(
        self,
        key: Literal[
            "k_steps",
            "max_merge_var_num",
            "send_queue_size",
            "min_send_grad_num_before_recv",
            "thread_pool_size",
            "send_wait_times",
            "max_staleness",
            "lr_decay_steps",
            "use_ps_gpu",
            "use_gpu_graph",
        ],
        /,
    ) -> int: ...
    @overload
    def __getitem__(
        self, key: Literal["independent_recv_thread", "runtime_split_send_recv", "launch_barrier"], /
    ) -> bool: ...
    @overload
    def __getitem__(self, key: Literal["publish", "publish_values", "wire", "heter_worker_device_guard"], /) -> str: ...
    @overload
    def __getitem__(self, key: Literal["publish_every_s"], /) -> float: ...
    @overload
    def __getitem__(self, key: Literal["sparse_modules", "unbounded_modules"], /) -> list[str]: ...
    @overload
    def __setitem__(
        self,
        key: Literal[
            "k_steps",
            "max_merge_var_num",
            "send_queue_size",
            "min_send_grad_num_before_recv",
            "thread_pool_size",
            "send_wait_times",
            "max_staleness",
            "lr_decay_steps",
            "use_ps_gpu",
            "use_gpu_graph",
        ],
        value: int,
        /,
    ) -> None: ...
    @overload
    def __setitem__(
        self, key: Literal["independent_recv_thread", "runtime_split_send_recv", "launch_barrier"], value: bool, /
    ) -> None: ...
    @overload
    def __setitem__(
        self, key: Literal["publish", "publish_values", "wire", "heter_worker_device_guard"], value: str, /
    ) -> None: ...
    @overload
    def __setitem__(self, key: Literal["publish_every_s"], value: float, /) -> None: ...
    @overload
    def __setitem__(
        self, key: Literal["sparse_modules", "unbounded_modules"], value: list[str] | tuple[str, ...], /
    ) -> None: ...
    def __delitem__(self, key: ASyncConfigKey, /) -> None: ...
    def pop(self, key: ASyncConfigKey, /, *default: Any) -> Any: ...
    def setdefault(self, key: ASyncConfigKey, default: Any = None, /) -> Any: ...
    def update(self, changes: ASyncConfigDict | ASyncConfigView = ..., /, **keys: Unpack[ASyncConfigDict]) -> None: ...

class AdaptiveLocalsgdConfigDict(TypedDict, total=False):
    """The keys of adaptive_localsgd_configs."""

    init_k_steps: int
    """Steps between two averages at the start. Default: 1."""
    begin_step: int
    """Last step of the start, in which every step averages. Default: 1."""

AdaptiveLocalsgdConfigKey: TypeAlias = Literal["init_k_steps", "begin_step"]

class AdaptiveLocalsgdConfigView(ConfigView):
    """The settings of adaptive_localsgd_configs; see AdaptiveLocalsgdConfigDict."""

    init_k_steps: int
    begin_step: int
    def __getitem__(self, key: Literal["init_k_steps", "begin_step"], /) -> int: ...
    def __setitem__(self, key: Literal["init_k_steps", "begin_step"], value: int, /) -> None: ...
    def __delitem__(self, key: AdaptiveLocalsgdConfigKey, /) -> None: ...
    def pop(self, key: AdaptiveLocalsgdConfigKey, /, *default: Any) -> Any: ...
    def setdefault(self, key: AdaptiveLocalsgdConfigKey, default: Any = None, /) -> Any: ...
    def update(
        self,
        changes: AdaptiveLocalsgdConfigDict | AdaptiveLocalsgdConfigView = ...,
        /,
        **keys: Unpack[AdaptiveLocalsgdConfigDict],
    ) -> None: ...

class AmpConfigDict(TypedDict, total=False):
    """The keys of amp_configs."""

    init_loss_scaling: float
    """Loss scale at the start. Default: 32768.0."""
    incr_every_n_steps: int
    """Finite steps in a row before the scale grows. Default: 1000."""
    decr_every_n_nan_or_inf: int
    """Steps with an inf or nan, since the last finite one, before the scale shrinks. Default: 2."""
    incr_ratio: float
    """Factor by which the scale grows. Default: 2.0."""
    decr_ratio: float
    """Factor by which the scale shrinks; the scale never falls below 1. Default: 0.8."""
    use_dynamic_loss_scaling: bool
    """Let the scale grow and shrink; False keeps init_loss_scaling. Default: True."""
    custom_white_list: list[str] | tuple[str, ...]
    """Modules (class names or qualified names) that compute in the narrow type in any case. Default: []."""
    custom_black_list: list[str] | tuple[str, ...]
    """Modules (class names or qualified names) that compute in float32 in any case. Default: []."""
    custom_black_varnames: list[str] | tuple[str, ...]
    """Qualified names of parameters whose modules compute in float32. Default: []."""
    use_pure_fp16: bool
    """Compute everything but normalisation in float16, with float16 copies of the parameters; the parameters
    themselves stay in float32, as master weights. Default: False.
    """
    use_pure_bf16: bool
    """The same with bfloat16, and no loss scaling. Default: False."""
    use_fp16_guard: bool
    """With use_pure_fp16 or use_pure_bf16, in models that use fleet.fp16_guard(), compute in 16 bit only inside it.
    Default: True.
    """
    use_optimizer_fp16: bool
    """Keep no float32 master weights: with use_pure_fp16 or use_pure_bf16 the parameters are 16-bit. Default:
    False.
    """
    dtype: str
    """The 16-bit type without use_pure_fp16 and use_pure_bf16; 'auto' is float16 on a GPU and bfloat16 on the CPU.
    One of 'auto', 'float16', 'bfloat16'. Default: 'auto'.
    """

AmpConfigKey: TypeAlias = Literal[
    "init_loss_scaling",
    "incr_every_n_steps",
    "decr_every_n_nan_or_inf",
    "incr_ratio",
    "decr_ratio",
    "use_dynamic_loss_scaling",
    "custom_white_list",
    "custom_black_list",
    "custom_black_varnames",
    "use_pure_fp16",
    "use_pure_bf16",
    "use_fp16_guard",
    "use_optimizer_fp16",
    "dtype",
]

class AmpConfigView(ConfigView):
    """The settings of amp_configs; see AmpConfigDict."""

    init_loss_scaling: float
    incr_every_n_steps: int
    decr_every_n_nan_or_inf: int
    incr_ratio: float
    decr_ratio: float
    use_dynamic_loss_scaling: bool
    @property
    def custom_white_list(self) -> list[str]: ...
    @custom_white_list.setter
    def custom_white_list(self, value: list[str] | tuple[str, ...]) -> None: ...
    @property
    def custom_black_list(self) -> list[str]: ...
    @custom_black_list.setter
    def custom_black_list(self, value: list[str] | tuple[str, ...]) -> None: ...
    @property
    def custom_black_varnames(self) -> list[str]: ...
    @custom_black_varnames.setter
    def custom_black_varnames(self, value: list[str] | tuple[str, ...]) -> None: ...
    use_pure_fp16: bool
    use_pure_bf16: bool
    use_fp16_guard: bool
    use_optimizer_fp16: bool
    dtype: str
    @overload
    def __getitem__(self, key: Literal["init_loss_scaling", "incr_ratio", "decr_ratio"], /) -> float: ...
    @overload
    def __getitem__(self, key: Literal["incr_every_n_steps", "decr_every_n_nan_or_inf"], /) -> int: ...
    @overload
    def __getitem__(
        self,
        key: Literal[
            "use_dynamic_loss_scaling", "use_pure_fp16", "use_pure_bf16", "use_fp16_guard", "use_optimizer_fp16"
        ],
        /,
    ) -> bool: ...
    @overload
    def __getitem__(
        self, key: Literal["custom_white_list", "custom_black_list", "custom_black_varnames"], /
    ) -> list[str]: ...
    @overload
    def __getitem__(self, key: Literal["dtype"], /) -> str: ...
    @overload
    def __setitem__(self, key: Literal["init_loss_scaling", "incr_ratio", "decr_ratio"], value: float, /) -> None: ...
    @overload
    def __setitem__(self, key: Literal["incr_every_n_steps", "decr_every_n_nan_or_inf"], value: int, /) -> None: ...
    @overload
    def __setitem__(
        self,
        key: Literal[
            "use_dynamic_loss_scaling", "use_pure_fp16", "use_pure_bf16", "use_fp16_guard", "use_optimizer_fp16"
        ],
        value: bool,
        /,
    ) -> None: ...
    @overload
    def __setitem__(
        self,
        key: Literal["custom_white_list", "custom_black_list", "custom_black_varnames"],
        value: list[str] | tuple[str, ...],
        /,
    ) -> None: ...
    @overload
    def __setitem__(self, key: Literal["dtype"], value: str, /) -> None: ...
    def __delitem__(self, key: AmpConfigKey, /) -> None: ...
    def pop(self, key: AmpConfigKey, /, *default: Any) -> Any: ...
    def setdefault(self, key: AmpConfigKey, default: Any = None, /) -> Any: ...
    def update(self, changes: AmpConfigDict | AmpConfigView = ..., /, **keys: Unpack[AmpConfigDict]) -> None: ...

class AspConfigDict(TypedDict, total=False):
    """The keys of asp_configs."""

    excluded_layers: list[str] | tuple[str, ...]
    """Modules that stay dense, with everything in them: qualified names, or patterns such as 'head*'. Default: []."""

AspConfigKey: TypeAlias = Literal["excluded_layers"]

class AspConfigView(ConfigView):
    """The settings of asp_configs; see AspConfigDict."""
    @property
    def excluded_layers(self) -> list[str]: ...
    @excluded_layers.setter
    def excluded_layers(self, value: list[str] | tuple[str, ...]) -> None: ...
    def __getitem__(self, key: Literal["excluded_layers"], /) -> list[str]: ...
    def __setitem__(self, key: Literal["excluded_layers"], value: list[str] | tuple[str, ...], /) -> None: ...
    def __delitem__(self, key: AspConfigKey, /) -> None: ...
    def pop(self, key: AspConfigKey, /, *default: Any) -> Any: ...
    def setdefault(self, key: AspConfigKey, default: Any = None, /) -> Any: ...
    def update(self, changes: AspConfigDict | AspConfigView = ..., /, **keys: Unpack[AspConfigDict]) -> None: ...

class DgcConfigDict(TypedDict, total=False):
    """The keys of dgc_configs."""

    rampup_begin_step: int
    """First step that compresses; before it, plain momentum. Default: 0."""
    rampup_step: int
    """Steps over which the list of sparsities is walked through. Default: 1."""
    sparsity: list[float] | tuple[float, ...]
    """Shares of entries that are not sent, one after the other; [] means [0.999]. Default: []."""

DgcConfigKey: TypeAlias = Literal["rampup_begin_step", "rampup_step", "sparsity"]

class DgcConfigView(ConfigView):
    """The settings of dgc_configs; see DgcConfigDict."""

    rampup_begin_step: int
    rampup_step: int
    @property
    def sparsity(self) -> list[float]: ...
    @sparsity.setter
    def sparsity(self, value: list[float] | tuple[float, ...]) -> None: ...
    @overload
    def __getitem__(self, key: Literal["rampup_begin_step", "rampup_step"], /) -> int: ...
    @overload
    def __getitem__(self, key: Literal["sparsity"], /) -> list[float]: ...
    @overload
    def __setitem__(self, key: Literal["rampup_begin_step", "rampup_step"], value: int, /) -> None: ...
    @overload
    def __setitem__(self, key: Literal["sparsity"], value: list[float] | tuple[float, ...], /) -> None: ...
    def __delitem__(self, key: DgcConfigKey, /) -> None: ...
    def pop(self, key: DgcConfigKey, /, *default: Any) -> Any: ...
    def setdefault(self, key: DgcConfigKey, default: Any = None, /) -> Any: ...
    def update(self, changes: DgcConfigDict | DgcConfigView = ..., /, **keys: Unpack[DgcConfigDict]) -> None: ...

class Fp16AllreduceConfigDict(TypedDict, total=False):
    """The keys of fp16_allreduce_configs."""

    dtype: str
    """'float16' keeps three decimal digits, 'bfloat16' two, with the range of float32. One of 'float16',
    'bfloat16'. Default: 'float16'.
    """

Fp16AllreduceConfigKey: TypeAlias = Literal["dtype"]

class Fp16AllreduceConfigView(ConfigView):
    """The settings of fp16_allreduce_configs; see Fp16AllreduceConfigDict."""

    dtype: str
    def __getitem__(self, key: Literal["dtype"], /) -> str: ...
    def __setitem__(self, key: Literal["dtype"], value: str, /) -> None: ...
    def __delitem__(self, key: Fp16AllreduceConfigKey, /) -> None: ...
    def pop(self, key: Fp16AllreduceConfigKey, /, *default: Any) -> Any: ...
    def setdefault(self, key: Fp16AllreduceConfigKey, default: Any = None, /) -> Any: ...
    def update(
        self,
        changes: Fp16AllreduceConfigDict | Fp16AllreduceConfigView = ...,
        /,
        **keys: Unpack[Fp16AllreduceConfigDict],
    ) -> None: ...

class GradientMergeConfigDict(TypedDict, total=False):
    """The keys of gradient_merge_configs."""

    k_steps: int
    """Batches per update; 1 changes nothing. Default: 1."""
    avg: bool
    """Divide the sum of the gradients by k_steps. Default: True."""

GradientMergeConfigKey: TypeAlias = Literal["k_steps", "avg"]

class GradientMergeConfigView(ConfigView):
    """The settings of gradient_merge_configs; see GradientMergeConfigDict."""

    k_steps: int
    avg: bool
    @overload
    def __getitem__(self, key: Literal["k_steps"], /) -> int: ...
    @overload
    def __getitem__(self, key: Literal["avg"], /) -> bool: ...
    @overload
    def __setitem__(self, key: Literal["k_steps"], value: int, /) -> None: ...
    @overload
    def __setitem__(self, key: Literal["avg"], value: bool, /) -> None: ...
    def __delitem__(self, key: GradientMergeConfigKey, /) -> None: ...
    def pop(self, key: GradientMergeConfigKey, /, *default: Any) -> Any: ...
    def setdefault(self, key: GradientMergeConfigKey, default: Any = None, /) -> Any: ...
    def update(
        self,
        changes: GradientMergeConfigDict | GradientMergeConfigView = ...,
        /,
        **keys: Unpack[GradientMergeConfigDict],
    ) -> None: ...

class LambConfigDict(TypedDict, total=False):
    """The keys of lamb_configs."""

    lamb_weight_decay: float
    """Weight decay inside the rule; it takes the place of Adam's. Default: 0.01."""
    exclude_from_weight_decay: list[str] | tuple[str, ...]
    """Parameters whose qualified name ends with one of these get no decay. Default: []."""

LambConfigKey: TypeAlias = Literal["lamb_weight_decay", "exclude_from_weight_decay"]

class LambConfigView(ConfigView):
    """The settings of lamb_configs; see LambConfigDict."""

    lamb_weight_decay: float
    @property
    def exclude_from_weight_decay(self) -> list[str]: ...
    @exclude_from_weight_decay.setter
    def exclude_from_weight_decay(self, value: list[str] | tuple[str, ...]) -> None: ...
    @overload
    def __getitem__(self, key: Literal["lamb_weight_decay"], /) -> float: ...
    @overload
    def __getitem__(self, key: Literal["exclude_from_weight_decay"], /) -> list[str]: ...
    @overload
    def __setitem__(self, key: Literal["lamb_weight_decay"], value: float, /) -> None: ...
    @overload
    def __setitem__(self, key: Literal["exclude_from_weight_decay"], value: list[str] | tuple[str, ...], /) -> None: ...
    def __delitem__(self, key: LambConfigKey, /) -> None: ...
    def pop(self, key: LambConfigKey, /, *default: Any) -> Any: ...
    def setdefault(self, key: LambConfigKey, default: Any = None, /) -> Any: ...
    def update(self, changes: LambConfigDict | LambConfigView = ..., /, **keys: Unpack[LambConfigDict]) -> None: ...

class LarsConfigDict(TypedDict, total=False):
    """The keys of lars_configs."""

    lars_coeff: float
    """Trust coefficient: share of the weight's norm that an update may have. Default: 0.001."""
    lars_weight_decay: float
    """Weight decay inside the rule. Default: 0.0005."""
    epsilon: float
    """Added to the denominator of the local rate. Default: 0.0."""
    exclude_from_weight_decay: list[str] | tuple[str, ...]
    """Parameters whose qualified name contains one of these get no decay and the plain learning rate. Default: []."""

LarsConfigKey: TypeAlias = Literal["lars_coeff", "lars_weight_decay", "epsilon", "exclude_from_weight_decay"]

class LarsConfigView(ConfigView):
    """The settings of lars_configs; see LarsConfigDict."""

    lars_coeff: float
    lars_weight_decay: float
    epsilon: float
    @property
    def exclude_from_weight_decay(self) -> list[str]: ...
    @exclude_from_weight_decay.setter
    def exclude_from_weight_decay(self, value: list[str] | tuple[str, ...]) -> None: ...
    @overload
    def __getitem__(self, key: Literal["lars_coeff", "lars_weight_decay", "epsilon"], /) -> float: ...
    @overload
    def __getitem__(self, key: Literal["exclude_from_weight_decay"], /) -> list[str]: ...
    @overload
    def __setitem__(self, key: Literal["lars_coeff", "lars_weight_decay", "epsilon"], value: float, /) -> None: ...
    @overload
    def __setitem__(self, key: Literal["exclude_from_weight_decay"], value: list[str] | tuple[str, ...], /) -> None: ...
    def __delitem__(self, key: LarsConfigKey, /) -> None: ...
    def pop(self, key: LarsConfigKey, /, *default: Any) -> Any: ...
    def setdefault(self, key: LarsConfigKey, default: Any = None, /) -> Any: ...
    def update(self, changes: LarsConfigDict | LarsConfigView = ..., /, **keys: Unpack[LarsConfigDict]) -> None: ...

class LocalsgdConfigDict(TypedDict, total=False):
    """The keys of localsgd_configs."""

    k_steps: int
    """Steps between two averages. Default: 1."""
    begin_step: int
    """Last step of the start, in which every step averages. Default: 1."""

LocalsgdConfigKey: TypeAlias = Literal["k_steps", "begin_step"]

class LocalsgdConfigView(ConfigView):
    """The settings of localsgd_configs; see LocalsgdConfigDict."""

    k_steps: int
    begin_step: int
    def __getitem__(self, key: Literal["k_steps", "begin_step"], /) -> int: ...
    def __setitem__(self, key: Literal["k_steps", "begin_step"], value: int, /) -> None: ...
    def __delitem__(self, key: LocalsgdConfigKey, /) -> None: ...
    def pop(self, key: LocalsgdConfigKey, /, *default: Any) -> Any: ...
    def setdefault(self, key: LocalsgdConfigKey, default: Any = None, /) -> Any: ...
    def update(
        self, changes: LocalsgdConfigDict | LocalsgdConfigView = ..., /, **keys: Unpack[LocalsgdConfigDict]
    ) -> None: ...

class PipelineConfigDict(TypedDict, total=False):
    """The keys of pipeline_configs."""

    micro_batch_size: int
    """Samples per micro-batch. Default: 1."""
    accumulate_steps: int
    """Micro-batches per step; times micro_batch_size, the batch. Default: 1."""
    schedule_mode: str
    """'1F1B' starts backward as early as it can and keeps fewer activations; 'F-then-B' runs all forwards first.
    One of '1F1B', 'F-then-B'. Default: '1F1B'.
    """
    p2p_cache_shape: bool
    """Send the shapes of activations once for each shape of the data; False sends them with every activation.
    Default: True.
    """
    enable_partial_send_recv: bool
    """With tensor parallelism, send a part of each activation and gather it on the other side. Accepted with one
    warning: activations are sent whole: only bandwidth differs, and parts are right for equal activations only.
    Default: True.
    """
    split: list[str] | tuple[str, ...]
    """Cuts a plain model, whose forward calls one layer after the other: the names of the first layer of each stage
    but the first, or 'auto' for stages with about as many parameters. Default: [].
    """

PipelineConfigKey: TypeAlias = Literal[
    "micro_batch_size", "accumulate_steps", "schedule_mode", "p2p_cache_shape", "enable_partial_send_recv", "split"
]

class PipelineConfigView(ConfigView):
    """The settings of pipeline_configs; see PipelineConfigDict."""

    micro_batch_size: int
    accumulate_steps: int
    schedule_mode: str
    p2p_cache_shape: bool
    enable_partial_send_recv: bool
    @property
    def split(self) -> list[str]: ...
    @split.setter
    def split(self, value: list[str] | tuple[str, ...]) -> None: ...
    @overload
    def __getitem__(self, key: Literal["micro_batch_size", "accumulate_steps"], /) -> int: ...
    @overload
    def __getitem__(self, key: Literal["schedule_mode"], /) -> str: ...
    @overload
    def __getitem__(self, key: Literal["p2p_cache_shape", "enable_partial_send_recv"], /) -> bool: ...
    @overload
    def __getitem__(self, key: Literal["split"], /) -> list[str]: ...
    @overload
    def __setitem__(self, key: Literal["micro_batch_size", "accumulate_steps"], value: int, /) -> None: ...
    @overload
    def __setitem__(self, key: Literal["schedule_mode"], value: str, /) -> None: ...
    @overload
    def __setitem__(self, key: Literal["p2p_cache_shape", "enable_partial_send_recv"], value: bool, /) -> None: ...
    @overload
    def __setitem__(self, key: Literal["split"], value: list[str] | tuple[str, ...], /) -> None: ...
    def __delitem__(self, key: PipelineConfigKey, /) -> None: ...
    def pop(self, key: PipelineConfigKey, /, *default: Any) -> Any: ...
    def setdefault(self, key: PipelineConfigKey, default: Any = None, /) -> Any: ...
    def update(
        self, changes: PipelineConfigDict | PipelineConfigView = ..., /, **keys: Unpack[PipelineConfigDict]
    ) -> None: ...

class QatConfigDict(TypedDict, total=False):
    """The keys of qat_configs."""

    channel_wise_abs_max: bool
    """One scale per output channel; False: one per weight. Default: True."""
    weight_bits: int
    """Bits of a weight; 9 to 16 are refused. Default: 8."""
    activation_bits: int
    """Bits of an activation; 9 to 16 are refused. Default: 8."""
    not_quant_pattern: list[str] | tuple[str, ...]
    """Modules whose names contain one of these are left out. Default: []."""
    algo: str
    """Name of the algorithm that observes the ranges. Refused: torchao takes the range of each row of a batch when
    it rounds it, and has no observer to choose. Default: ''.
    """

QatConfigKey: TypeAlias = Literal["channel_wise_abs_max", "weight_bits", "activation_bits", "not_quant_pattern", "algo"]

class QatConfigView(ConfigView):
    """The settings of qat_configs; see QatConfigDict."""

    channel_wise_abs_max: bool
    weight_bits: int
    activation_bits: int
    @property
    def not_quant_pattern(self) -> list[str]: ...
    @not_quant_pattern.setter
    def not_quant_pattern(self, value: list[str] | tuple[str, ...]) -> None: ...
    algo: str
    @overload
    def __getitem__(self, key: Literal["channel_wise_abs_max"], /) -> bool: ...
    @overload
    def __getitem__(self, key: Literal["weight_bits", "activation_bits"], /) -> int: ...
    @overload
    def __getitem__(self, key: Literal["not_quant_pattern"], /) -> list[str]: ...
    @overload
    def __getitem__(self, key: Literal["algo"], /) -> str: ...
    @overload
    def __setitem__(self, key: Literal["channel_wise_abs_max"], value: bool, /) -> None: ...
    @overload
    def __setitem__(self, key: Literal["weight_bits", "activation_bits"], value: int, /) -> None: ...
    @overload
    def __setitem__(self, key: Literal["not_quant_pattern"], value: list[str] | tuple[str, ...], /) -> None: ...
    @overload
    def __setitem__(self, key: Literal["algo"], value: str, /) -> None: ...
    def __delitem__(self, key: QatConfigKey, /) -> None: ...
    def pop(self, key: QatConfigKey, /, *default: Any) -> Any: ...
    def setdefault(self, key: QatConfigKey, default: Any = None, /) -> Any: ...
    def update(self, changes: QatConfigDict | QatConfigView = ..., /, **keys: Unpack[QatConfigDict]) -> None: ...

class RecomputeConfigDict(TypedDict, total=False):
    """The keys of recompute_configs."""

    checkpoints: list[str] | tuple[str, ...]
    """Modules to recompute: qualified names as in model.named_modules(), or patterns such as 'layer*.0'; one that
    runs inside another is computed again with that one. Default: [].
    """
    enable_offload: bool
    """Keep the inputs of the recomputed modules in pinned host memory. Default: False."""
    checkpoint_shape: list[int] | tuple[int, ...]
    """Shape of an offloaded activation, for a static graph. Accepted with one warning: torch knows the shape of
    every activation when it is computed. Default: [].
    """
    enable_tuning: bool
    """Let a tuner choose the modules. Accepted with one warning: it belongs to Paddle's automatic parallelism,
    which has no counterpart here. Default: False.
    """
    refined_ops_patterns: list[dict[str, Any]] | tuple[dict[str, Any], ...]
    """Operator patterns that are not recomputed. Accepted with one warning: it belongs to Paddle's automatic
    parallelism, which has no counterpart here. Default: [].
    """

RecomputeConfigKey: TypeAlias = Literal[
    "checkpoints", "enable_offload", "checkpoint_shape", "enable_tuning", "refined_ops_patterns"
]

class RecomputeConfigView(ConfigView):
    """The settings of recompute_configs; see RecomputeConfigDict."""
    @property
    def checkpoints(self) -> list[str]: ...
    @checkpoints.setter
    def checkpoints(self, value: list[str] | tuple[str, ...]) -> None: ...
    enable_offload: bool
    @property
    def checkpoint_shape(self) -> list[int]: ...
    @checkpoint_shape.setter
    def checkpoint_shape(self, value: list[int] | tuple[int, ...]) -> None: ...
    enable_tuning: bool
    @property
    def refined_ops_patterns(self) -> list[dict[str, Any]]: ...
    @refined_ops_patterns.setter
    def refined_ops_patterns(self, value: list[dict[str, Any]] | tuple[dict[str, Any], ...]) -> None: ...
    @overload
    def __getitem__(self, key: Literal["checkpoints"], /) -> list[str]: ...
    @overload
    def __getitem__(self, key: Literal["enable_offload", "enable_tuning"], /) -> bool: ...
    @overload
    def __getitem__(self, key: Literal["checkpoint_shape"], /) -> list[int]: ...
    @overload
    def __getitem__(self, key: Literal["refined_ops_patterns"], /) -> list[dict[str, Any]]: ...
    @overload
    def __setitem__(self, key: Literal["checkpoints"], value: list[str] | tuple[str, ...], /) -> None: ...
    @overload
    def __setitem__(self, key: Literal["enable_offload", "enable_tuning"], value: bool, /) -> None: ...
    @overload
    def __setitem__(self, key: Literal["checkpoint_shape"], value: list[int] | tuple[int, ...], /) -> None: ...
    @overload
    def __setitem__(
        self, key: Literal["refined_ops_patterns"], value: list[dict[str, Any]] | tuple[dict[str, Any], ...], /
    ) -> None: ...
    def __delitem__(self, key: RecomputeConfigKey, /) -> None: ...
    def pop(self, key: RecomputeConfigKey, /, *default: Any) -> Any: ...
    def setdefault(self, key: RecomputeConfigKey, default: Any = None, /) -> Any: ...
    def update(
        self, changes: RecomputeConfigDict | RecomputeConfigView = ..., /, **keys: Unpack[RecomputeConfigDict]
    ) -> None: ...

class ReproducibleConfigDict(TypedDict, total=False):
    """The keys of reproducible_configs."""

    logical_workers: int
    """Logical workers for the whole training; at least as many as there will ever be processes. Default: 8."""
    threads: int
    """Threads of each process, whatever their number: sums in other threads round differently. Default: 1."""

ReproducibleConfigKey: TypeAlias = Literal["logical_workers", "threads"]

class ReproducibleConfigView(ConfigView):
    """The settings of reproducible_configs; see ReproducibleConfigDict."""

    logical_workers: int
    threads: int
    def __getitem__(self, key: Literal["logical_workers", "threads"], /) -> int: ...
    def __setitem__(self, key: Literal["logical_workers", "threads"], value: int, /) -> None: ...
    def __delitem__(self, key: ReproducibleConfigKey, /) -> None: ...
    def pop(self, key: ReproducibleConfigKey, /, *default: Any) -> Any: ...
    def setdefault(self, key: ReproducibleConfigKey, default: Any = None, /) -> Any: ...
    def update(
        self, changes: ReproducibleConfigDict | ReproducibleConfigView = ..., /, **keys: Unpack[ReproducibleConfigDict]
    ) -> None: ...

class ShardingConfigDict(TypedDict, total=False):
    """The keys of sharding_configs."""

    sharding_degree: int
    """Workers that share one copy of the state; -1 takes all that the other degrees leave. Default: -1."""
    mp_degree: int
    """Workers that share the weights of a layer; 1 leaves it to hybrid_configs. Default: 1."""
    pp_degree: int
    """Stages of the pipeline; 1 leaves it to hybrid_configs. Default: 1."""
    dp_degree: int
    """Copies of the sharded model. Default: 1."""
    stage: int
    """1 divides the optimizer state, 2 the gradients too, 3 the parameters too. One of 1, 2, 3. Default: 1."""
    sharding_segment_strategy: str
    """How the model is cut into units: by size, or at named modules. One of 'segment_broadcast_MB',
    'segment_anchors'. Default: 'segment_broadcast_MB'.
    """
    segment_broadcast_MB: float
    """Size in MiB of a unit that is gathered at once; in stages 1 and 2, of what is sent at once. Default: 32.0."""
    segment_anchors: list[str] | tuple[str, ...]
    """Qualified names of the modules that are units. Default: []."""
    gradient_merge_acc_step: int
    """Batches per update, as gradient_merge has k_steps. Default: 1."""
    hybrid_dp: bool
    """Data parallelism around the shards. Accepted with one warning: it is the old name of dp_degree > 1; set
    dp_degree. Default: False.
    """
    optimize_offload: bool
    """Keep the optimizer state in host memory; in stage 3 the parts and their gradients too. Default: False."""
    optimize_cast: bool
    """Keep casts on the optimizer's side. Accepted with one warning: it rewrites a static program, and torch runs
    none. Default: False.
    """
    pp_allreduce_in_optimize: bool
    """Exchange gradients once per step and not once per micro-batch; torch's schedules always do. Default: False."""
    _dp_as_optimizer_sharding: bool
    """Internal switch of Paddle. Accepted with one warning: it rewrites a static program, and torch runs none.
    Default: False.
    """
    enable_tuning: bool
    """Internal switch of Paddle's tuner. Accepted with one warning: it rewrites a static program, and torch runs
    none. Default: False.
    """
    use_calc_stream: bool
    """Communicate on the compute stream. Accepted with one warning: it rewrites a static program, and torch runs
    none. Default: False.
    """

ShardingConfigKey: TypeAlias = Literal[
    "sharding_degree",
    "mp_degree",
    "pp_degree",
    "dp_degree",
    "stage",
    "sharding_segment_strategy",
    "segment_broadcast_MB",
    "segment_anchors",
    "gradient_merge_acc_step",
    "hybrid_dp",
    "optimize_offload",
    "optimize_cast",
    "pp_allreduce_in_optimize",
    "_dp_as_optimizer_sharding",
    "enable_tuning",
    "use_calc_stream",
]

class ShardingConfigView(ConfigView):
    """The settings of sharding_configs; see ShardingConfigDict."""

    sharding_degree: int
    mp_degree: int
    pp_degree: int
    dp_degree: int
    stage: int
    sharding_segment_strategy: str
    segment_broadcast_MB: float
    @property
    def segment_anchors(self) -> list[str]: ...
    @segment_anchors.setter
    def segment_anchors(self, value: list[str] | tuple[str, ...]) -> None: ...
    gradient_merge_acc_step: int
    hybrid_dp: bool
    optimize_offload: bool
    optimize_cast: bool
    pp_allreduce_in_optimize: bool
    _dp_as_optimizer_sharding: bool
    enable_tuning: bool
    use_calc_stream: bool
    @overload
    def __getitem__(
        self,
        key: Literal["sharding_degree", "mp_degree", "pp_degree", "dp_degree", "stage", "gradient_merge_acc_step"],
        /,
    ) -> int: ...
    @overload
    def __getitem__(self, key: Literal["sharding_segment_strategy"], /) -> str: ...
    @overload
    def __getitem__(self, key: Literal["segment_broadcast_MB"], /) -> float: ...
    @overload
    def __getitem__(self, key: Literal["segment_anchors"], /) -> list[str]: ...
    @overload
    def __getitem__(
        self,
        key: Literal[
            "hybrid_dp",
            "optimize_offload",
            "optimize_cast",
            "pp_allreduce_in_optimize",
            "_dp_as_optimizer_sharding",
            "enable_tuning",
            "use_calc_stream",
        ],
        /,
    ) -> bool: ...
    @overload
    def __setitem__(
        self,
        key: Literal["sharding_degree", "mp_degree", "pp_degree", "dp_degree", "stage", "gradient_merge_acc_step"],
        value: int,
        /,
    ) -> None: ...
    @overload
    def __setitem__(self, key: Literal["sharding_segment_strategy"], value: str, /) -> None: ...
    @overload
    def __setitem__(self, key: Literal["segment_broadcast_MB"], value: float, /) -> None: ...
    @overload
    def __setitem__(self, key: Literal["segment_anchors"], value: list[str] | tuple[str, ...], /) -> None: ...
    @overload
    def __setitem__(
        self,
        key: Literal[
            "hybrid_dp",
            "optimize_offload",
            "optimize_cast",
            "pp_allreduce_in_optimize",
            "_dp_as_optimizer_sharding",
            "enable_tuning",
            "use_calc_stream",
        ],
        value: bool,
        /,
    ) -> None: ...
    def __delitem__(self, key: ShardingConfigKey, /) -> None: ...
    def pop(self, key: ShardingConfigKey, /, *default: Any) -> Any: ...
    def setdefault(self, key: ShardingConfigKey, default: Any = None, /) -> Any: ...
    def update(
        self, changes: ShardingConfigDict | ShardingConfigView = ..., /, **keys: Unpack[ShardingConfigDict]
    ) -> None: ...

class TensorParallelConfigDict(TypedDict, total=False):
    """The keys of tensor_parallel_configs."""

    tensor_parallel_degree: int
    """Workers that share the weights of a layer. Default: 1."""
    tensor_init_seed: int
    """Seed of the shared layers; -1 takes that of rank 0: torch.manual_seed's, else a random one. Default: -1."""
    plan: dict[str, Any]
    """How a plain model is divided: patterns of module names and styles ({'blocks.*.attn.[qkv]': 'column',
    'blocks.*.attn.o': 'row', 'wte': 'vocab'}), or 'auto' for a Hugging Face model's own. Default: {}.
    """

TensorParallelConfigKey: TypeAlias = Literal["tensor_parallel_degree", "tensor_init_seed", "plan"]

class TensorParallelConfigView(ConfigView):
    """The settings of tensor_parallel_configs; see TensorParallelConfigDict."""

    tensor_parallel_degree: int
    tensor_init_seed: int
    plan: dict[str, Any]
    @overload
    def __getitem__(self, key: Literal["tensor_parallel_degree", "tensor_init_seed"], /) -> int: ...
    @overload
    def __getitem__(self, key: Literal["plan"], /) -> dict[str, Any]: ...
    @overload
    def __setitem__(self, key: Literal["tensor_parallel_degree", "tensor_init_seed"], value: int, /) -> None: ...
    @overload
    def __setitem__(self, key: Literal["plan"], value: dict[str, Any], /) -> None: ...
    def __delitem__(self, key: TensorParallelConfigKey, /) -> None: ...
    def pop(self, key: TensorParallelConfigKey, /, *default: Any) -> Any: ...
    def setdefault(self, key: TensorParallelConfigKey, default: Any = None, /) -> Any: ...
    def update(
        self,
        changes: TensorParallelConfigDict | TensorParallelConfigView = ...,
        /,
        **keys: Unpack[TensorParallelConfigDict],
    ) -> None: ...

class ToStaticConfigDict(TypedDict, total=False):
    """The keys of to_static_configs."""

    mode: str
    """What the compiler spends its time on; 'reduce-overhead' records CUDA graphs. One of 'default',
    'reduce-overhead', 'max-autotune', 'max-autotune-no-cudagraphs'. Default: 'default'.
    """
    fullgraph: bool
    """Raise at the first piece of Python that cannot be compiled, and do not split. Default: False."""
    dynamic: bool
    """Compile once for all shapes; False compiles again for each new shape. Default: False."""

ToStaticConfigKey: TypeAlias = Literal["mode", "fullgraph", "dynamic"]

class ToStaticConfigView(ConfigView):
    """The settings of to_static_configs; see ToStaticConfigDict."""

    mode: str
    fullgraph: bool
    dynamic: bool
    @overload
    def __getitem__(self, key: Literal["mode"], /) -> str: ...
    @overload
    def __getitem__(self, key: Literal["fullgraph", "dynamic"], /) -> bool: ...
    @overload
    def __setitem__(self, key: Literal["mode"], value: str, /) -> None: ...
    @overload
    def __setitem__(self, key: Literal["fullgraph", "dynamic"], value: bool, /) -> None: ...
    def __delitem__(self, key: ToStaticConfigKey, /) -> None: ...
    def pop(self, key: ToStaticConfigKey, /, *default: Any) -> Any: ...
    def setdefault(self, key: ToStaticConfigKey, default: Any = None, /) -> Any: ...
    def update(
        self, changes: ToStaticConfigDict | ToStaticConfigView = ..., /, **keys: Unpack[ToStaticConfigDict]
    ) -> None: ...

class TrainerDescConfigDict(TypedDict, total=False):
    """The keys of trainer_desc_configs."""

    dump_fields_path: str
    """Folder for the dumped values. Default: ''."""
    dump_fields: list[str] | tuple[str, ...]
    """Outputs to dump, sample by sample. Default: []."""
    dump_param: list[str] | tuple[str, ...]
    """Parameters to dump, batch by batch. Default: []."""
    stat_var_names: list[str] | tuple[str, ...]
    """Values to add up over the workers. Default: []."""
    trainer: str
    """Class of Paddle's trainer. Accepted with one warning: there is one trainer: the user's loop. Default: ''."""
    device_worker: str
    """Class of Paddle's worker. Accepted with one warning: there is one worker: the user's loop. Default: ''."""
    local_sparse: list[str] | tuple[str, ...]
    """Tables kept on the worker. Accepted with one warning: Paddle's worker classes read it, and there are none.
    Default: [].
    """
    remote_sparse: list[str] | tuple[str, ...]
    """Tables kept on the servers. Accepted with one warning: Paddle's worker classes read it, and there are none.
    Default: [].
    """

TrainerDescConfigKey: TypeAlias = Literal[
    "dump_fields_path",
    "dump_fields",
    "dump_param",
    "stat_var_names",
    "trainer",
    "device_worker",
    "local_sparse",
    "remote_sparse",
]

class TrainerDescConfigView(ConfigView):
    """The settings of trainer_desc_configs; see TrainerDescConfigDict."""

    dump_fields_path: str
    @property
    def dump_fields(self) -> list[str]: ...
    @dump_fields.setter
    def dump_fields(self, value: list[str] | tuple[str, ...]) -> None: ...
    @property
    def dump_param(self) -> list[str]: ...
    @dump_param.setter
    def dump_param(self, value: list[str] | tuple[str, ...]) -> None: ...
    @property
    def stat_var_names(self) -> list[str]: ...
    @stat_var_names.setter
    def stat_var_names(self, value: list[str] | tuple[str, ...]) -> None: ...
    trainer: str
    device_worker: str
    @property
    def local_sparse(self) -> list[str]: ...
    @local_sparse.setter
    def local_sparse(self, value: list[str] | tuple[str, ...]) -> None: ...
    @property
    def remote_sparse(self) -> list[str]: ...
    @remote_sparse.setter
    def remote_sparse(self, value: list[str] | tuple[str, ...]) -> None: ...
    @overload
    def __getitem__(self, key: Literal["dump_fields_path", "trainer", "device_worker"], /) -> str: ...
    @overload
    def __getitem__(
        self, key: Literal["dump_fields", "dump_param", "stat_var_names", "local_sparse", "remote_sparse"], /
    ) -> list[str]: ...
    @overload
    def __setitem__(self, key: Literal["dump_fields_path", "trainer", "device_worker"], value: str, /) -> None: ...
    @overload
    def __setitem__(
        self,
        key: Literal["dump_fields", "dump_param", "stat_var_names", "local_sparse", "remote_sparse"],
        value: list[str] | tuple[str, ...],
        /,
    ) -> None: ...
    def __delitem__(self, key: TrainerDescConfigKey, /) -> None: ...
    def pop(self, key: TrainerDescConfigKey, /, *default: Any) -> Any: ...
    def setdefault(self, key: TrainerDescConfigKey, default: Any = None, /) -> Any: ...
    def update(
        self, changes: TrainerDescConfigDict | TrainerDescConfigView = ..., /, **keys: Unpack[TrainerDescConfigDict]
    ) -> None: ...

class FsClientConfigDict(TypedDict, total=False):
    """The keys of fs_client_param."""

    uri: str
    """Address of the file system. Refused: servers save to folders; copy them with fleet.utils.fs.HDFSClient, or
    mount the file system. Default: ''.
    """
    user: str
    """User name. Refused: servers save to folders; copy them with fleet.utils.fs.HDFSClient, or mount the file
    system. Default: ''.
    """
    passwd: str
    """Password. Refused: servers save to folders; copy them with fleet.utils.fs.HDFSClient, or mount the file
    system. Default: ''.
    """
    hadoop_bin: str
    """Path of the hadoop command. Refused: servers save to folders; copy them with fleet.utils.fs.HDFSClient, or
    mount the file system. Default: ''.
    """

FsClientConfigKey: TypeAlias = Literal["uri", "user", "passwd", "hadoop_bin"]

class FsClientConfigView(ConfigView):
    """The settings of fs_client_param; see FsClientConfigDict."""

    uri: str
    user: str
    passwd: str
    hadoop_bin: str
    def __getitem__(self, key: Literal["uri", "user", "passwd", "hadoop_bin"], /) -> str: ...
    def __setitem__(self, key: Literal["uri", "user", "passwd", "hadoop_bin"], value: str, /) -> None: ...
    def __delitem__(self, key: FsClientConfigKey, /) -> None: ...
    def pop(self, key: FsClientConfigKey, /, *default: Any) -> Any: ...
    def setdefault(self, key: FsClientConfigKey, default: Any = None, /) -> Any: ...
    def update(
        self, changes: FsClientConfigDict | FsClientConfigView = ..., /, **keys: Unpack[FsClientConfigDict]
    ) -> None: ...

class BuildStrategyConfigDict(TypedDict, total=False):
    """The keys of build_strategy."""

    fuse_elewise_add_act_ops: bool
    """Fuse addition and activation. Accepted with one warning: torch.compile fuses what it can; turn to_static on.
    Default: False.
    """
    fuse_bn_act_ops: bool
    """Fuse batch norm and activation. Accepted with one warning: torch.compile fuses what it can; turn to_static
    on. Default: False.
    """
    fuse_relu_depthwise_conv: bool
    """Fuse relu and depthwise convolution. Accepted with one warning: torch.compile fuses what it can; turn
    to_static on. Default: False.
    """
    fuse_broadcast_ops: bool
    """Fuse broadcasts. Accepted with one warning: torch broadcasts parameters in buckets already. Default: False."""
    fuse_all_optimizer_ops: bool
    """Update all parameters in one kernel (fused, else foreach). Default: False."""
    enable_inplace: bool
    """Reuse memory of inputs for outputs. Accepted with one warning: torch's autograd and allocator decide it.
    Default: False.
    """
    enable_backward_optimizer_op_deps: bool
    """Update only after backward. Accepted with one warning: torch runs operators as the script calls them.
    Default: True.
    """
    cache_runtime_context: bool
    """Keep the context of operators. Accepted with one warning: torch runs operators as the script calls them.
    Default: False.
    """
    fuse_bn_add_act_ops: bool
    """Fuse batch norm, addition and activation. Accepted with one warning: torch.compile fuses what it can; turn
    to_static on. Default: True.
    """
    enable_auto_fusion: bool
    """Generate fused kernels. Accepted with one warning: torch.compile fuses what it can; turn to_static on.
    Default: False.
    """
    enable_addto: bool
    """Add gradients in place. Accepted with one warning: torch's autograd and allocator decide it. Default: False."""
    allow_cuda_graph_capture: bool
    """Record and replay CUDA graphs; needs to_static. Default: False."""
    reduce_strategy: int
    """0: all-reduce gradients; 1: reduce each to one worker. Accepted with one warning: gradients are all-reduced;
    to divide the update among workers turn sharding on. One of 0, 1. Default: 0.
    """
    fuse_gemm_epilogue: bool
    """Fuse matrix product and what follows. Accepted with one warning: torch.compile fuses what it can; turn
    to_static on. Default: False.
    """
    debug_graphviz_path: str
    """File to draw the graph into. Accepted with one warning: there is no graph to draw; torch.export prints one.
    Default: ''.
    """
    fused_attention: bool
    """Fuse attention. Accepted with one warning: torch's scaled_dot_product_attention is fused already. Default:
    False.
    """
    fused_feedforward: bool
    """Fuse feed-forward blocks. Accepted with one warning: torch.compile fuses what it can; turn to_static on.
    Default: False.
    """
    fuse_dot_product_attention: bool
    """Fuse dot-product attention. Accepted with one warning: torch's scaled_dot_product_attention is fused already.
    Default: False.
    """
    fuse_resunit: bool
    """Fuse residual units. Accepted with one warning: torch.compile fuses what it can; turn to_static on. Default:
    False.
    """
    fuse_adamw: bool
    """Fuse AdamW. Accepted with one warning: set fuse_all_optimizer_ops, which takes AdamW too. Default: False."""
    fuse_all_reduce_ops: bool
    """Send gradients in buckets. Refused: write strategy.fuse_all_reduce_ops = False. Default: True."""
    sync_batch_norm: bool
    """Batch norm over all workers. Refused: write strategy.sync_batch_norm = True. Default: False."""
    use_hierarchical_allreduce: bool
    """Sum inside each node first. Refused: write strategy.use_hierarchical_allreduce = True. Default: False."""
    hierarchical_allreduce_inter_nranks: int
    """Workers in an inner group. Refused: write strategy.hierarchical_allreduce_inter_nranks. Default: 1."""
    gradient_scale_strategy: int
    """0: divide by the number of workers; 1: do not; 2: the script does. Refused: write
    strategy.gradient_scale_configs = {'scale_strategy': 'sum'} or 'customized'. One of 0, 1, 2. Default: 0.
    """
    async_mode: bool
    """Train asynchronously. Refused: write strategy.a_sync = True, for a job with parameter servers. Default:
    False.
    """
    nccl_comm_num: int
    """Communicators that take turns. Accepted with one warning: NCCL uses several channels by itself. Default: 1."""
    bkcl_comm_num: int
    """Communicators that take turns. Accepted with one warning: NCCL uses several channels by itself. Default: 1."""
    num_trainers: int
    """Number of workers. Accepted with one warning: fleet.init knows it from the launcher or the role maker.
    Default: 1.
    """
    trainer_id: int
    """Rank. Accepted with one warning: fleet.init knows it from the launcher or the role maker. Default: 0."""
    trainers_endpoints: list[str] | tuple[str, ...]
    """Addresses of the workers. Accepted with one warning: fleet.init knows it from the launcher or the role maker.
    Default: [].
    """
    is_distribution: bool
    """Train on several machines. Accepted with one warning: fleet.init knows it from the launcher or the role
    maker. Default: False.
    """
    memory_optimize: bool
    """Reuse memory of what is not needed any more. Accepted with one warning: torch's autograd and allocator decide
    it. Default: False.
    """
    enable_sequential_execution: bool
    """Run in the order of the program. Accepted with one warning: torch runs operators as the script calls them.
    Default: False.
    """
    fix_op_run_order: bool
    """Run in a fixed order. Accepted with one warning: torch runs operators as the script calls them. Default:
    False.
    """
    remove_unnecessary_lock: bool
    """Leave a lock of the executor out. Accepted with one warning: torch has no graph executor. Default: True."""
    cache_expected_kernel: bool
    """Keep the choice of kernels. Accepted with one warning: torch runs operators as the script calls them.
    Default: True.
    """
    mkldnn_enabled_op_types: list[str] | tuple[str, ...]
    """Operators that oneDNN runs. Accepted with one warning: torch uses oneDNN wherever it can. Default: []."""

BuildStrategyConfigKey: TypeAlias = Literal[
    "fuse_elewise_add_act_ops",
    "fuse_bn_act_ops",
    "fuse_relu_depthwise_conv",
    "fuse_broadcast_ops",
    "fuse_all_optimizer_ops",
    "enable_inplace",
    "enable_backward_optimizer_op_deps",
    "cache_runtime_context",
    "fuse_bn_add_act_ops",
    "enable_auto_fusion",
    "enable_addto",
    "allow_cuda_graph_capture",
    "reduce_strategy",
    "fuse_gemm_epilogue",
    "debug_graphviz_path",
    "fused_attention",
    "fused_feedforward",
    "fuse_dot_product_attention",
    "fuse_resunit",
    "fuse_adamw",
    "fuse_all_reduce_ops",
    "sync_batch_norm",
    "use_hierarchical_allreduce",
    "hierarchical_allreduce_inter_nranks",
    "gradient_scale_strategy",
    "async_mode",
    "nccl_comm_num",
    "bkcl_comm_num",
    "num_trainers",
    "trainer_id",
    "trainers_endpoints",
    "is_distribution",
    "memory_optimize",
    "enable_sequential_execution",
    "fix_op_run_order",
    "remove_unnecessary_lock",
    "cache_expected_kernel",
    "mkldnn_enabled_op_types",
]

class BuildStrategyConfigView(ConfigView):
    """The settings of build_strategy; see BuildStrategyConfigDict."""

    fuse_elewise_add_act_ops: bool
    fuse_bn_act_ops: bool
    fuse_relu_depthwise_conv: bool
    fuse_broadcast_ops: bool
    fuse_all_optimizer_ops: bool
    enable_inplace: bool
    enable_backward_optimizer_op_deps: bool
    cache_runtime_context: bool
    fuse_bn_add_act_ops: bool
    enable_auto_fusion: bool
    enable_addto: bool
    allow_cuda_graph_capture: bool
    reduce_strategy: int
    fuse_gemm_epilogue: bool
    debug_graphviz_path: str
    fused_attention: bool
    fused_feedforward: bool
    fuse_dot_product_attention: bool
    fuse_resunit: bool
    fuse_adamw: bool
    fuse_all_reduce_ops: bool
    sync_batch_norm: bool
    use_hierarchical_allreduce: bool
    hierarchical_allreduce_inter_nranks: int
    gradient_scale_strategy: int
    async_mode: bool
    nccl_comm_num: int
    bkcl_comm_num: int
    num_trainers: int
    trainer_id: int
    @property
    def trainers_endpoints(self) -> list[str]: ...
    @trainers_endpoints.setter
    def trainers_endpoints(self, value: list[str] | tuple[str, ...]) -> None: ...
    is_distribution: bool
    memory_optimize: bool
    enable_sequential_execution: bool
    fix_op_run_order: bool
    remove_unnecessary_lock: bool
    cache_expected_kernel: bool
    @property
    def mkldnn_enabled_op_types(self) -> list[str]: ...
    @mkldnn_enabled_op_types.setter
    def mkldnn_enabled_op_types(self, value: list[str] | tuple[str, ...]) -> None: ...
    @overload
    def __getitem__(
        self,
        key: Literal[
            "fuse_elewise_add_act_ops",
            "fuse_bn_act_ops",
            "fuse_relu_depthwise_conv",
            "fuse_broadcast_ops",
            "fuse_all_optimizer_ops",
            "enable_inplace",
            "enable_backward_optimizer_op_deps",
            "cache_runtime_context",
            "fuse_bn_add_act_ops",
            "enable_auto_fusion",
            "enable_addto",
            "allow_cuda_graph_capture",
            "fuse_gemm_epilogue",
            "fused_attention",
            "fused_feedforward",
            "fuse_dot_product_attention",
            "fuse_resunit",
            "fuse_adamw",
            "fuse_all_reduce_ops",
            "sync_batch_norm",
            "use_hierarchical_allreduce",
            "async_mode",
            "is_distribution",
            "memory_optimize",
            "enable_sequential_execution",
            "fix_op_run_order",
            "remove_unnecessary_lock",
            "cache_expected_kernel",
        ],
        /,
    ) -> bool: ...
    @overload
    def __getitem__(
        self,
        key: Literal[
            "reduce_strategy",
            "hierarchical_allreduce_inter_nranks",
            "gradient_scale_strategy",
            "nccl_comm_num",
            "bkcl_comm_num",
            "num_trainers",
            "trainer_id",
        ],
        /,
    ) -> int: ...
    @overload
    def __getitem__(self, key: Literal["debug_graphviz_path"], /) -> str: ...
    @overload
    def __getitem__(self, key: Literal["trainers_endpoints", "mkldnn_enabled_op_types"], /) -> list[str]: ...
    @overload
    def __setitem__(
        self,
        key: Literal[
            "fuse_elewise_add_act_ops",
            "fuse_bn_act_ops",
            "fuse_relu_depthwise_conv",
            "fuse_broadcast_ops",
            "fuse_all_optimizer_ops",
            "enable_inplace",
            "enable_backward_optimizer_op_deps",
            "cache_runtime_context",
            "fuse_bn_add_act_ops",
            "enable_auto_fusion",
            "enable_addto",
            "allow_cuda_graph_capture",
            "fuse_gemm_epilogue",
            "fused_attention",
            "fused_feedforward",
            "fuse_dot_product_attention",
            "fuse_resunit",
            "fuse_adamw",
            "fuse_all_reduce_ops",
            "sync_batch_norm",
            "use_hierarchical_allreduce",
            "async_mode",
            "is_distribution",
            "memory_optimize",
            "enable_sequential_execution",
            "fix_op_run_order",
            "remove_unnecessary_lock",
            "cache_expected_kernel",
        ],
        value: bool,
        /,
    ) -> None: ...
    @overload
    def __setitem__(
        self,
        key: Literal[
            "reduce_strategy",
            "hierarchical_allreduce_inter_nranks",
            "gradient_scale_strategy",
            "nccl_comm_num",
            "bkcl_comm_num",
            "num_trainers",
            "trainer_id",
        ],
        value: int,
        /,
    ) -> None: ...
    @overload
    def __setitem__(self, key: Literal["debug_graphviz_path"], value: str, /) -> None: ...
    @overload
    def __setitem__(
        self, key: Literal["trainers_endpoints", "mkldnn_enabled_op_types"], value: list[str] | tuple[str, ...], /
    ) -> None: ...
    def __delitem__(self, key: BuildStrategyConfigKey, /) -> None: ...
    def pop(self, key: BuildStrategyConfigKey, /, *default: Any) -> Any: ...
    def setdefault(self, key: BuildStrategyConfigKey, default: Any = None, /) -> Any: ...
    def update(
        self,
        changes: BuildStrategyConfigDict | BuildStrategyConfigView = ...,
        /,
        **keys: Unpack[BuildStrategyConfigDict],
    ) -> None: ...

class ExecutionStrategyConfigDict(TypedDict, total=False):
    """The keys of execution_strategy."""

    num_threads: int
    """Threads of the executor. Accepted with one warning: torch has no graph executor. Default: 1."""
    num_iteration_per_drop_scope: int
    """Steps after which temporary variables are dropped. Accepted with one warning: torch has no graph executor.
    Default: 10.
    """
    num_iteration_per_run: int
    """Steps per call of the executor. Accepted with one warning: torch has no graph executor. Default: 1."""
    use_thread_barrier: bool
    """Let threads wait for each other. Accepted with one warning: torch has no graph executor. Default: False."""
    allow_op_delay: bool
    """Let operators wait. Accepted with one warning: torch has no graph executor. Default: False."""
    use_experimental_executor: bool
    """Use another executor. Accepted with one warning: torch has no graph executor. Default: False."""
    use_cuda: bool
    """Run on GPUs. Accepted with one warning: fleet.init chooses the device of each worker. Default: False."""

ExecutionStrategyConfigKey: TypeAlias = Literal[
    "num_threads",
    "num_iteration_per_drop_scope",
    "num_iteration_per_run",
    "use_thread_barrier",
    "allow_op_delay",
    "use_experimental_executor",
    "use_cuda",
]

class ExecutionStrategyConfigView(ConfigView):
    """The settings of execution_strategy; see ExecutionStrategyConfigDict."""

    num_threads: int
    num_iteration_per_drop_scope: int
    num_iteration_per_run: int
    use_thread_barrier: bool
    allow_op_delay: bool
    use_experimental_executor: bool
    use_cuda: bool
    @overload
    def __getitem__(
        self, key: Literal["num_threads", "num_iteration_per_drop_scope", "num_iteration_per_run"], /
    ) -> int: ...
    @overload
    def __getitem__(
        self, key: Literal["use_thread_barrier", "allow_op_delay", "use_experimental_executor", "use_cuda"], /
    ) -> bool: ...
    @overload
    def __setitem__(
        self, key: Literal["num_threads", "num_iteration_per_drop_scope", "num_iteration_per_run"], value: int, /
    ) -> None: ...
    @overload
    def __setitem__(
        self,
        key: Literal["use_thread_barrier", "allow_op_delay", "use_experimental_executor", "use_cuda"],
        value: bool,
        /,
    ) -> None: ...
    def __delitem__(self, key: ExecutionStrategyConfigKey, /) -> None: ...
    def pop(self, key: ExecutionStrategyConfigKey, /, *default: Any) -> Any: ...
    def setdefault(self, key: ExecutionStrategyConfigKey, default: Any = None, /) -> Any: ...
    def update(
        self,
        changes: ExecutionStrategyConfigDict | ExecutionStrategyConfigView = ...,
        /,
        **keys: Unpack[ExecutionStrategyConfigDict],
    ) -> None: ...

class GradientScaleConfigDict(TypedDict, total=False):
    """The keys of gradient_scale_configs."""

    scale_strategy: str
    """'avg' divides the sum by the number of workers; 'sum' and 'customized' leave the sum, for a loss that the
    script scales itself. One of 'avg', 'sum', 'customized'. Default: 'avg'.
    """
    scale_gradient: bool
    """Scale the gradients and not the loss. Accepted with one warning: torch always scales the gradients and never
    the loss; both give the same numbers. Default: False.
    """

GradientScaleConfigKey: TypeAlias = Literal["scale_strategy", "scale_gradient"]

class GradientScaleConfigView(ConfigView):
    """The settings of gradient_scale_configs; see GradientScaleConfigDict."""

    scale_strategy: str
    scale_gradient: bool
    @overload
    def __getitem__(self, key: Literal["scale_strategy"], /) -> str: ...
    @overload
    def __getitem__(self, key: Literal["scale_gradient"], /) -> bool: ...
    @overload
    def __setitem__(self, key: Literal["scale_strategy"], value: str, /) -> None: ...
    @overload
    def __setitem__(self, key: Literal["scale_gradient"], value: bool, /) -> None: ...
    def __delitem__(self, key: GradientScaleConfigKey, /) -> None: ...
    def pop(self, key: GradientScaleConfigKey, /, *default: Any) -> Any: ...
    def setdefault(self, key: GradientScaleConfigKey, default: Any = None, /) -> Any: ...
    def update(
        self,
        changes: GradientScaleConfigDict | GradientScaleConfigView = ...,
        /,
        **keys: Unpack[GradientScaleConfigDict],
    ) -> None: ...

class HybridMpConfigDict(TypedDict, total=False):
    """The keys of hybrid_configs['mp_configs']."""

    sync_param: bool
    """After each step make equal the parameters that every worker of the axis holds. Default: True."""
    sync_grad: bool
    """Before each step make their gradients equal. Default: False."""
    sync_moment: bool
    """After each step make their optimizer state equal. Default: False."""
    sync_mode: str
    """'broadcast' copies from the first worker of the axis; 'average' takes the mean. One of 'broadcast',
    'average'. Default: 'broadcast'.
    """
    sync_param_name: list[str] | tuple[str, ...]
    """As the top-level option of that name; [] means its value. Default: []."""
    need_broadcast_data: bool
    """Copy the inputs of forward from the first worker of the axis, and warn where they differed; False raises
    then. Default: True.
    """
    mp_async_allreduce: bool
    """Overlap gradient all-reduce and product. Accepted with one warning: torch overlaps such pairs by itself when
    the model is compiled. Default: False.
    """
    mp_fused_linear_param_grad_add: bool
    """Fuse gradient product and sum. Accepted with one warning: torch overlaps such pairs by itself when the model
    is compiled. Default: False.
    """
    sp_async_reduce_scatter: bool
    """Overlap reduce-scatter and product. Accepted with one warning: torch overlaps such pairs by itself when the
    model is compiled. Default: False.
    """
    mp_skip_c_identity: bool
    """Leave an operator out that does nothing forward. Accepted with one warning: torch has no such operator.
    Default: False.
    """
    recompute_allgather: bool
    """Gather the input of ColumnSequenceParallelLinear again in backward in place of keeping it. Default: False."""

HybridMpConfigKey: TypeAlias = Literal[
    "sync_param",
    "sync_grad",
    "sync_moment",
    "sync_mode",
    "sync_param_name",
    "need_broadcast_data",
    "mp_async_allreduce",
    "mp_fused_linear_param_grad_add",
    "sp_async_reduce_scatter",
    "mp_skip_c_identity",
    "recompute_allgather",
]

class HybridMpConfigView(ConfigView):
    """The settings of hybrid_configs['mp_configs']; see HybridMpConfigDict."""

    sync_param: bool
    sync_grad: bool
    sync_moment: bool
    sync_mode: str
    @property
    def sync_param_name(self) -> list[str]: ...
    @sync_param_name.setter
    def sync_param_name(self, value: list[str] | tuple[str, ...]) -> None: ...
    need_broadcast_data: bool
    mp_async_allreduce: bool
    mp_fused_linear_param_grad_add: bool
    sp_async_reduce_scatter: bool
    mp_skip_c_identity: bool
    recompute_allgather: bool
    @overload
    def __getitem__(
        self,
        key: Literal[
            "sync_param",
            "sync_grad",
            "sync_moment",
            "need_broadcast_data",
            "mp_async_allreduce",
            "mp_fused_linear_param_grad_add",
            "sp_async_reduce_scatter",
            "mp_skip_c_identity",
            "recompute_allgather",
        ],
        /,
    ) -> bool: ...
    @overload
    def __getitem__(self, key: Literal["sync_mode"], /) -> str: ...
    @overload
    def __getitem__(self, key: Literal["sync_param_name"], /) -> list[str]: ...
    @overload
    def __setitem__(
        self,
        key: Literal[
            "sync_param",
            "sync_grad",
            "sync_moment",
            "need_broadcast_data",
            "mp_async_allreduce",
            "mp_fused_linear_param_grad_add",
            "sp_async_reduce_scatter",
            "mp_skip_c_identity",
            "recompute_allgather",
        ],
        value: bool,
        /,
    ) -> None: ...
    @overload
    def __setitem__(self, key: Literal["sync_mode"], value: str, /) -> None: ...
    @overload
    def __setitem__(self, key: Literal["sync_param_name"], value: list[str] | tuple[str, ...], /) -> None: ...
    def __delitem__(self, key: HybridMpConfigKey, /) -> None: ...
    def pop(self, key: HybridMpConfigKey, /, *default: Any) -> Any: ...
    def setdefault(self, key: HybridMpConfigKey, default: Any = None, /) -> Any: ...
    def update(
        self, changes: HybridMpConfigDict | HybridMpConfigView = ..., /, **keys: Unpack[HybridMpConfigDict]
    ) -> None: ...

class NcclConfigDict(TypedDict, total=False):
    """The keys of nccl_config."""

    commName: str
    """Name of the communicator in NCCL's log. Accepted with one warning: torch tunes NCCL for the whole process;
    set NCCL_ALGO, NCCL_PROTO, NCCL_BUFFSIZE or NCCL_MAX_NCHANNELS. Default: ''.
    """
    ll_buffsize: int
    """Bytes of a buffer of the LL protocol. Accepted with one warning: torch tunes NCCL for the whole process; set
    NCCL_ALGO, NCCL_PROTO, NCCL_BUFFSIZE or NCCL_MAX_NCHANNELS. Default: -1.
    """
    ll128_buffsize: int
    """Bytes of a buffer of the LL128 protocol. Accepted with one warning: torch tunes NCCL for the whole process;
    set NCCL_ALGO, NCCL_PROTO, NCCL_BUFFSIZE or NCCL_MAX_NCHANNELS. Default: -1.
    """
    simple_buffsize: int
    """Bytes of a buffer of the Simple protocol. Accepted with one warning: torch tunes NCCL for the whole process;
    set NCCL_ALGO, NCCL_PROTO, NCCL_BUFFSIZE or NCCL_MAX_NCHANNELS. Default: -1.
    """
    buffsize_align: int
    """Alignment of the buffers in bytes. Accepted with one warning: torch tunes NCCL for the whole process; set
    NCCL_ALGO, NCCL_PROTO, NCCL_BUFFSIZE or NCCL_MAX_NCHANNELS. Default: -1.
    """
    nchannels: int
    """Channels of the communicator. Accepted with one warning: torch tunes NCCL for the whole process; set
    NCCL_ALGO, NCCL_PROTO, NCCL_BUFFSIZE or NCCL_MAX_NCHANNELS. Default: -1.
    """
    algoStr: str
    """Algorithm: Ring or Tree. Accepted with one warning: torch tunes NCCL for the whole process; set NCCL_ALGO,
    NCCL_PROTO, NCCL_BUFFSIZE or NCCL_MAX_NCHANNELS. Default: ''.
    """
    protoStr: str
    """Protocol: LL, LL128 or Simple. Accepted with one warning: torch tunes NCCL for the whole process; set
    NCCL_ALGO, NCCL_PROTO, NCCL_BUFFSIZE or NCCL_MAX_NCHANNELS. Default: ''.
    """

NcclConfigKey: TypeAlias = Literal[
    "commName", "ll_buffsize", "ll128_buffsize", "simple_buffsize", "buffsize_align", "nchannels", "algoStr", "protoStr"
]

class NcclConfigView(ConfigView):
    """The settings of nccl_config; see NcclConfigDict."""

    commName: str
    ll_buffsize: int
    ll128_buffsize: int
    simple_buffsize: int
    buffsize_align: int
    nchannels: int
    algoStr: str
    protoStr: str
    @overload
    def __getitem__(self, key: Literal["commName", "algoStr", "protoStr"], /) -> str: ...
    @overload
    def __getitem__(
        self, key: Literal["ll_buffsize", "ll128_buffsize", "simple_buffsize", "buffsize_align", "nchannels"], /
    ) -> int: ...
    @overload
    def __setitem__(self, key: Literal["commName", "algoStr", "protoStr"], value: str, /) -> None: ...
    @overload
    def __setitem__(
        self,
        key: Literal["ll_buffsize", "ll128_buffsize", "simple_buffsize", "buffsize_align", "nchannels"],
        value: int,
        /,
    ) -> None: ...
    def __delitem__(self, key: NcclConfigKey, /) -> None: ...
    def pop(self, key: NcclConfigKey, /, *default: Any) -> Any: ...
    def setdefault(self, key: NcclConfigKey, default: Any = None, /) -> Any: ...
    def update(self, changes: NcclConfigDict | NcclConfigView = ..., /, **keys: Unpack[NcclConfigDict]) -> None: ...

class HybridPpConfigDict(TypedDict, total=False):
    """The keys of hybrid_configs['pp_configs']."""

    dp_comm_overlap: bool
    """Average over copies during the last micro-batch, not after it. Default: False."""
    sharding_comm_overlap: bool
    """The same, for copies along the sharding axis. Default: False."""
    delay_scale_loss: bool
    """Divide the gradients once per step and not the losses. Default: False."""
    enable_timer: bool
    """Measure the phases of a step. Accepted with one warning: torch.profiler shows the same; nothing here measures
    by itself. Default: False.
    """
    profiling: bool
    """Write a profile of the schedule. Accepted with one warning: torch.profiler shows the same; nothing here
    measures by itself. Default: False.
    """
    release_gradients: bool
    """Free the gradients between steps. Accepted with one warning: train_batch() frees them after each step
    already. Default: False.
    """
    overlap_p2p_comm: bool
    """Send and receive while computing. Accepted with one warning: every transfer runs beside the computation
    already. Default: False.
    """
    clear_every_step_cache: bool
    """Give cached device memory back after each step. Default: False."""
    use_batch_p2p_comm: bool
    """Send and receive in one batch of operations. Accepted with one warning: each direction has a stream of its
    own, so transfers need no batch that keeps them apart. Default: True.
    """
    best_unbalanced_scheduler: bool
    """Schedule unequal stages. Refused: with few micro-batches it saves memory of an interleaved order that runs
    all forwards first here; cut unequal layers with seg_method or pipeline_configs['split']. Default: False.
    """
    forward_backward_overlap_scheduler: bool
    """Run the forward of one micro-batch inside the backward of another. Refused: a layer would have to be written
    as a list of parts that take turns, and torch's layers are not. Default: False.
    """
    enable_offload_queue: bool
    """Keep activations in host memory. Refused: activations belong to autograd; recompute_ctx={'offload': True}
    keeps inputs of layers in host memory. Default: False.
    """
    enable_dynamic_shape: bool
    """Send the shape with every activation, for shapes that depend on values and not on those of the data. Default:
    False.
    """
    use_dualpipev: bool
    """Use the DualPipeV schedule. Refused: its stages hold two ends of the model; use 1F1B or chunks. Default:
    False.
    """
    coll_nccl_config: NcclConfigDict | NcclConfigView
    """NCCL settings of collectives."""
    p2p_nccl_config: NcclConfigDict | NcclConfigView
    """NCCL settings of transfers between stages."""
    shared_nccl_config: NcclConfigDict | NcclConfigView
    """NCCL settings of shared parameters."""
    sync_param: bool
    """After each step make equal the parameters that stages share. Default: False."""
    sync_moment: bool
    """After each step make their optimizer state equal. Default: False."""
    sync_mode: str
    """'broadcast' copies from the first worker of the axis; 'average' takes the mean. One of 'broadcast',
    'average'. Default: 'broadcast'.
    """

HybridPpConfigKey: TypeAlias = Literal[
    "dp_comm_overlap",
    "sharding_comm_overlap",
    "delay_scale_loss",
    "enable_timer",
    "profiling",
    "release_gradients",
    "overlap_p2p_comm",
    "clear_every_step_cache",
    "use_batch_p2p_comm",
    "best_unbalanced_scheduler",
    "forward_backward_overlap_scheduler",
    "enable_offload_queue",
    "enable_dynamic_shape",
    "use_dualpipev",
    "coll_nccl_config",
    "p2p_nccl_config",
    "shared_nccl_config",
    "sync_param",
    "sync_moment",
    "sync_mode",
]

class HybridPpConfigView(ConfigView):
    """The settings of hybrid_configs['pp_configs']; see HybridPpConfigDict."""

    dp_comm_overlap: bool
    sharding_comm_overlap: bool
    delay_scale_loss: bool
    enable_timer: bool
    profiling: bool
    release_gradients: bool
    overlap_p2p_comm: bool
    clear_every_step_cache: bool
    use_batch_p2p_comm: bool
    best_unbalanced_scheduler: bool
    forward_backward_overlap_scheduler: bool
    enable_offload_queue: bool
    enable_dynamic_shape: bool
    use_dualpipev: bool
    @property
    def coll_nccl_config(self) -> NcclConfigView: ...
    @coll_nccl_config.setter
    def coll_nccl_config(self, value: NcclConfigDict | NcclConfigView) -> None: ...
    @property
    def p2p_nccl_config(self) -> NcclConfigView: ...
    @p2p_nccl_config.setter
    def p2p_nccl_config(self, value: NcclConfigDict | NcclConfigView) -> None: ...
    @property
    def shared_nccl_config(self) -> NcclConfigView: ...
    @shared_nccl_config.setter
    def shared_nccl_config(self, value: NcclConfigDict | NcclConfigView) -> None: ...
    sync_param: bool
    sync_moment: bool
    sync_mode: str
    @overload
    def __getitem__(
        self,
        key: Literal[
            "dp_comm_overlap",
            "sharding_comm_overlap",
            "delay_scale_loss",
            "enable_timer",
            "profiling",
            "release_gradients",
            "overlap_p2p_comm",
            "clear_every_step_cache",
            "use_batch_p2p_comm",
            "best_unbalanced_scheduler",
            "forward_backward_overlap_scheduler",
            "enable_offload_queue",
            "enable_dynamic_shape",
            "use_dualpipev",
            "sync_param",
            "sync_moment",
        ],
        /,
    ) -> bool: ...
    @overload
    def __getitem__(
        self, key: Literal["coll_nccl_config", "p2p_nccl_config", "shared_nccl_config"], /
    ) -> NcclConfigView: ...
    @overload
    def __getitem__(self, key: Literal["sync_mode"], /) -> str: ...
    @overload
    def __setitem__(
        self,
        key: Literal[
            "dp_comm_overlap",
            "sharding_comm_overlap",
            "delay_scale_loss",
            "enable_timer",
            "profiling",
            "release_gradients",
            "overlap_p2p_comm",
            "clear_every_step_cache",
            "use_batch_p2p_comm",
            "best_unbalanced_scheduler",
            "forward_backward_overlap_scheduler",
            "enable_offload_queue",
            "enable_dynamic_shape",
            "use_dualpipev",
            "sync_param",
            "sync_moment",
        ],
        value: bool,
        /,
    ) -> None: ...
    @overload
    def __setitem__(
        self,
        key: Literal["coll_nccl_config", "p2p_nccl_config", "shared_nccl_config"],
        value: NcclConfigDict | NcclConfigView,
        /,
    ) -> None: ...
    @overload
    def __setitem__(self, key: Literal["sync_mode"], value: str, /) -> None: ...
    def __delitem__(self, key: HybridPpConfigKey, /) -> None: ...
    def pop(self, key: HybridPpConfigKey, /, *default: Any) -> Any: ...
    def setdefault(self, key: HybridPpConfigKey, default: Any = None, /) -> Any: ...
    def update(
        self, changes: HybridPpConfigDict | HybridPpConfigView = ..., /, **keys: Unpack[HybridPpConfigDict]
    ) -> None: ...

class HybridShardingConfigDict(TypedDict, total=False):
    """The keys of hybrid_configs['sharding_configs']."""

    tensor_fusion: bool
    """Keep parameters and gradients in flat buffers. Accepted with one warning: torch groups parameters by module
    and fuses by itself. Default: False.
    """
    accumulate_steps: int
    """Backward passes per exchange, and per step(). Default: 1."""
    comm_overlap: bool
    """Exchange while backward runs; always so here. Default: False."""
    split_param: bool
    """True divides gradients and state inside each tensor, as stage 2; False in stage 1 gives workers whole
    tensors. Default: False.
    """
    fuse_optimizer: bool
    """Update all parameters in one kernel. Accepted with one warning: torch groups parameters by module and fuses
    by itself. Default: True.
    """
    enable_fuse_optimizer_states: bool
    """Keep the states in one buffer. Accepted with one warning: torch groups parameters by module and fuses by
    itself. Default: False.
    """
    use_reduce_avg: bool
    """Average in the reduction; False sums and divides afterwards. Default: True."""
    comm_buffer_size_MB: int
    """Largest unit or buffer, in MiB. Default: 256."""
    release_gradients: bool
    """Free gradient buffers after the exchange. Accepted with one warning: zero_grad() frees the gradients already.
    Default: False.
    """
    free_grads_in_comm: bool
    """Free whole gradients once reduced. Accepted with one warning: torch frees them once they are reduced.
    Default: False.
    """
    offload_opt_buffer_size: int
    """GB of optimizer state in host memory; -1 is none. Accepted with one warning: torch moves all of the optimizer
    state or none; use sharding_configs['optimize_offload']. Default: -1.
    """
    nccl_config: NcclConfigDict | NcclConfigView
    """NCCL settings of the axis."""
    check_nccl_config: NcclConfigDict | NcclConfigView
    """NCCL settings of the check for inf and nan."""

HybridShardingConfigKey: TypeAlias = Literal[
    "tensor_fusion",
    "accumulate_steps",
    "comm_overlap",
    "split_param",
    "fuse_optimizer",
    "enable_fuse_optimizer_states",
    "use_reduce_avg",
    "comm_buffer_size_MB",
    "release_gradients",
    "free_grads_in_comm",
    "offload_opt_buffer_size",
    "nccl_config",
    "check_nccl_config",
]

class HybridShardingConfigView(ConfigView):
    """The settings of hybrid_configs['sharding_configs']; see HybridShardingConfigDict."""

    tensor_fusion: bool
    accumulate_steps: int
    comm_overlap: bool
    split_param: bool
    fuse_optimizer: bool
    enable_fuse_optimizer_states: bool
    use_reduce_avg: bool
    comm_buffer_size_MB: int
    release_gradients: bool
    free_grads_in_comm: bool
    offload_opt_buffer_size: int
    @property
    def nccl_config(self) -> NcclConfigView: ...
    @nccl_config.setter
    def nccl_config(self, value: NcclConfigDict | NcclConfigView) -> None: ...
    @property
    def check_nccl_config(self) -> NcclConfigView: ...
    @check_nccl_config.setter
    def check_nccl_config(self, value: NcclConfigDict | NcclConfigView) -> None: ...
    @overload
    def __getitem__(
        self,
        key: Literal[
            "tensor_fusion",
            "comm_overlap",
            "split_param",
            "fuse_optimizer",
            "enable_fuse_optimizer_states",
            "use_reduce_avg",
            "release_gradients",
            "free_grads_in_comm",
        ],
        /,
    ) -> bool: ...
    @overload
    def __getitem__(
        self, key: Literal["accumulate_steps", "comm_buffer_size_MB", "offload_opt_buffer_size"], /
    ) -> int: ...
    @overload
    def __getitem__(self, key: Literal["nccl_config", "check_nccl_config"], /) -> NcclConfigView: ...
    @overload
    def __setitem__(
        self,
        key: Literal[
            "tensor_fusion",
            "comm_overlap",
            "split_param",
            "fuse_optimizer",
            "enable_fuse_optimizer_states",
            "use_reduce_avg",
            "release_gradients",
            "free_grads_in_comm",
        ],
        value: bool,
        /,
    ) -> None: ...
    @overload
    def __setitem__(
        self, key: Literal["accumulate_steps", "comm_buffer_size_MB", "offload_opt_buffer_size"], value: int, /
    ) -> None: ...
    @overload
    def __setitem__(
        self, key: Literal["nccl_config", "check_nccl_config"], value: NcclConfigDict | NcclConfigView, /
    ) -> None: ...
    def __delitem__(self, key: HybridShardingConfigKey, /) -> None: ...
    def pop(self, key: HybridShardingConfigKey, /, *default: Any) -> Any: ...
    def setdefault(self, key: HybridShardingConfigKey, default: Any = None, /) -> Any: ...
    def update(
        self,
        changes: HybridShardingConfigDict | HybridShardingConfigView = ...,
        /,
        **keys: Unpack[HybridShardingConfigDict],
    ) -> None: ...

class NcclOnlyConfigDict(TypedDict, total=False):
    """The keys of hybrid_configs[...]."""

    nccl_config: NcclConfigDict | NcclConfigView
    """Tuning of the communicator."""

NcclOnlyConfigKey: TypeAlias = Literal["nccl_config"]

class NcclOnlyConfigView(ConfigView):
    """The settings of hybrid_configs[...]; see NcclOnlyConfigDict."""
    @property
    def nccl_config(self) -> NcclConfigView: ...
    @nccl_config.setter
    def nccl_config(self, value: NcclConfigDict | NcclConfigView) -> None: ...
    def __getitem__(self, key: Literal["nccl_config"], /) -> NcclConfigView: ...
    def __setitem__(self, key: Literal["nccl_config"], value: NcclConfigDict | NcclConfigView, /) -> None: ...
    def __delitem__(self, key: NcclOnlyConfigKey, /) -> None: ...
    def pop(self, key: NcclOnlyConfigKey, /, *default: Any) -> Any: ...
    def setdefault(self, key: NcclOnlyConfigKey, default: Any = None, /) -> Any: ...
    def update(
        self, changes: NcclOnlyConfigDict | NcclOnlyConfigView = ..., /, **keys: Unpack[NcclOnlyConfigDict]
    ) -> None: ...

class NcclAndCheckConfigDict(TypedDict, total=False):
    """The keys of hybrid_configs[...]."""

    nccl_config: NcclConfigDict | NcclConfigView
    """Tuning of the communicator."""
    check_nccl_config: NcclConfigDict | NcclConfigView
    """Tuning of the communicator that checks for inf and nan."""

NcclAndCheckConfigKey: TypeAlias = Literal["nccl_config", "check_nccl_config"]

class NcclAndCheckConfigView(ConfigView):
    """The settings of hybrid_configs[...]; see NcclAndCheckConfigDict."""
    @property
    def nccl_config(self) -> NcclConfigView: ...
    @nccl_config.setter
    def nccl_config(self, value: NcclConfigDict | NcclConfigView) -> None: ...
    @property
    def check_nccl_config(self) -> NcclConfigView: ...
    @check_nccl_config.setter
    def check_nccl_config(self, value: NcclConfigDict | NcclConfigView) -> None: ...
    def __getitem__(self, key: Literal["nccl_config", "check_nccl_config"], /) -> NcclConfigView: ...
    def __setitem__(
        self, key: Literal["nccl_config", "check_nccl_config"], value: NcclConfigDict | NcclConfigView, /
    ) -> None: ...
    def __delitem__(self, key: NcclAndCheckConfigKey, /) -> None: ...
    def pop(self, key: NcclAndCheckConfigKey, /, *default: Any) -> Any: ...
    def setdefault(self, key: NcclAndCheckConfigKey, default: Any = None, /) -> Any: ...
    def update(
        self, changes: NcclAndCheckConfigDict | NcclAndCheckConfigView = ..., /, **keys: Unpack[NcclAndCheckConfigDict]
    ) -> None: ...

class NcclTwiceConfigDict(TypedDict, total=False):
    """The keys of hybrid_configs[...]."""

    nccl_config: NcclConfigDict | NcclConfigView
    """Tuning of the communicator."""
    grad_nccl_config: NcclConfigDict | NcclConfigView
    """Tuning of the communicator of the gradients."""

NcclTwiceConfigKey: TypeAlias = Literal["nccl_config", "grad_nccl_config"]

class NcclTwiceConfigView(ConfigView):
    """The settings of hybrid_configs[...]; see NcclTwiceConfigDict."""
    @property
    def nccl_config(self) -> NcclConfigView: ...
    @nccl_config.setter
    def nccl_config(self, value: NcclConfigDict | NcclConfigView) -> None: ...
    @property
    def grad_nccl_config(self) -> NcclConfigView: ...
    @grad_nccl_config.setter
    def grad_nccl_config(self, value: NcclConfigDict | NcclConfigView) -> None: ...
    def __getitem__(self, key: Literal["nccl_config", "grad_nccl_config"], /) -> NcclConfigView: ...
    def __setitem__(
        self, key: Literal["nccl_config", "grad_nccl_config"], value: NcclConfigDict | NcclConfigView, /
    ) -> None: ...
    def __delitem__(self, key: NcclTwiceConfigKey, /) -> None: ...
    def pop(self, key: NcclTwiceConfigKey, /, *default: Any) -> Any: ...
    def setdefault(self, key: NcclTwiceConfigKey, default: Any = None, /) -> Any: ...
    def update(
        self, changes: NcclTwiceConfigDict | NcclTwiceConfigView = ..., /, **keys: Unpack[NcclTwiceConfigDict]
    ) -> None: ...

class HybridConfigDict(TypedDict, total=False):
    """The keys of hybrid_configs."""

    dp_degree: int
    """Copies of the model; -1 takes what the other degrees leave. With parameter servers the number of workers
    makes the job hybrid: they average dense gradients among themselves. Default: -1.
    """
    mp_degree: int
    """Workers that share the weights of a layer. Default: 1."""
    pp_degree: int
    """Stages of the pipeline. Default: 1."""
    sharding_degree: int
    """Workers that share one copy of the state; above 1 turns sharding on. Default: 1."""
    sep_degree: int
    """Workers that share a sequence by segments. Default: 1."""
    cp_degree: int
    """Workers that share a sequence by ring attention; an axis of its own, and with ep_degree above 1 a part of the
    sharding axis. Default: 1.
    """
    ep_degree: int
    """Workers among which the experts of a MoELayer are divided; above 1, dp_degree and sep_degree are 1 and
    moe_sharding_degree * ep_degree is sharding_degree * mp_degree. Default: 1.
    """
    moe_sharding_degree: int
    """Workers that hold the same experts, with ep_degree above 1. Default: 1."""
    cp_sharding_degree: int
    """Sharding_degree / cp_degree, with ep_degree above 1; 1 leaves it to be computed. Default: 1."""
    enable_optimizer_timer: bool
    """Measure the phases of step(). Accepted with one warning: torch.profiler shows the same; nothing here measures
    by itself. Default: False.
    """
    split_norm_comm: bool
    """Sum the gradient norm group by group. Accepted with one warning: it only splits one small all-reduce of the
    gradient norm into several. Default: False.
    """
    order: list[str] | tuple[str, ...]
    """Axes from the outermost to the innermost; [] means hybrid_parallel_order. Default: []."""
    mp_configs: HybridMpConfigDict | HybridMpConfigView
    """Settings of the tensor-parallel axis."""
    pp_configs: HybridPpConfigDict | HybridPpConfigView
    """Settings of the pipeline axis."""
    sharding_configs: HybridShardingConfigDict | HybridShardingConfigView
    """Settings of the sharding axis."""
    default_comm_group_configs: NcclOnlyConfigDict | NcclOnlyConfigView
    """NCCL settings of the default group."""
    dp_configs: NcclAndCheckConfigDict | NcclAndCheckConfigView
    """NCCL settings of the data-parallel axis."""
    sep_configs: NcclOnlyConfigDict | NcclOnlyConfigView
    """NCCL settings of the segment axis."""
    dp_sep_configs: NcclOnlyConfigDict | NcclOnlyConfigView
    """NCCL settings of data-parallel and segment axis."""
    pp_tp_configs: NcclOnlyConfigDict | NcclOnlyConfigView
    """NCCL settings of pipeline and tensor-parallel axis."""
    ep_configs: NcclTwiceConfigDict | NcclTwiceConfigView
    """NCCL settings of the expert axis."""
    moe_sharding_configs: NcclAndCheckConfigDict | NcclAndCheckConfigView
    """NCCL settings of the expert sharding axis."""
    cp_configs: NcclOnlyConfigDict | NcclOnlyConfigView
    """NCCL settings of the context axis."""
    cp_sharding_configs: NcclOnlyConfigDict | NcclOnlyConfigView
    """NCCL settings of context and sharding axis."""
    dp_cp_configs: NcclOnlyConfigDict | NcclOnlyConfigView
    """NCCL settings of data-parallel and context axis."""
    cp_mp_configs: NcclOnlyConfigDict | NcclOnlyConfigView
    """NCCL settings of context and tensor-parallel axis."""

HybridConfigKey: TypeAlias = Literal[
    "dp_degree",
    "mp_degree",
    "pp_degree",
    "sharding_degree",
    "sep_degree",
    "cp_degree",
    "ep_degree",
    "moe_sharding_degree",
    "cp_sharding_degree",
    "enable_optimizer_timer",
    "split_norm_comm",
    "order",
    "mp_configs",
    "pp_configs",
    "sharding_configs",
    "default_comm_group_configs",
    "dp_configs",
    "sep_configs",
    "dp_sep_configs",
    "pp_tp_configs",
    "ep_configs",
    "moe_sharding_configs",
    "cp_configs",
    "cp_sharding_configs",
    "dp_cp_configs",
    "cp_mp_configs",
]

class HybridConfigView(ConfigView):
    """The settings of hybrid_configs; see HybridConfigDict."""

    dp_degree: int
    mp_degree: int
    pp_degree: int
    sharding_degree: int
    sep_degree: int
    cp_degree: int
    ep_degree: int
    moe_sharding_degree: int
    cp_sharding_degree: int
    enable_optimizer_timer: bool
    split_norm_comm: bool
    @property
    def order(self) -> list[str]: ...
    @order.setter
    def order(self, value: list[str] | tuple[str, ...]) -> None: ...
    @property
    def mp_configs(self) -> HybridMpConfigView: ...
    @mp_configs.setter
    def mp_configs(self, value: HybridMpConfigDict | HybridMpConfigView) -> None: ...
    @property
    def pp_configs(self) -> HybridPpConfigView: ...
    @pp_configs.setter
    def pp_configs(self, value: HybridPpConfigDict | HybridPpConfigView) -> None: ...
    @property
    def sharding_configs(self) -> HybridShardingConfigView: ...
    @sharding_configs.setter
    def sharding_configs(self, value: HybridShardingConfigDict | HybridShardingConfigView) -> None: ...
    @property
    def default_comm_group_configs(self) -> NcclOnlyConfigView: ...
    @default_comm_group_configs.setter
    def default_comm_group_configs(self, value: NcclOnlyConfigDict | NcclOnlyConfigView) -> None: ...
    @property
    def dp_configs(self) -> NcclAndCheckConfigView: ...
    @dp_configs.setter
    def dp_configs(self, value: NcclAndCheckConfigDict | NcclAndCheckConfigView) -> None: ...
    @property
    def sep_configs(self) -> NcclOnlyConfigView: ...
    @sep_configs.setter
    def sep_configs(self, value: NcclOnlyConfigDict | NcclOnlyConfigView) -> None: ...
    @property
    def dp_sep_configs(self) -> NcclOnlyConfigView: ...
    @dp_sep_configs.setter
    def dp_sep_configs(self, value: NcclOnlyConfigDict | NcclOnlyConfigView) -> None: ...
    @property
    def pp_tp_configs(self) -> NcclOnlyConfigView: ...
    @pp_tp_configs.setter
    def pp_tp_configs(self, value: NcclOnlyConfigDict | NcclOnlyConfigView) -> None: ...
    @property
    def ep_configs(self) -> NcclTwiceConfigView: ...
    @ep_configs.setter
    def ep_configs(self, value: NcclTwiceConfigDict | NcclTwiceConfigView) -> None: ...
    @property
    def moe_sharding_configs(self) -> NcclAndCheckConfigView: ...
    @moe_sharding_configs.setter
    def moe_sharding_configs(self, value: NcclAndCheckConfigDict | NcclAndCheckConfigView) -> None: ...
    @property
    def cp_configs(self) -> NcclOnlyConfigView: ...
    @cp_configs.setter
    def cp_configs(self, value: NcclOnlyConfigDict | NcclOnlyConfigView) -> None: ...
    @property
    def cp_sharding_configs(self) -> NcclOnlyConfigView: ...
    @cp_sharding_configs.setter
    def cp_sharding_configs(self, value: NcclOnlyConfigDict | NcclOnlyConfigView) -> None: ...
    @property
    def dp_cp_configs(self) -> NcclOnlyConfigView: ...
    @dp_cp_configs.setter
    def dp_cp_configs(self, value: NcclOnlyConfigDict | NcclOnlyConfigView) -> None: ...
    @property
    def cp_mp_configs(self) -> NcclOnlyConfigView: ...
    @cp_mp_configs.setter
    def cp_mp_configs(self, value: NcclOnlyConfigDict | NcclOnlyConfigView) -> None: ...
    @overload
    def __getitem__(
        self,
        key: Literal[
            "dp_degree",
            "mp_degree",
            "pp_degree",
            "sharding_degree",
            "sep_degree",
            "cp_degree",
            "ep_degree",
            "moe_sharding_degree",
            "cp_sharding_degree",
        ],
        /,
    ) -> int: ...
    @overload
    def __getitem__(self, key: Literal["enable_optimizer_timer", "split_norm_comm"], /) -> bool: ...
    @overload
    def __getitem__(self, key: Literal["order"], /) -> list[str]: ...
    @overload
    def __getitem__(self, key: Literal["mp_configs"], /) -> HybridMpConfigView: ...
    @overload
    def __getitem__(self, key: Literal["pp_configs"], /) -> HybridPpConfigView: ...
    @overload
    def __getitem__(self, key: Literal["sharding_configs"], /) -> HybridShardingConfigView: ...
    @overload
    def __getitem__(
        self,
        key: Literal[
            "default_comm_group_configs",
            "sep_configs",
            "dp_sep_configs",
            "pp_tp_configs",
            "cp_configs",
            "cp_sharding_configs",
            "dp_cp_configs",
            "cp_mp_configs",
        ],
        /,
    ) -> NcclOnlyConfigView: ...
    @overload
    def __getitem__(self, key: Literal["dp_configs", "moe_sharding_configs"], /) -> NcclAndCheckConfigView: ...
    @overload
    def __getitem__(self, key: Literal["ep_configs"], /) -> NcclTwiceConfigView: ...
    @overload
    def __setitem__(
        self,
        key: Literal[
            "dp_degree",
            "mp_degree",
            "pp_degree",
            "sharding_degree",
            "sep_degree",
            "cp_degree",
            "ep_degree",
            "moe_sharding_degree",
            "cp_sharding_degree",
        ],
        value: int,
        /,
    ) -> None: ...
    @overload
    def __setitem__(self, key: Literal["enable_optimizer_timer", "split_norm_comm"], value: bool, /) -> None: ...
    @overload
    def __setitem__(self, key: Literal["order"], value: list[str] | tuple[str, ...], /) -> None: ...
    @overload
    def __setitem__(self, key: Literal["mp_configs"], value: HybridMpConfigDict | HybridMpConfigView, /) -> None: ...
    @overload
    def __setitem__(self, key: Literal["pp_configs"], value: HybridPpConfigDict | HybridPpConfigView, /) -> None: ...
    @overload
    def __setitem__(
        self, key: Literal["sharding_configs"], value: HybridShardingConfigDict | HybridShardingConfigView, /
    ) -> None: ...
    @overload
    def __setitem__(
        self,
        key: Literal[
            "default_comm_group_configs",
            "sep_configs",
            "dp_sep_configs",
            "pp_tp_configs",
            "cp_configs",
            "cp_sharding_configs",
            "dp_cp_configs",
            "cp_mp_configs",
        ],
        value: NcclOnlyConfigDict | NcclOnlyConfigView,
        /,
    ) -> None: ...
    @overload
    def __setitem__(
        self,
        key: Literal["dp_configs", "moe_sharding_configs"],
        value: NcclAndCheckConfigDict | NcclAndCheckConfigView,
        /,
    ) -> None: ...
    @overload
    def __setitem__(self, key: Literal["ep_configs"], value: NcclTwiceConfigDict | NcclTwiceConfigView, /) -> None: ...
    def __delitem__(self, key: HybridConfigKey, /) -> None: ...
    def pop(self, key: HybridConfigKey, /, *default: Any) -> Any: ...
    def setdefault(self, key: HybridConfigKey, default: Any = None, /) -> Any: ...
    def update(
        self, changes: HybridConfigDict | HybridConfigView = ..., /, **keys: Unpack[HybridConfigDict]
    ) -> None: ...

class TrackerConfigDict(TypedDict, total=False):
    """The keys of tracker_configs."""

    project: str
    """Name that runs are grouped by. Default: 'fleet'."""
    run_name: str
    """Name of the run; empty takes PADDLE_JOB_ID. A name that an earlier run has gets -2, -3, ... at its end.
    Default: ''.
    """
    folder: str
    """Folder of the trackers that write files. Default: 'runs'."""
    automatic: bool
    """Log step times with their parts, rates and memory of worker 0 without a call of fleet.log. Default: True."""
    every: int
    """Steps between two of these records, which hold the means of the steps. Default: 10."""
    total_steps: int
    """Steps that the optimizers make in the whole run, for the progress on the page of the job and in the status of
    a Kubeflow TrainJob; 0: not known, and no progress is shown. fleet.log takes it as well. Default: 0.
    """
    peak_tflops: float
    """What this device computes at most, in TFLOP/s, for the model FLOPs utilisation; 0 takes the 16-bit peak of
    known GPUs, and logs no utilisation on others. Default: 0.0.
    """

TrackerConfigKey: TypeAlias = Literal[
    "project", "run_name", "folder", "automatic", "every", "total_steps", "peak_tflops"
]

class TrackerConfigView(ConfigView):
    """The settings of tracker_configs; see TrackerConfigDict."""

    project: str
    run_name: str
    folder: str
    automatic: bool
    every: int
    total_steps: int
    peak_tflops: float
    @overload
    def __getitem__(self, key: Literal["project", "run_name", "folder"], /) -> str: ...
    @overload
    def __getitem__(self, key: Literal["automatic"], /) -> bool: ...
    @overload
    def __getitem__(self, key: Literal["every", "total_steps"], /) -> int: ...
    @overload
    def __getitem__(self, key: Literal["peak_tflops"], /) -> float: ...
    @overload
    def __setitem__(self, key: Literal["project", "run_name", "folder"], value: str, /) -> None: ...
    @overload
    def __setitem__(self, key: Literal["automatic"], value: bool, /) -> None: ...
    @overload
    def __setitem__(self, key: Literal["every", "total_steps"], value: int, /) -> None: ...
    @overload
    def __setitem__(self, key: Literal["peak_tflops"], value: float, /) -> None: ...
    def __delitem__(self, key: TrackerConfigKey, /) -> None: ...
    def pop(self, key: TrackerConfigKey, /, *default: Any) -> Any: ...
    def setdefault(self, key: TrackerConfigKey, default: Any = None, /) -> Any: ...
    def update(
        self, changes: TrackerConfigDict | TrackerConfigView = ..., /, **keys: Unpack[TrackerConfigDict]
    ) -> None: ...

class TypedOptions:
    """Every option with its type, what it does, and its default."""

    a_sync: bool
    """Parameter-server mode: False synchronous, True asynchronous, True with k_steps > 0 geo. Default: True."""
    @property
    def a_sync_configs(self) -> ASyncConfigView:
        """Settings of 'a_sync'."""
    @a_sync_configs.setter
    def a_sync_configs(self, value: ASyncConfigDict | ASyncConfigView) -> None: ...
    adaptive_localsgd: bool
    """Localsgd that chooses the number of local steps, 1 to 16, from the loss and the learning rate. Default:
    False.
    """
    @property
    def adaptive_localsgd_configs(self) -> AdaptiveLocalsgdConfigView:
        """Settings of 'adaptive_localsgd'."""
    @adaptive_localsgd_configs.setter
    def adaptive_localsgd_configs(self, value: AdaptiveLocalsgdConfigDict | AdaptiveLocalsgdConfigView) -> None: ...
    amp: bool
    """Mixed precision: compute in float16 or bfloat16 where that is safe, with dynamic loss scaling. Default:
    False.
    """
    @property
    def amp_configs(self) -> AmpConfigView:
        """Settings of 'amp'."""
    @amp_configs.setter
    def amp_configs(self, value: AmpConfigDict | AmpConfigView) -> None: ...
    asp: bool
    """Keep two of every four weights at zero (2:4 sparsity): the masks are applied again after each update.
    Default: False.
    """
    @property
    def asp_configs(self) -> AspConfigView:
        """Settings of 'asp'."""
    @asp_configs.setter
    def asp_configs(self, value: AspConfigDict | AspConfigView) -> None: ...
    check_nan_inf: bool
    """Stop all workers at the first NaN or Inf and name its module, rank and step; costs a wait in each step.
    Default: False.
    """
    cudnn_exhaustive_search: bool
    """Let cuDNN time its convolution algorithms at the first batch of each shape and keep the fastest. Default:
    False.
    """
    dgc: bool
    """Exchange only the largest entries of each gradient (Deep Gradient Compression); the rest waits its turn.
    Default: False.
    """
    @property
    def dgc_configs(self) -> DgcConfigView:
        """Settings of 'dgc'."""
    @dgc_configs.setter
    def dgc_configs(self, value: DgcConfigDict | DgcConfigView) -> None: ...
    fp16_allreduce: bool
    """Send float32 gradients as float16 or bfloat16: half the bytes, two to three decimal digits. Default: False."""
    @property
    def fp16_allreduce_configs(self) -> Fp16AllreduceConfigView:
        """Settings of 'fp16_allreduce'."""
    @fp16_allreduce_configs.setter
    def fp16_allreduce_configs(self, value: Fp16AllreduceConfigDict | Fp16AllreduceConfigView) -> None: ...
    gradient_merge: bool
    """Add up the gradients of k batches, then exchange and update once: a larger batch in the same memory. Default:
    False.
    """
    @property
    def gradient_merge_configs(self) -> GradientMergeConfigView:
        """Settings of 'gradient_merge'."""
    @gradient_merge_configs.setter
    def gradient_merge_configs(self, value: GradientMergeConfigDict | GradientMergeConfigView) -> None: ...
    lamb: bool
    """Update with LAMB: Adam's step, scaled for each parameter by the ratio of its norm to the step's norm.
    Default: False.
    """
    @property
    def lamb_configs(self) -> LambConfigView:
        """Settings of 'lamb'."""
    @lamb_configs.setter
    def lamb_configs(self, value: LambConfigDict | LambConfigView) -> None: ...
    lars: bool
    """Update with LARS: each parameter's rate follows the ratio of its norm to its gradient's norm. Default: False."""
    @property
    def lars_configs(self) -> LarsConfigView:
        """Settings of 'lars'."""
    @lars_configs.setter
    def lars_configs(self, value: LarsConfigDict | LarsConfigView) -> None: ...
    localsgd: bool
    """Train each worker by itself and average the parameters every k steps. Default: False."""
    @property
    def localsgd_configs(self) -> LocalsgdConfigView:
        """Settings of 'localsgd'."""
    @localsgd_configs.setter
    def localsgd_configs(self, value: LocalsgdConfigDict | LocalsgdConfigView) -> None: ...
    pipeline: bool
    """Divide the layers among workers and stream micro-batches through them. Default: False."""
    @property
    def pipeline_configs(self) -> PipelineConfigView:
        """Settings of 'pipeline'."""
    @pipeline_configs.setter
    def pipeline_configs(self, value: PipelineConfigDict | PipelineConfigView) -> None: ...
    qat: bool
    """Train with the rounding of a quantized model in the forward pass of nn.Linear; needs the extra 'qat'.
    Default: False.
    """
    @property
    def qat_configs(self) -> QatConfigView:
        """Settings of 'qat'."""
    @qat_configs.setter
    def qat_configs(self, value: QatConfigDict | QatConfigView) -> None: ...
    recompute: bool
    """Trade time for memory: the named modules compute their activations again in backward. Default: False."""
    @property
    def recompute_configs(self) -> RecomputeConfigView:
        """Settings of 'recompute'."""
    @recompute_configs.setter
    def recompute_configs(self, value: RecomputeConfigDict | RecomputeConfigView) -> None: ...
    reproducible: bool
    """Give weights, optimizer state and losses the same bits on any number of workers, through resizes. Default:
    False.
    """
    @property
    def reproducible_configs(self) -> ReproducibleConfigView:
        """Settings of 'reproducible'."""
    @reproducible_configs.setter
    def reproducible_configs(self, value: ReproducibleConfigDict | ReproducibleConfigView) -> None: ...
    sharding: bool
    """Divide optimizer state, gradients and parameters among workers (ZeRO stages 1, 2 and 3). Default: False."""
    @property
    def sharding_configs(self) -> ShardingConfigView:
        """Settings of 'sharding'."""
    @sharding_configs.setter
    def sharding_configs(self, value: ShardingConfigDict | ShardingConfigView) -> None: ...
    sync_batch_norm: bool
    """Compute batch-norm statistics over the batches of all workers. Default: False."""
    tensor_parallel: bool
    """Divide the weights of large layers among workers. Default: False."""
    @property
    def tensor_parallel_configs(self) -> TensorParallelConfigView:
        """Settings of 'tensor_parallel'."""
    @tensor_parallel_configs.setter
    def tensor_parallel_configs(self, value: TensorParallelConfigDict | TensorParallelConfigView) -> None: ...
    to_static: bool
    """Compile the model with torch.compile, the counterpart of Fleet's static graph. Default: False."""
    @property
    def to_static_configs(self) -> ToStaticConfigView:
        """Settings of 'to_static'."""
    @to_static_configs.setter
    def to_static_configs(self, value: ToStaticConfigDict | ToStaticConfigView) -> None: ...
    use_hierarchical_allreduce: bool
    """Sum gradients inside each node first, then between nodes. Default: False."""
    adam_d2sum: bool
    """Update dense tables with the server's Adam with decaying sums of squares. Default: False."""
    @property
    def trainer_desc_configs(self) -> TrainerDescConfigView:
        """What train_from_dataset writes."""
    @trainer_desc_configs.setter
    def trainer_desc_configs(self, value: TrainerDescConfigDict | TrainerDescConfigView) -> None: ...
    sparse_table_configs: dict[str, Any]
    """Settings of the sparse tables, by name of the table. Default: {}."""
    fleet_desc_configs: dict[str, Any]
    """The same as a whole description, for older scripts. Default: {}."""
    @property
    def fs_client_param(self) -> FsClientConfigView:
        """The Hadoop file system the servers save to."""
    @fs_client_param.setter
    def fs_client_param(self, value: FsClientConfigDict | FsClientConfigView) -> None: ...
    @property
    def build_strategy(self) -> BuildStrategy:
        """Which passes rewrite the graph."""
    @build_strategy.setter
    def build_strategy(self, value: BuildStrategyConfigDict | BuildStrategy) -> None: ...
    @property
    def execution_strategy(self) -> ExecutionStrategy:
        """How the executor runs the graph."""
    @execution_strategy.setter
    def execution_strategy(self, value: ExecutionStrategyConfigDict | ExecutionStrategy) -> None: ...
    check_every: int
    """Updates between two comparisons of what the workers hold as copies (parameters, learning rates and step
    counts), and of the losses of workers along mp, sep and cp; the first 3 updates are compared, too. 0 compares
    none. Default: 500.
    """
    fuse_all_reduce_ops: bool
    """Send gradients in buckets; False sends each parameter by itself. Default: True."""
    fuse_grad_size_in_MB: int
    """Largest bucket, in MiB. Default: 32."""
    last_comm_group_size_MB: float
    """Size in MiB of the bucket that is sent last, small so that little waiting is left after backward. Default:
    1.0.
    """
    find_unused_parameters: bool
    """Accept models in which some parameters take no part in the loss; costs a walk over the graph per step.
    Default: False.
    """
    @property
    def gradient_scale_configs(self) -> GradientScaleConfigView:
        """How the sum over workers is scaled."""
    @gradient_scale_configs.setter
    def gradient_scale_configs(self, value: GradientScaleConfigDict | GradientScaleConfigView) -> None: ...
    @property
    def hybrid_configs(self) -> HybridConfigView:
        """Number of workers along each axis of the mesh."""
    @hybrid_configs.setter
    def hybrid_configs(self, value: HybridConfigDict | HybridConfigView) -> None: ...
    @property
    def hybrid_parallel_order(self) -> list[str]:
        """Axes of the mesh from the outermost to the innermost; ranks are neighbours along the last. Default:
        ['dp', 'pp', 'sharding', 'sep', 'cp', 'mp'].
        """
    @hybrid_parallel_order.setter
    def hybrid_parallel_order(self, value: list[str] | tuple[str, ...]) -> None: ...
    semi_auto: bool
    """Plan parallelism from annotations. Refused: there is no planner of parallelism here; name the degrees in
    hybrid_configs, or use DTensor. Default: False.
    """
    auto_search: bool
    """Search for the best parallelism. Refused: there is no planner of parallelism here; name the degrees in
    hybrid_configs, or use DTensor. Default: False.
    """
    heter_ccl_mode: bool
    """Train on accelerators of different vendors together. Refused: torch has no bridge between the communication
    libraries of different vendors. Default: False.
    """
    is_fl_ps_mode: bool
    """Federated training on parameter servers. Refused: federated training with a coordinator process is not
    offered. Default: False.
    """
    with_coordinator: bool
    """Start a coordinator process for federated training. Refused: federated training with a coordinator process is
    not offered. Default: False.
    """
    @property
    def sync_param_name(self) -> list[str]:
        """Undivided parameters whose names, as in model.named_parameters(), contain one of these are kept equal as
        hybrid_configs['mp_configs'] asks; the default stands for all of them. Default: ['embedding',
        'layer_norm', '.b_'].
        """
    @sync_param_name.setter
    def sync_param_name(self, value: list[str] | tuple[str, ...]) -> None: ...
    @property
    def trackers(self) -> list[str]:
        """Trackers that fleet.log writes to: csv, json, mlflow, tensorboard, trackio, wandb, and those that other
        packages declare. Default: [].
        """
    @trackers.setter
    def trackers(self, value: list[str] | tuple[str, ...]) -> None: ...
    @property
    def tracker_configs(self) -> TrackerConfigView:
        """Names of the run, and what is logged by itself."""
    @tracker_configs.setter
    def tracker_configs(self, value: TrackerConfigDict | TrackerConfigView) -> None: ...
    hierarchical_allreduce_inter_nranks: int
    """Workers in each inner group of use_hierarchical_allreduce; 1 takes the number of workers on a node. Default:
    1.
    """
    mode: int
    """Kind of job: 1 collective, 2 parameter server, 3 pipeline, 4 heterogeneous. Accepted with one warning:
    fleet.init(is_collective=...) decides the kind of job. Default: 1.
    """
    elastic: bool
    """Let workers come and go. Accepted with one warning: the launcher does that; start the job with its elastic
    flags. Default: False.
    """
    auto: bool
    """Turn on whatever fits. Accepted with one warning: nothing is turned on by guess; name the options you want.
    Default: False.
    """
    fuse_grad_size_in_num: int
    """Gradients in a bucket. Accepted with one warning: torch fills buckets by size; set fuse_grad_size_in_MB.
    Default: 8.
    """
    fuse_grad_size_in_TFLOPS: float
    """Computation behind a bucket. Accepted with one warning: torch fills buckets by size; set
    fuse_grad_size_in_MB. Default: 50.0.
    """
    fuse_grad_merge: bool
    """Keep merged gradients in one buffer. Accepted with one warning: torch adds gradients up in their buckets
    already. Default: False.
    """
    sync_nccl_allreduce: bool
    """Wait on the stream after each all-reduce. Accepted with one warning: torch orders communication and
    computation with events. Default: True.
    """
    calc_comm_same_stream: bool
    """Communicate on the compute stream. Accepted with one warning: torch orders communication and computation with
    events. Default: False.
    """
    nccl_comm_num: int
    """Communicators that take turns. Accepted with one warning: NCCL uses several channels by itself. Default: 1."""
    conv_workspace_size_limit: int
    """Memory in MB that a convolution may borrow. Accepted with one warning: torch has no such setting for cuDNN.
    Default: 512.
    """
    cudnn_batchnorm_spatial_persistent: bool
    """Use cuDNN's persistent batch norm. Accepted with one warning: torch has no such setting for cuDNN. Default:
    False.
    """
    without_graph_optimization: bool
    """Run the program as it is written. Accepted with one warning: it steers a static program, and torch runs none.
    Default: True.
    """
    split_data: bool
    """Divide each batch among the workers. Accepted with one warning: the script divides the data, with
    torch.utils.data.DistributedSampler. Default: True.
    """
    _fuse_grad_size_in_TFLOPS: float
    """Computation behind a bucket. Accepted with one warning: torch fills buckets by size; set
    fuse_grad_size_in_MB. Default: 50.0.
    """
    _calc_comm_same_stream: bool
    """Communicate on the compute stream. Accepted with one warning: torch orders communication and computation with
    events. Default: False.
    """
    is_with_coordinator: bool
    """Start a coordinator process for federated training. Refused: federated training with a coordinator process is
    not offered. Default: False.
    """
