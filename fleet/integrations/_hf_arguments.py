"""What TrainingArguments and a strategy say about the same thing: one meaning, or a refusal before anything starts."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from accelerate.utils import DistributedType

from fleet.errors import ConfigError, UnsupportedOptionError
from fleet.job.job import Job
from fleet.options import DistributedStrategy

_NARROW = {"fp16": "float16", "bf16": "bfloat16"}
_DEFAULT_TIMEOUT_S = 1800

# Arguments of Trainer's own distributed training -> what to write in their place.
_REPLACED = {
    "fsdp": "Fleet divides the model: strategy.sharding = True, strategy.sharding_configs = {'stage': 3}",
    "deepspeed": "Fleet divides the state: strategy.sharding = True, strategy.sharding_configs = {'stage': 1, 2 or 3}",
    "parallelism_config": "Fleet arranges the workers: strategy.hybrid_configs = {'mp_degree': 2}, strategy.sharding",
    "torch_compile": "Fleet compiles the model: strategy.to_static = True",
    "ddp_bucket_cap_mb": "Fleet exchanges the gradients: strategy.fuse_grad_size_in_MB",
    "ddp_static_graph": "Fleet's exchange has no static graph; strategy.find_unused_parameters = False is fast",
    "fp16_full_eval": "it converts the model in place; strategy.amp computes in 16 bits, in evaluation too",
    "bf16_full_eval": "it converts the model in place; strategy.amp computes in 16 bits, in evaluation too",
}


def checked_options(strategy: Any, args: Any) -> DistributedStrategy:
    """Returns a copy of ``strategy`` with what ``args`` ask for: 16-bit computing, unused parameters.

    Args:
        strategy: a DistributedStrategy, a dictionary of its options, or ``None``.
        args: the TrainingArguments.

    Raises:
        ConfigError: an option or argument cannot work here, or the two contradict each other.
    """
    if strategy is None:
        options = DistributedStrategy()
    elif isinstance(strategy, DistributedStrategy):
        options = copy.deepcopy(strategy)
    elif isinstance(strategy, dict):
        options = DistributedStrategy()
        options.update(strategy)
    else:
        raise ConfigError(
            f"FleetTrainer(strategy={strategy!r}) takes a fleet.DistributedStrategy, a dictionary of its options, or "
            "None. A file: fleet.DistributedStrategy.load(path)."
        )
    check_arguments(args)
    check_options(options)
    _take_precision(options, args)
    _take_unused(options, args)
    return options


def check_running(options: DistributedStrategy, args: Any) -> None:
    """Raises ConfigError where ``args`` contradict the options of a running job, which stay."""
    check_arguments(args)
    check_options(options)
    wanted = copy.deepcopy(options)
    _take_precision(wanted, args)
    if args.ddp_find_unused_parameters is not None:
        _take_unused(wanted, args)
    for name in wanted:
        if wanted[name] != options[name]:
            raise ConfigError(
                f"TrainingArguments ask for strategy.{name} = {wanted[name]!r}, and fleet.init() has run with "
                f"{options[name]!r}. Set it there, or give the strategy to FleetTrainer(strategy=...) and leave "
                "fleet.init() to it."
            )


def check_arguments(args: Any) -> None:
    """Raises UnsupportedOptionError for an argument that acts in Trainer's own distributed training only."""
    for name, instead in _REPLACED.items():
        value = getattr(args, name, None)
        if value:
            raise UnsupportedOptionError(f"TrainingArguments({name}={value!r}) is not for FleetTrainer: {instead}.")
    if args.ddp_broadcast_buffers is False:
        raise UnsupportedOptionError(
            "TrainingArguments(ddp_broadcast_buffers=False): with Fleet the workers have worker 0's buffers. Omit it; "
            "strategy.sync_batch_norm makes batch norm one over all workers."
        )
    if args.ddp_timeout != _DEFAULT_TIMEOUT_S:
        raise UnsupportedOptionError(
            f"TrainingArguments(ddp_timeout={args.ddp_timeout!r}): Fleet's groups read PADDLE_PG_TIMEOUT, in "
            f"milliseconds. Set it to {args.ddp_timeout * 1000} in the environment, and omit ddp_timeout."
        )
    if getattr(args, "half_precision_backend", "auto") == "apex":
        raise UnsupportedOptionError(
            "TrainingArguments(half_precision_backend='apex') replaces the optimizer's step. Use strategy.amp."
        )
    optim = str(getattr(args.optim, "value", args.optim))
    if "lomo" in optim or "layerwise" in optim:
        raise UnsupportedOptionError(
            f"TrainingArguments(optim={optim!r}) updates inside backward(), before gradients are exchanged. Use an "
            "optimizer that updates in step()."
        )


