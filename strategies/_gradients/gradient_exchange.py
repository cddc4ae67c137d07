"""GradientExchange: the route of a bucket of gradients between workers, and its place in a wrapped model.

Several options change the exchange (the type on the wire, the division, the route), in data parallel and in a pipeline.
Each option sets its field here. DistributedDataParallel takes a single hook; it is registered at the first field that
differs from the default of DistributedDataParallel.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fleet.strategies._gradients.exchange_names import named_exchange

Route = Callable[[dist.GradBucket], "torch.futures.Future[Tensor]"]
# Adds a tensor up over all workers, in place; the future holds a list of that tensor.
Sum = Callable[[Tensor], "torch.futures.Future[list[Tensor]]"]


@dataclass
class SentBucket:
    """A bucket on the wire.

    Attributes:
        future: holds the sum, in the type of the wire.
        gradients: the bucket, in its own type.
        header_size: the count of numbers at its end that are no gradients.
        factor: the factor of its gradients on the wire.
    """

    future: torch.futures.Future[list[Tensor]]
    gradients: Tensor
    header_size: int
    factor: float

    def received(self) -> Tensor:
        """Returns the sum over all workers, once ``future`` is done; raises its error."""
        summed = self.future.value()[0]
        # A factor comes with a narrower type alone, see send(), so nothing has to be undone here.
        if summed.dtype == self.gradients.dtype:
            return summed
        self.gradients.copy_(summed)
        if self.factor != 1.0:
            _without_header(self.gradients, self.header_size).div_(self.factor)
        return self.gradients


class GradientExchange:
    """The exchange of buckets of gradients among the workers of a group.

    [Note: The header of a bucket]
    A bucket may end with a header: whole numbers that workers must agree on before they use its gradients. They travel
    in the same all_reduce, in the type of the wire, and are summed as they are: not divided, not multiplied by the
    factor. A sum is exact up to 2**24 in float32, 2048 in float16 and 256 in bfloat16; above that a sum of flags is
    still above 0 in every type. A larger number travels as several small ones.

    Args:
        strategy: the strategy that exchanges; profilers show it unless options have changed the exchange.
        group: the workers that exchange.
        divisor: divides the sum: the number of workers, or of those among them that train on different rows; 1 leaves
            the sum.

    Attributes:
        wire_dtype: floating type in which float32 gradients cross the wire; ``None`` keeps float32.
        wire_factor: the factor of float32 gradients while they cross the wire as float16, in which small values would
            be lost otherwise: the loss scale of amp.
        sum: adds a buffer up over the workers; one all_reduce by default.
        route: exchanges a bucket of DistributedDataParallel by other means than a sum; it reads the other fields.
        names: the strategies that changed it; profilers show them.
    """

    def __init__(self, strategy: str, group: Any, divisor: float) -> None:
        self._group = group
        self.divisor = divisor
        self.wire_dtype: torch.dtype | None = None
        self.wire_factor: Callable[[], float] = lambda: 1.0
        self.sum: Sum = self._all_reduce
        self.route: Route | None = None
        self.names: list[str] = []
        self._strategy = strategy

    @property
    def group(self) -> Any:
        """The workers that exchange."""
        return self._group

    def __deepcopy__(self, memo: Any) -> None:
        """Returns None: a copied model makes its own exchange, or has none."""

    def use(self, strategy: str = "") -> None:
        """Makes buckets go through this exchange, whose fields ``strategy`` has set."""
        self.names += [strategy] if strategy else []

    def named(self, gradients: Tensor, number: int) -> Any:
        """Returns the context in which profilers show the exchange of bucket ``number``."""
        return named_exchange(" + ".join(self.names) or self._strategy, gradients, f"bucket {number}")

    def send(self, gradients: Tensor, header_size: int = 0) -> SentBucket:
        """Starts the exchange of a bucket, which is changed in place; see [Note: The header of a bucket]."""
        narrow = self.wire_dtype if gradients.dtype == torch.float32 and not gradients.is_sparse else None
        factor = self.wire_factor() if narrow == torch.float16 else 1.0
        if factor != 1.0:
            _without_header(gradients, header_size).mul_(factor)
        sent = gradients if narrow is None else gradients.to(narrow)
        if self.divisor != 1:
            # Before the sum, not after it: a float16 sum over many workers overflows first.
            _without_header(sent, header_size).div_(self.divisor)
        return SentBucket(self.sum(sent), gradients, header_size, factor)

    def _all_reduce(self, tensor: Tensor) -> torch.futures.Future[list[Tensor]]:
        work = dist.all_reduce(tensor, group=self.group, async_op=True)
        return cast("torch.futures.Future[list[Tensor]]", work.get_future())


def _without_header(bucket: Tensor, header_size: int) -> Tensor:
    return bucket[:-header_size] if header_size else bucket


class HookedExchange(GradientExchange):
    """The exchange of one DistributedDataParallel module.

    Attributes:
        registered: whether the module's buckets go through it.
    """

    def __init__(self, module: DistributedDataParallel) -> None:
        super().__init__("data_parallel", None, dist.get_world_size(module.process_group))
        self._module = module
        self.registered = False

    @property
    def group(self) -> Any:
        """The workers of the module, which lets go of them when the job ends."""
        return self._module.process_group

    def use(self, strategy: str = "") -> None:
        """Registers the hook, unless it is."""
        super().use(strategy)
        if not self.registered:
            self.register()

    def register(self) -> None:
        """Puts the hook into the module's reducer, which has none."""
        # Without annotations: torch compares them as types, and here they are text.
        self._module.register_comm_hook(None, lambda state, bucket: self._exchanged(bucket))
        self.registered = True

    def _exchanged(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        with self.named(bucket.buffer(), bucket.index()):
            if self.route is not None:
                return self.route(bucket)
            sent = self.send(bucket.buffer())
        return cast("torch.futures.Future[Tensor]", sent.future.then(lambda done: sent.received()))


EXCHANGE = "fleet_exchange"  # the attribute of a module that exchanges


def exchange_of(module: DistributedDataParallel) -> HookedExchange:
    """Returns the exchange of ``module``, making it at the first call."""
    exchange = module.__dict__.get(EXCHANGE)
    if exchange is None:
        exchange = module.__dict__[EXCHANGE] = HookedExchange(module)
    return cast(HookedExchange, exchange)


def exchange_in(model: nn.Module) -> GradientExchange | None:
    """Returns the exchange of the data-parallel module or pipeline stage that ``model`` is or wraps, or ``None``."""
    for found in _chain_of(model):
        if isinstance(found, DistributedDataParallel):
            return exchange_of(found)
        if found.__dict__.get(EXCHANGE) is not None:
            return cast(GradientExchange, found.__dict__[EXCHANGE])
    return None


def data_parallel_in(model: nn.Module) -> DistributedDataParallel | None:
    """Returns the DistributedDataParallel module that ``model`` is or wraps, or ``None``."""
    return next((found for found in _chain_of(model) if isinstance(found, DistributedDataParallel)), None)


def exchanging_in(model: nn.Module) -> nn.Module | None:
    """Returns the module that ``model`` is or wraps and that exchanges gradients in backward, or ``None``."""
    # DistributedDataParallel has a plain attribute of this name, the modules of stages 2 and 3 a property.
    for found in _chain_of(model):
        is_divided = isinstance(getattr(type(found), "require_backward_grad_sync", None), property)
        if is_divided or isinstance(found, DistributedDataParallel):
            return found
    return None


def _chain_of(model: nn.Module) -> Iterator[nn.Module]:
    """Yields ``model`` and the modules that it wraps, from the outside."""
    found: nn.Module | None = model
    while found is not None:
        yield found
        found = inner_of(found)


def inner_of(model: nn.Module) -> nn.Module | None:
    """Returns the module inside a wrapper that the strategies put around it; ``None`` for any other module."""
    if isinstance(model, DistributedDataParallel):
        return cast(nn.Module, model.module)
    return model.__dict__.get("_orig_mod") or model._modules.get("_orig_mod")


def copied_chain(chain: nn.Module, module: nn.Module, twin: nn.Module, memo: dict[int, Any]) -> tuple[nn.Module, bool]:
    """Returns wrappers around ``twin``, a copy of ``module``, like those of ``chain``; and whether it can be trained.

    It can where nothing but data parallel acts on gradients: hooks of parameters, counted batches and other exchanges
    belong to the original.
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
        exchange = chain.__dict__.get(EXCHANGE)
        is_plain = inner is module and not counted and (exchange is None or not exchange.registered)
        if is_plain and chain.process_group == dist.group.WORLD:  # one of another group cannot be copied
            return copy.deepcopy(chain, memo), True
        return copied_chain(inner, module, twin, memo)[0], False
    found, trains = copied_chain(inner, module, twin, memo)
    wrapper: Any = chain
    if hasattr(wrapper, "around"):
        return wrapper.around(found, twin), trains and not counted and wrapper.keeps_size
    return found, trains and not counted  # the compiler's
