"""GradientExchange: what happens to a bucket of gradients between two workers, in one communication hook.

DistributedDataParallel takes a single hook, while several options change the exchange (the type on the wire, the
division, later the route). Each option sets its field here; the hook is registered at the first field that differs
from what DistributedDataParallel does by itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fleet.strategies._gradients.exchange_names import named_exchange

Route = Callable[[dist.GradBucket], "torch.futures.Future[torch.Tensor]"]
# Adds a tensor up over all workers, in place; the future holds a list of that tensor.
Sum = Callable[[torch.Tensor], "torch.futures.Future[list[torch.Tensor]]"]


class GradientExchange:
    """The exchange of one DistributedDataParallel module.

    Attributes:
        average: divide the sum by ``divisor``.
        divisor: the number of workers, or of those among them that train on different rows.
        wire_dtype: floating type in which float32 gradients cross the wire; ``None`` keeps their own.
        wire_factor: what float32 gradients are multiplied by while they cross the wire as float16, whose small values
            they would lose otherwise; the loss scale of amp.
        sum: adds a buffer up over the workers; one all_reduce by default.
        route: exchanges a bucket by other means than a sum of its buffer; it reads the other fields itself.
        names: the strategies that changed it; profilers show them.
        registered: whether any of this differs from what DistributedDataParallel does by itself.
    """

    def __init__(self, module: DistributedDataParallel) -> None:
        self.average = True
        self.divisor = dist.get_world_size(module.process_group)
        self.wire_dtype: torch.dtype | None = None
        self.wire_factor: Callable[[], float] = lambda: 1.0
        self.sum: Sum = self._all_reduce
        self.route: Route | None = None
        self.names: list[str] = []
        self._module = module
        self.registered = False

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The workers that exchange."""
        return self._module.process_group

    def change(
        self,
        *,
        average: bool | None = None,
        divisor: int | None = None,
        wire_dtype: torch.dtype | None = None,
        sum: Sum | None = None,
        route: Route | None = None,
        strategy: str = "",
    ) -> None:
        """Sets the given fields for ``strategy`` and makes sure that the hook is registered."""
        self.names += [strategy] if strategy else []
        if average is not None:
            self.average = average
        if divisor is not None:
            self.divisor = divisor
        if wire_dtype is not None:
            self.wire_dtype = wire_dtype
        if sum is not None:
            self.sum = sum
        if route is not None:
            self.route = route
        if not self.registered:
            self.register()

    def register(self) -> None:
        """Puts the hook into the module's reducer, which has none."""
        # Without annotations: torch compares them as types, and here they are text.
        self._module.register_comm_hook(None, lambda state, bucket: self._exchanged(bucket))
        self.registered = True

    def name_buckets(self) -> None:
        """Makes profilers show each bucket under its number and strategy: exchanges through the hook of this class."""
        if not self.registered:
            self.register()

    def _exchanged(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        with named_exchange(" + ".join(self.names) or "data_parallel", bucket.buffer(), f"bucket {bucket.index()}"):
            return self._sent(bucket)

    def _sent(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if self.route is not None:
            return self.route(bucket)
        gradients = bucket.buffer()
        compress = self.wire_dtype is not None and gradients.dtype == torch.float32 and not gradients.is_sparse
        factor = self.wire_factor() if compress and self.wire_dtype == torch.float16 else 1.0
        scaled = gradients if factor == 1.0 else gradients.mul_(factor)
        sent = scaled.to(self.wire_dtype) if compress else gradients
        if self.average:
            # Before the sum, not after it: a float16 sum over many workers overflows first.
            sent = sent.div_(self.divisor)
        future = self.sum(sent)

        def restore(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            received = done.value()[0]
            if not compress:
                return received
            restored = gradients.copy_(received)
            return restored if factor == 1.0 else restored.div_(factor)

        return cast("torch.futures.Future[torch.Tensor]", future.then(restore))

    def _all_reduce(self, tensor: torch.Tensor) -> torch.futures.Future[list[torch.Tensor]]:
        work = dist.all_reduce(tensor, group=self.process_group, async_op=True)
        return cast("torch.futures.Future[list[torch.Tensor]]", work.get_future())


def exchange_of(model: nn.Module) -> GradientExchange:
    """Returns the exchange of the data-parallel module in ``model``, making it at the first call."""
    module = data_parallel_in(model)
    if module is None:
        raise AssertionError("a strategy of the COMM stage was applied to a model without data parallel")
    exchange = module.__dict__.get("fleet_exchange")
    if exchange is None:
        exchange = module.__dict__["fleet_exchange"] = GradientExchange(module)
    return cast(GradientExchange, exchange)


def data_parallel_in(model: nn.Module) -> DistributedDataParallel | None:
    """Returns the DistributedDataParallel module that ``model`` is or wraps, or ``None``."""
    holder = exchanging_in(model)
    return holder if isinstance(holder, DistributedDataParallel) else None


class NarrowExchange(Protocol):
    """An exchange of a strategy's own, in the place of DistributedDataParallel's, that options may narrow or route.

    Attributes:
        wire_dtype: as in :class:`GradientExchange`.
        wire_factor: as there.
        sum: adds a buffer up over the workers, in place; what it returns is waited for.
    """

    wire_dtype: torch.dtype | None
    wire_factor: Callable[[], float]
    sum: Callable[[torch.Tensor], Any]


REDUCER = "fleet_reducer"  # under which a pipeline stage keeps its exchange


def reducer_in(model: nn.Module) -> NarrowExchange | None:
    """Returns the exchange of the pipeline stage that ``model`` is or wraps, or ``None``."""
    found: nn.Module | None = model
    while found is not None:
        reducer: NarrowExchange | None = found.__dict__.get(REDUCER)
        if reducer is not None:
            return reducer
        found = inner_of(found)
    return None


def exchanging_in(model: nn.Module) -> nn.Module | None:
    """Returns the module that ``model`` is or wraps and that exchanges gradients in backward, or ``None``."""
    found: nn.Module | None = model
    while found is not None and not isinstance(found, DistributedDataParallel):
        if isinstance(getattr(type(found), "require_backward_grad_sync", None), property):
            return found
        found = inner_of(found)
    return found


def inner_of(model: nn.Module) -> nn.Module | None:
    """Returns what a wrapper that the strategies put around a module runs; ``None`` for any other module."""
    if isinstance(model, DistributedDataParallel):
        return cast(nn.Module, model.module)
    return model.__dict__.get("_orig_mod") or model._modules.get("_orig_mod")


def copied_chain(chain: nn.Module, module: nn.Module, twin: nn.Module, memo: dict[int, Any]) -> tuple[nn.Module, bool]:
    """Returns what runs ``twin``, a copy of ``module``, as ``chain`` runs ``module``; and whether it can be trained.

    It can where nothing but data parallel acts on gradients: hooks of parameters, batches that are counted and other
    exchanges belong to the original.
    """
    if chain is module:
        return twin, True
    inner = inner_of(chain)
    if inner is None:
        return copy.deepcopy(chain, memo), False
    counted = bool(chain._forward_pre_hooks)
    if isinstance(chain, DistributedDataParallel):
        passes = chain.__dict__.get("fleet_passes")
        if passes is not None:
            memo[id(passes)] = None  # a copy gets its own
            counted = counted or bool(passes.gates or passes.starts or passes.checks)
        exchange = chain.__dict__.get("fleet_exchange")
        is_plain = inner is module and not counted and (exchange is None or not exchange.registered)
        if is_plain and chain.process_group == dist.group.WORLD:  # one of another group cannot be copied
            return copy.deepcopy(chain, memo), True
        return copied_chain(inner, module, twin, memo)[0], False
    found, trains = copied_chain(inner, module, twin, memo)
    wrapper: Any = chain
    if hasattr(wrapper, "around"):
        return wrapper.around(found, twin), trains and not counted and wrapper.keeps_size
    return found, trains and not counted  # the compiler's
