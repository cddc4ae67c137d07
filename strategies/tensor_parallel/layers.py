"""Layers whose weight is divided over the workers of the mp axis: each holds a part as a plain parameter.

The layout of weights is torch's: ``[out_features, in_features]``. On one worker each is the plain layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from fleet.errors import ConfigError, UnsupportedOptionError
from fleet.strategies._shared.random_streams import TRACKER
from fleet.strategies.tensor_parallel.place import place_in
from fleet.strategies.tensor_parallel.regions import applied, copy_to, gather_from, reduce_from, scatter_to

STREAM = "model_parallel_rng"


class _Divided(nn.Module):
    """A layer that is divided over workers."""

    def sharded_state_dict(self, structured_name_prefix: str = "") -> Any:
        """Refused: Fleet's form of a state by parts.

        Raises:
            UnsupportedOptionError: always.
        """
        raise UnsupportedOptionError(
            f"{type(self).__name__}.sharded_state_dict() returns parts in Paddle's own form. model.full_state_dict() "
            "returns whole weights that load on any mesh, and model.local_state_dict() this worker's part."
        )


class ColumnParallelLinear(_Divided):
    """``y = x W^T + b``, with the rows of ``W``, which are the outputs, divided over the workers.

    Args:
        in_features: size of the last dimension of the input, which is whole on every worker.
        out_features: size of the whole output; the number of workers must divide it.
        weight_attr: initializes this worker's part: a callable that fills a tensor, an object with such an
            ``initializer``, or ``None`` for torch's distribution.
        has_bias: True adds a bias that starts at zero; ``None`` is False, as in Fleet.
        gather_output: True returns the whole output, False this worker's part of its last dimension.
        fuse_matmul_bias: accepted; torch fuses product and bias anyway.
        mp_group: the workers that share the layer; ``None`` is the mp axis of the job.
        name: accepted for Fleet's signature.

    Raises:
        ConfigError: a size does not divide, or an argument has another form.

    Example:
        >>> up = ColumnParallelLinear(1024, 4096, has_bias=True, gather_output=False)
        >>> down = RowParallelLinear(4096, 1024, input_is_parallel=True)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        weight_attr: Any = None,
        has_bias: bool | None = None,
        gather_output: bool = True,
        fuse_matmul_bias: bool = False,
        mp_group: Any = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        self._name = name
        layer = type(self).__name__
        self.place = place_in(mp_group, layer)
        own = self.place.divided(out_features, layer, "out_features")
        self.in_features = in_features
        self.out_features = out_features
        self.gather_output = gather_output
        self.weight = nn.Parameter(torch.empty(own, in_features))
        self.place.record(self, "weight", 0, (out_features, in_features))
        fill_weight(self.weight, weight_attr, layer, lambda w: uniform(w, in_features))
        if has_bias:
            self.bias = nn.Parameter(torch.zeros(own))
            self.place.record(self, "bias", 0, (out_features,))
        else:
            self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the product, whole or this worker's part of it."""
        group = self.place.group
        y = F.linear(copy_to(x, group), self.weight, self.bias)
        return gather_from(y, group) if self.gather_output else y

    def extra_repr(self) -> str:
        """Returns the sizes, for ``print(model)``."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"gather_output={self.gather_output}, {self.place}"
        )


class RowParallelLinear(_Divided):
    """``y = x W^T + b``, with the columns of ``W``, which are the inputs, divided over the workers; ``b`` is whole.

    Args:
        in_features: size of the whole input; the number of workers must divide it.
        out_features: size of the output, which is whole on every worker.
        weight_attr: as for :class:`ColumnParallelLinear`.
        has_bias: False leaves the bias out; it starts at zero.
        input_is_parallel: True for an input that is this worker's part already, False for a whole one.
        fuse_matmul_bias: True adds ``b / workers`` on each before the sum and not ``b`` after it.
        mp_group: the workers that share the layer; ``None`` is the mp axis of the job.
        name: accepted for Fleet's signature.

    Raises:
        ConfigError: a size does not divide, or an argument has another form.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        weight_attr: Any = None,
        has_bias: bool = True,
        input_is_parallel: bool = False,
        fuse_matmul_bias: bool = False,
        mp_group: Any = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        self._name = name
        layer = type(self).__name__
        self.place = place_in(mp_group, layer)
        own = self.place.divided(in_features, layer, "in_features")
        self.in_features = in_features
        self.out_features = out_features
        self.input_is_parallel = input_is_parallel
        self.fuse_matmul_bias = fuse_matmul_bias
        self.weight = nn.Parameter(torch.empty(out_features, own))
        self.place.record(self, "weight", 1, (out_features, in_features))
        fill_weight(self.weight, weight_attr, layer, lambda w: uniform(w, in_features))
        if has_bias:
            self.bias = nn.Parameter(torch.zeros(out_features))
            self.bias.__dict__["is_distributed"] = False
        else:
            self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the whole product."""
        group = self.place.group
        if group is None:
            return F.linear(x, self.weight, self.bias)
        if not self.input_is_parallel:
            x = scatter_to(x, group)
        if self.fuse_matmul_bias and self.bias is not None:
            return reduce_from(F.linear(x, self.weight, shared_bias(self.bias, self.place.size)), group, in_place=True)
        # The bias comes after the sum, or it would be added once for each worker.
        y = reduce_from(F.linear(x, self.weight), group, in_place=True)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        """Returns the sizes, for ``print(model)``."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"input_is_parallel={self.input_is_parallel}, {self.place}"
        )