def check_options(options: DistributedStrategy) -> None:
    """Raises UnsupportedOptionError for an option that Trainer's loop cannot follow."""
    for reason, instead in (*_other_loops(options), *_merged_updates(options)):
        raise UnsupportedOptionError(f"FleetTrainer: {reason}. {instead}.")


def _other_loops(options: DistributedStrategy) -> Iterator[tuple[str, str]]:
    """Yields the reason why an option needs another loop, and the next step."""
    hybrid = options["hybrid_configs"]
    if (options.is_set("a_sync") and options["a_sync"]) or options.is_set("a_sync_configs"):
        yield (
            "strategy.a_sync is for parameter servers, and Trainer steps one optimizer of dense parameters",
            "Write a loop with fleet.init_worker(); docs/ps/README.md",
        )
    if options["pipeline"] or hybrid.pp_degree > 1 or options["sharding_configs"].pp_degree > 1:
        yield (
            "pipelines (strategy.pipeline, pp_degree) run forward and backward together, and Trainer calls them one "
            "after the other",
            "Write a loop with model.train_batch(); docs/guides/hybrid.md",
        )
    for name in ("sep_degree", "cp_degree", "ep_degree"):
        if (degree := getattr(hybrid, name)) > 1:
            yield (
                f"hybrid_configs[{name!r}] is {degree}, and Trainer divides rows alone",
                "Set it to 1, or write a loop; docs/guides/hybrid.md",
            )
    if options["reproducible"]:
        yield (
            "strategy.reproducible gives each logical worker whole batches and random numbers of its own, and Trainer "
            "divides the rows among the processes by itself",
            "Write a loop over sampler.batches(loader) of a fleet.elastic.ElasticSampler(data, batch_size=B)",
        )
    if options["qat"]:
        yield (
            "strategy.qat replaces layers, and from_pretrained() could not load what Trainer saves",
            "Write a loop; docs/guides/recipes.md",
        )


def _merged_updates(options: DistributedStrategy) -> Iterator[tuple[str, str]]:
    """Yields the options that make an update of several steps, which Trainer would count, and the next step."""
    merges = options["gradient_merge_configs"].k_steps if options["gradient_merge"] else 1
    merged = {
        "gradient_merge_configs['k_steps']": merges,
        "sharding_configs['gradient_merge_acc_step']": options["sharding_configs"].gradient_merge_acc_step,
        "hybrid_configs['sharding_configs']['accumulate_steps']": (
            options["hybrid_configs"].sharding_configs.accumulate_steps
        ),
    }
    for key, count in merged.items():
        if count > 1:
            yield (
                f"{key} is {count}, and Trainer counts steps, schedules and clips by updates of its own",
                f"Use TrainingArguments(gradient_accumulation_steps={count}), and turn it off",
            )


def precision_of(args: Any) -> str:
    """Returns what ``args`` or ``accelerate launch`` ask Accelerate to compute in: 'no', 'fp16', 'bf16' or 'fp8'."""
    if args.fp16 or args.bf16:
        return "fp16" if args.fp16 else "bf16"
    return str(getattr(args, "mixed_precision", "no") or "no")


def _take_precision(options: DistributedStrategy, args: Any) -> None:
    """Turns amp on where ``args`` ask for 16 bits; raises ConfigError where the options say another type."""
    asked = precision_of(args)
    if asked == "no":
        return
    if asked not in _NARROW:
        raise UnsupportedOptionError(
            f"mixed precision {asked!r} is not for FleetTrainer. Use fp16, bf16, strategy.amp."
        )
    config = options["amp_configs"]
    dtype = _NARROW[asked]
    said = "float16" if config.use_pure_fp16 else "bfloat16" if config.use_pure_bf16 else config.dtype
    if options.is_set("amp") and not options["amp"]:
        raise ConfigError(f"TrainingArguments({asked}=True) and strategy.amp = False contradict each other. Omit one.")
    if said not in ("auto", dtype):
        raise ConfigError(
            f"TrainingArguments({asked}=True) and strategy.amp_configs, whose 16-bit type is {said}, contradict each "
            "other. Omit one."
        )
    options.amp = True
    if said == "auto":
        options.amp_configs = {"dtype": dtype}


