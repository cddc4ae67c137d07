"""data_parallel: every worker holds the whole model and the gradients are averaged while backward runs.

Always on in a collective job of more than one worker, unless another strategy takes the exchange over.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fleet.job.axes import COPY_AXES
from fleet.job.listener import Listener
from fleet.job.wrapped_model import WrappedModel
from fleet.strategies._declare.fields import Config, setting
from fleet.strategies._declare.strategy import Guide, JobKind, Stage, top_level
from fleet.strategies._gradients.flat import broadcast_from_rank_0
from fleet.strategies._gradients.gradient_exchange import data_parallel_in, exchange_of
from fleet.strategies._gradients.passes import Passes, passes_of
from fleet.strategies._shared.experts import expert_names, is_expert

if TYPE_CHECKING:
    from fleet.job.job import Job

_MIB = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class GradientScaleConfig(Config, option="gradient_scale_configs"):
    """How the summed gradients of the workers are scaled."""

    scale_strategy: str = setting(
        "avg",
        "'avg' divides the sum by the number of workers; 'sum' and 'customized' leave the sum, for a loss that the "
        "script scales itself",
        choices=("avg", "sum", "customized"),
    )
    scale_gradient: bool = setting(
        False,
        "scale the gradients and not the loss",
        no_meaning="torch always scales the gradients and never the loss; both give the same numbers",
    )


@top_level
@dataclass(frozen=True, kw_only=True)
class DataParallelSettings(Config, owner="data_parallel"):
    """Top-level options of the gradient exchange."""

    fuse_all_reduce_ops: bool = setting(True, "send gradients in buckets; False sends each parameter by itself")
    fuse_grad_size_in_MB: int = setting(32, "largest bucket, in MiB", at_least=1)
    last_comm_group_size_MB: float = setting(
        1.0, "size in MiB of the bucket that is sent last, small so that little waiting is left after backward", above=0
    )
    find_unused_parameters: bool = setting(
        False, "accept models in which some parameters take no part in the loss; costs a walk over the graph per step"
    )
    gradient_scale_configs: GradientScaleConfig = setting(GradientScaleConfig, "how the sum over workers is scaled")


class DataParallelJob(JobKind):
    """Averages gradients over all workers with torch's DistributedDataParallel."""

    name = "data_parallel"
    meaning = "Average the gradients of all workers while backward runs."
    stage = Stage.SHARD
    default = None
    model_effect = "averages the gradients of all workers in buckets while backward runs; parameters start as rank 0's"
    guide = Guide(
        when="Always on with more than one worker. Larger buckets suit a slow network, smaller ones a small model.",
        cost="One all-reduce of each gradient per step, mostly hidden behind backward. The buckets are the gradients.",
        formula="g = (g_1 + ... + g_N) / N",
        source="Li et al., 2020, arXiv 2006.15704",
        example={"fuse_grad_size_in_MB": 16},
    )

    def __init__(self, config: Any, job: Job) -> None:
        """Starts without models."""
        super().__init__(config, job)
        self._wrapped: WeakSet[DistributedDataParallel] = WeakSet()
        self._buffers = SharedBuffers(job)
        job.listeners.add(self._buffers)

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Returns a DistributedDataParallel module; parameters and buffers then equal rank 0's everywhere."""
        copies = self.job.axes.group(*COPY_AXES)
        if copies is None:
            return model  # nobody to exchange with
        if not any(map(_can_train, model.parameters())):
            experts = {*expert_names(model)}  # nothing else to exchange
            held = [*model.named_parameters(), *model.named_buffers()]
            broadcast_from_rank_0([tensor for name, tensor in held if name not in experts], copies)
            return model
        # They are exchanged by the layer that holds them, see [Note: Who holds what].
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, expert_names(model))
        job = self.job
        parameters = {id(p) for p in model.parameters()}
        sharing = [other for other in self._wrapped if not parameters.isdisjoint(map(id, other.parameters()))]
        for other in sharing:
            _share(other)
        wrapped = wrap_data_parallel(
            model,
            device=job.device,
            process_group=copies,
            bucket_MiB=job.options["fuse_grad_size_in_MB"],
            last_bucket_MiB=job.options["last_comm_group_size_MB"],
            fuse=job.options["fuse_all_reduce_ops"],
            find_unused_parameters=job.options["find_unused_parameters"],
            shares=bool(sharing),
        )
        self._wrapped.add(wrapped)
        averages = job.options["gradient_scale_configs"].scale_strategy == "avg"
        divisor = job.axes.data_replicas if averages else 1  # see [Note: Who holds what]
        # A sum that is not divided by all workers must not be summed once more by a second exchange.
        if divisor != copies.size():
            exchange_of(wrapped).divisor = divisor
            exchange_of(wrapped).use()
            SummedOnce(passes_of(wrapped), copies.size() // divisor)
        return wrapped

    def note_parameters(self, model: nn.Module, added: Mapping[str, nn.Parameter]) -> None:
        """Exchanges the parameters of ``model`` that train now; new ones are rank 0's everywhere."""
        wrapped = data_parallel_in(model)
        if wrapped is not None:
            _follow(wrapped, came=bool(added))

    def close(self) -> None:
        """Stops sharing buffers."""
        self.job.listeners.remove(self._buffers)


class SharedBuffers(Listener):
    """Keeps buffers as worker 0 has them where DistributedDataParallel, which sends them before a forward, does not.

    It does not where nothing trains, nor where a model had no buffers when it was wrapped.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._names: WeakKeyDictionary[WrappedModel, list[str]] = WeakKeyDictionary()

    def model_wrapped(self, model: WrappedModel) -> None:
        """Sends the buffers that every worker has."""
        experts = {*expert_names(model.module)}
        self._names[model] = [name for name, _ in model.named_buffers() if name not in experts]

    def structure_changed(self, model: WrappedModel, added: Mapping[str, nn.Parameter]) -> None:
        """Sends buffers that were registered later, too."""
        self.model_wrapped(model)
        if (wrapped := data_parallel_in(model._chain)) is not None:
            wrapped._assign_modules_buffers()

    def before_forward(self, model: WrappedModel) -> None:
        """Makes the buffers of a model in which nothing trains worker 0's, before a forward that trains."""
        wrapped = data_parallel_in(model._chain)
        group = self._job.axes.group(*COPY_AXES)
        names = self._names.get(model)
        if not (names and group and model.training and torch.is_grad_enabled()):
            return
        if wrapped is None or wrapped._delay_all_reduce_all_params:
            held = dict(model.named_buffers())
            broadcast_from_rank_0([held[name] for name in names if name in held], group)

    def before_join(self) -> None:
        """Sends none: workers may call the model different numbers of times from now on."""
        self._job.listeners.put_to_sleep(self)


class SummedOnce:
    """Keeps gradients that are a sum over the workers from being added up again by the next exchange.

    Before something is added to such a gradient, each worker keeps its share of it, and the exchange adds the shares up
    to the same sum. Averages may be averaged again as they are.
    """

    def __init__(self, passes: Passes, num_workers: int) -> None:
        self._passes = passes
        self._num_workers = num_workers
        self._summed: set[Tensor] = set()
        self._exchanges = False
        passes.checks.append(self._before_exchange)
        passes.starts.append(self._begin)
        if passes.arrivals is not None:
            passes.arrivals.outside.append(self._share)

    def _before_exchange(self) -> None:
        self._exchanges = True

    def _begin(self) -> None:
        for parameter in list(self._summed):
            self._share(parameter)
        if self._exchanges:
            self._summed.update(self._passes.parameters)
        self._exchanges = False

    @torch.no_grad()
    def _share(self, parameter: Tensor) -> None:
        if parameter in self._summed and parameter.grad is not None:
            parameter.grad.div_(self._num_workers)
        self._summed.discard(parameter)


def wrap_data_parallel(
    model: nn.Module,
    *,
    device: torch.device,
    process_group: Any,
    bucket_MiB: float,
    last_bucket_MiB: float,
    fuse: bool = True,
    find_unused_parameters: bool = False,
    shares: bool = False,
) -> DistributedDataParallel:
    """Returns ``model`` in DistributedDataParallel with buckets as Fleet describes them (sizes in MiB).

    ``shares`` says that another such module has some of its parameters.
    """

    def keywords(shares: bool) -> dict[str, Any]:
        made: dict[str, Any] = {
            "device_ids": [device.index] if device.type == "cuda" else None,
            "process_group": process_group,
            "find_unused_parameters": find_unused_parameters,
            # The bucket is the gradient, which saves a copy and its memory. Two modules cannot share a gradient so,
            # because each divides the numbers in it.
            "gradient_as_bucket_view": not shares,
        }
        if not fuse:
            made["bucket_cap_mb"] = 1 / _MIB  # one byte: every parameter fills a bucket
        elif "bucket_cap_mb_list" in inspect.signature(DistributedDataParallel).parameters:
            trained = [p for p in model.parameters() if p.requires_grad and not is_expert(p)]
            sizes = [p.numel() * p.element_size() for p in trained]
            made["bucket_cap_mb_list"] = plan_bucket_caps_MiB(sizes, bucket_MiB, last_bucket_MiB)
        else:
            made["bucket_cap_mb"] = bucket_MiB
        return made

    with _one_that_trains(model):
        wrapped = DistributedDataParallel(model, **keywords(shares))
        wrapped.__dict__.update(fleet_keywords=keywords, fleet_shares=shares)
        wrapped.__dict__["fleet_exchanged"] = _trained(model)
    _follow(wrapped, came=False)
    return wrapped


def _can_train(parameter: torch.Tensor) -> bool:
    return (parameter.is_floating_point() or parameter.is_complex()) and not is_expert(parameter)


def _trained(model: nn.Module) -> list[int]:
    return [id(p) for p in model.parameters() if p.requires_grad and not is_expert(p)]


@contextmanager
def _one_that_trains(model: nn.Module) -> Iterator[None]:
    """Unfreezes a parameter of a frozen ``model`` for a moment: DistributedDataParallel refuses a model without one."""
    frozen = not _trained(model)
    first = next(p for p in model.parameters() if _can_train(p))
    first.requires_grad_(first.requires_grad or frozen)
    try:
        yield
    finally:
        first.requires_grad_(first.requires_grad and not frozen)


def _follow(wrapped: DistributedDataParallel, came: bool) -> None:
    """Makes ``wrapped`` exchange the parameters that train now; with ``came`` they start as rank 0's."""
    trained = _trained(wrapped.module)
    # A frozen model runs without the reducer, which would wait for gradients that do not come.
    wrapped._delay_all_reduce_all_params = not trained
    if trained and trained != wrapped.__dict__["fleet_exchanged"]:
        _remake_reducer(wrapped, came)


def _share(wrapped: DistributedDataParallel) -> None:
    """Lets another module exchange some of the same parameters."""
    if not wrapped.__dict__["fleet_shares"]:
        wrapped.__dict__["fleet_shares"] = True
        with _one_that_trains(wrapped.module):
            _remake_reducer(wrapped, came=False)
        _follow(wrapped, came=False)


def _remake_reducer(wrapped: DistributedDataParallel, came: bool) -> None:
    """Replaces the reducer of ``wrapped``, which stays: other strategies hold it and have put hooks on it."""
    # __init__ resets the module: hooks, the mode and the sync flag belong to the script and to other strategies.
    kept = {name for name in vars(nn.Module()) if "hooks" in name} | {"training", "require_backward_grad_sync"}
    state = {name: value for name, value in vars(wrapped).items() if name in kept}
    keywords = wrapped.__dict__["fleet_keywords"](wrapped.__dict__["fleet_shares"])
    DistributedDataParallel.__init__(wrapped, wrapped.module, init_sync=came, **keywords)
    wrapped.__dict__.update(state, fleet_exchanged=_trained(wrapped.module))
    exchange = wrapped.__dict__.get("fleet_exchange")
    passes = wrapped.__dict__.get("fleet_passes")
    if exchange is not None and exchange.registered:
        exchange.register()
    if passes is not None:
        passes.follow(wrapped.parameters())


def plan_bucket_caps_MiB(sizes_bytes: Sequence[int], bucket_MiB: float, last_MiB: float) -> list[float]:
    """Returns the cap of each bucket, in the order in which backward fills them.

    Backward produces gradients roughly from the last parameter to the first, and a bucket closes at the parameter
    that reaches its cap. The parameters defined first therefore make the last bucket; it holds as many of them as
    fit into ``last_MiB`` (at least one), and the bucket before it ends exactly where it begins.

    Example:
        >>> plan_bucket_caps_MiB([1 << 20, 1 << 20, 4 << 20], bucket_MiB=32, last_MiB=1.0)
        [5.0, 32.0]
    """
    # The parameters at the front get their gradients last, so they form the last bucket.
    last_bytes, num_last = 0, 0
    for size in sizes_bytes:
        if num_last and last_bytes + size > last_MiB * _MIB:
            break
        last_bytes += size
        num_last += 1
    caps: list[float] = []
    filled = 0
    for size in reversed(sizes_bytes[num_last:]):
        filled += size
        if filled >= bucket_MiB * _MIB:
            caps.append(float(bucket_MiB))
            filled = 0
    if filled:
        caps.append(filled / _MIB)
    return [*caps, float(bucket_MiB)]