class VocabParallelEmbedding(_Divided):
    """An embedding whose rows are divided over the workers; ids and result are whole on every worker.

    Args:
        num_embeddings: number of rows; the number of workers must divide it.
        embedding_dim: size of a row.
        weight_attr: as for :class:`ColumnParallelLinear`; ``None`` draws from the normal distribution, as torch does.
        mp_group: the workers that share the layer; ``None`` is the mp axis of the job.
        name: accepted for Fleet's signature.

    Raises:
        ConfigError: a size does not divide, or an argument has another form.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        weight_attr: Any = None,
        mp_group: Any = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        self._name = name
        layer = type(self).__name__
        self.place = place_in(mp_group, layer)
        own = self.place.divided(num_embeddings, layer, "num_embeddings")
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.first_row = own * self.place.rank
        self.weight = nn.Parameter(torch.empty(own, embedding_dim))
        self.place.record(self, "weight", 0, (num_embeddings, embedding_dim))
        fill_weight(self.weight, weight_attr, layer, nn.init.normal_)

    def forward(self, ids: Tensor) -> Tensor:
        """Returns the row of each id.

        Raises:
            ConfigError: an id is outside the vocabulary (on a GPU, the device's assertion stops the process).
        """
        group = self.place.group
        if group is None:
            return F.embedding(ids, self.weight)
        check_ids(ids, (ids >= 0) & (ids < self.num_embeddings), self.num_embeddings, "VocabParallelEmbedding", "id")
        # Ids of other workers look up row 0 here and become zeros, so the sum has each row once.
        local = ids - self.first_row
        elsewhere = (local < 0) | (local >= self.weight.shape[0])
        rows = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return reduce_from(rows.masked_fill(elsewhere.unsqueeze(-1), 0.0), group, in_place=True)

    def extra_repr(self) -> str:
        """Returns the sizes, for ``print(model)``."""
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.place}"


def check_ids(ids: Tensor, known: Tensor, size: int, layer: str, what: str) -> None:
    """Raises ConfigError unless ``known`` is True everywhere; a GPU asserts it later, which costs no waiting.

    A worker alone would see the error of torch; here an id of nobody would give zeros.
    """
    if type(known) is not Tensor:
        return  # a fake of an estimate, without values
    if ids.is_cuda:
        torch._assert_async(known.all())
    elif not bool(known.all()):
        wrong = int(ids[~known].flatten()[0])
        raise ConfigError(f"{layer}: {what} {wrong} is outside 0 to {size - 1}. Check the data and the vocabulary.")


def fill_weight(weight: nn.Parameter, attr: Any, layer: str, default: Callable[[Tensor], Any]) -> None:
    """Initializes a divided ``weight`` as ``attr`` says, from the stream of this worker where that exists.

    Raises:
        ConfigError: ``attr`` initializes no tensor, or asks for something that cannot be done.
    """
    fill = default if attr is None else _initializer(attr, layer, default)
    drawn: AbstractContextManager[None] = TRACKER.rng_state(STREAM) if STREAM in TRACKER.names else nullcontext()
    with drawn, torch.no_grad():
        fill(weight)
    if getattr(attr, "trainable", True) is False:
        weight.requires_grad_(False)


# Attributes of Paddle's ParamAttr that have no counterpart here, and their defaults there.
_PLAIN_ATTRIBUTES: dict[str, Sequence[Any]] = {
    "learning_rate": (1.0,),
    "regularizer": (None,),
    "do_model_average": (None, True, False),
    "need_clip": (True,),
}


def _initializer(attr: Any, layer: str, default: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    for name, plain in _PLAIN_ATTRIBUTES.items():
        value = getattr(attr, name, plain[0])
        if value not in plain:
            raise ConfigError(
                f"{layer}(weight_attr=...) has {name}={value!r}, which an attribute of a weight cannot set here. Use "
                "the parameter groups of the optimizer."
            )
    if hasattr(attr, "initializer"):
        found = attr.initializer
        if found is None:
            return default
        if callable(found):
            return cast("Callable[[Tensor], Any]", found)
    elif callable(attr) and not isinstance(attr, type):
        return cast("Callable[[Tensor], Any]", attr)
    raise ConfigError(
        f"{layer}(weight_attr={attr!r}) takes None, a callable that fills a tensor (torch.nn.init.xavier_uniform_), or "
        "an object with such an attribute 'initializer'."
    )


def uniform(weight: Tensor, fan_in: int) -> None:
    """Fills ``weight`` as torch fills a linear layer with ``fan_in`` inputs."""
    bound = 1 / math.sqrt(fan_in) if fan_in else 0.0
    nn.init.uniform_(weight, -bound, bound)


class _SharedBias(Function):
    """``bias / workers``, whose sum is the bias; every worker gets the gradient of the whole bias."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, num_workers: int) -> Tensor:
        return bias / num_workers

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


def shared_bias(bias: Tensor, num_workers: int) -> Tensor:
    """Returns the share of ``bias`` that each of ``num_workers`` adds before a sum."""
    return applied(_SharedBias, bias, num_workers)