def _take_unused(options: DistributedStrategy, args: Any) -> None:
    """Sets find_unused_parameters by Trainer's rule: as in ``args``, otherwise unless activations are recomputed."""
    name = "find_unused_parameters"
    asked = args.ddp_find_unused_parameters
    if asked is not None and options.is_set(name) and bool(asked) != options[name]:
        raise ConfigError(
            f"TrainingArguments(ddp_find_unused_parameters={asked!r}) and strategy.{name} = {options[name]!r} "
            "contradict each other. Omit one."
        )
    if asked is not None:
        options.find_unused_parameters = bool(asked)
    elif not options.is_set(name) and not _divides_model(options):
        options.find_unused_parameters = not recomputes(args)


def recomputes(args: Any) -> bool:
    """Returns whether ``args`` ask to recompute activations (an argument with two names)."""
    return bool(getattr(args, "gradient_checkpointing", False) or getattr(args, "activation_checkpointing", False))


def _divides_model(options: DistributedStrategy) -> bool:
    """Returns whether stages 2 and 3 exchange gradients unit by unit, and wait for no unused parameter."""
    hybrid = options["hybrid_configs"]
    on = options["sharding"] or hybrid.sharding_degree > 1
    return bool(on and (options["sharding_configs"].stage > 1 or hybrid.sharding_configs.split_param))


def backend_of(job: Job) -> str | None:
    """Returns the backend for tensors of this worker's device; a group can have one for each kind of device."""
    group = job.process_group
    return None if group is None or job.world_size == 1 else str(group._get_backend(job.device).name())


def check_job(args: Any, job: Job) -> None:
    """Raises ConfigError where ``args`` name another device or backend than the job's, or need a single process."""
    if args.use_cpu and job.device.type != "cpu":
        raise ConfigError(
            f"TrainingArguments(use_cpu=True), and this worker computes on {job.device}. Set "
            "PADDLE_DISTRI_BACKEND=gloo in the environment to train on the CPU, or omit use_cpu."
        )
    backend = backend_of(job) or args.ddp_backend
    if args.ddp_backend not in (None, backend):
        raise ConfigError(
            f"TrainingArguments(ddp_backend={args.ddp_backend!r}), and the workers of this job are connected through "
            f"{backend!r}. Set PADDLE_DISTRI_BACKEND in the environment, and omit ddp_backend."
        )
    if args.auto_find_batch_size and job.world_size > 1:
        raise UnsupportedOptionError(
            f"TrainingArguments(auto_find_batch_size=True) with {job.world_size} workers: the one that runs out "
            "of memory would start again, and the others wait for it. Set per_device_train_batch_size; "
            "docs/guides/estimate.md computes what fits."
        )
    config = args.accelerator_config
    if not config.even_batches and not args.dataloader_drop_last and job.data_replicas > 1:
        raise UnsupportedOptionError(
            "TrainingArguments(accelerator_config={'even_batches': False}): workers with fewer batches would leave the "
            "others waiting. Add dataloader_drop_last=True, or omit it."
        )
    if config.dispatch_batches and job.data_replicas != job.world_size:
        raise UnsupportedOptionError(
            "TrainingArguments(accelerator_config={'dispatch_batches': True}) sends every worker other rows, and those "
            "of strategy.tensor_parallel_configs need the same. Omit it."
        )


def agree(args: Any, job: Job) -> None:
    """Sets rank, number of processes and device of ``args`` to the job's."""
    state = args.distributed_state
    several = job.world_size > 1
    on_gpu = job.device.type == "cuda"
    kind = DistributedType.MULTI_GPU if on_gpu else DistributedType.MULTI_CPU
    state.distributed_type = kind if several else DistributedType.NO
    state.backend = backend_of(job)
    state.num_processes = job.world_size
    state.process_index = job.global_rank
    state.local_process_index = job.local_rank
    state.device = job.device
    # A cached property, computed when the arguments were made.
    args.__dict__["_setup_devices"] = job.device
    args._n_gpu = int(on_gpu)  # one device a process: more would put the model in torch's DataParallel
