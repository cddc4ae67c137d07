"""sync_batch_norm: batch norm uses the mean and variance over the batches of all workers, on GPU and CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fleet.errors import ConfigError
from fleet.job.axes import COPY_AXES
from fleet.strategies._declare.strategy import Guide, Stage, Strategy


class SyncBatchNorm(Strategy):
    """Replaces every batch-norm module by a module that shares its statistics."""

    name = "sync_batch_norm"
    meaning = "Compute batch-norm statistics over the batches of all workers."
    stage = Stage.MODULE
    steps_together = True
    model_effect = "replaces batch-norm modules by ones that share mean and variance over all workers"
    guide = Guide(
        when="Few rows per worker, so that a worker's own mean and variance are noisy.",
        cost="One all-gather forward and one all-reduce backward per batch-norm module, for which every worker waits.",
        formula="mean and variance over the rows of all workers",
        source="Chan, Golub and LeVeque, 1979, for the variance of a union",
        example={"sync_batch_norm": True},
    )

    @classmethod
    def notes(cls, options: object, world_size: int) -> tuple[str, ...]:
        """Returns the remark that one worker has no other to share with."""
        return ("sync_batch_norm changes nothing with one worker.",) if world_size == 1 else ()

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Returns ``model`` with every batch norm replaced; parameters and buffers are the same objects."""
        # Workers along mp and pp see the same rows: theirs must not be counted again.
        group = self.job.axes.group(*COPY_AXES)
        if group is None:
            return model
        if group == dist.group.WORLD:
            group = None  # the same to torch, and a module that holds a group cannot be copied
        if self.job.device.type == "cuda":
            converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model, group)
            return converted
        return convert_batch_norm(model, group)

    def note_parameters(self, model: nn.Module, added: Mapping[str, nn.Parameter]) -> None:
        """Raises ConfigError for a new batch norm, which is not replaced."""
        plain = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
        if added and self.job.axes.group(*COPY_AXES) is not None and any(isinstance(m, plain) for m in model.modules()):
            raise ConfigError(
                f"{next(iter(added))!r} was added to the model after distributed_model(), and sync_batch_norm replaced "
                "the batch norms that were there then. Complete the model first, then call distributed_model()."
            )


class SharedBatchNorm(_BatchNorm):
    """Batch norm over the batches of all workers of ``process_group``, on the CPU.

    There DistributedDataParallel refuses torch's SyncBatchNorm, which GPUs take.
    """

    def __init__(self, like: _BatchNorm, process_group: Any) -> None:
        super().__init__(like.num_features, like.eps, like.momentum, like.affine, like.track_running_stats)
        self.process_group = process_group
        for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
            setattr(self, name, getattr(like, name))
        self.training = like.training

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise ValueError(
                f"sync_batch_norm got an input of shape {tuple(input.shape)}; "
                f"it takes (rows, {self.num_features}, ...)."
            )

    def forward(self, input: Tensor) -> Tensor:
        """Returns the normalised input; shapes as in BatchNorm1d, 2d and 3d."""
        self._check_input_dim(input)
        if not self._uses_batch_statistics():
            return self._normalise_with_running(input)
        out: Tensor = _SharedStatistics.apply(input, self.weight, self.bias, self)  # type: ignore[no-untyped-call]
        return out

    def _uses_batch_statistics(self) -> bool:
        return self.training or self.running_mean is None

    def _normalise_with_running(self, input: Tensor) -> Tensor:
        return nn.functional.batch_norm(
            input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
        )

    def update_running(self, mean: Tensor, biased_var: Tensor, count: Tensor) -> None:
        """Moves the running statistics towards those of the whole batch, variance unbiased, as BatchNorm does."""
        if not (self.training and self.track_running_stats) or self.running_mean is None or self.running_var is None:
            return
        factor = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if factor is None:
                factor = 1.0 / float(self.num_batches_tracked)
        unbiased = biased_var * (count / (count - 1).clamp(min=1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor or 0.0)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor or 0.0)


class _SharedStatistics(torch.autograd.Function):
    """Batch norm over the union of all workers' batches: one all_gather forward, one all_reduce backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, module: SharedBatchNorm) -> Tensor:
        rows = x.transpose(0, 1).flatten(1).float()
        count = rows.new_full((1,), float(rows.shape[1]))
        mean = rows.mean(1) if rows.shape[1] else rows.new_zeros(rows.shape[0])
        spread = (rows - mean[:, None]).square().sum(1)
        # One message for all three; a worker without rows takes part with the count 0.
        gathered = _gather(torch.cat([mean, spread, count]), module.process_group)
        means = gathered[:, : len(mean)]
        spreads = gathered[:, len(mean) : -1]
        counts = gathered[:, -1:]
        total = gathered[:, -1].sum()
        # Chan, Golub and LeVeque (1979): the spread of a union from the spreads and means of its parts.
        mean = (means * counts).sum(0) / total
        var = (spreads + counts * (means - mean).square()).sum(0) / total
        module.update_running(mean, var, total)
        scale = torch.rsqrt(var + module.eps)
        normal = (x - _per_channel(mean, x)) * _per_channel(scale, x)
        ctx.save_for_backward(normal, scale, weight, total)
        ctx.group = module.process_group
        out = normal if weight is None else normal * _per_channel(weight, x)
        return (out if bias is None else out + _per_channel(bias, x)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        normal, scale, weight, total = ctx.saved_tensors
        dims = [0, *range(2, grad.dim())]
        grad_bias = grad.sum(dims)
        grad_weight = (grad * normal).sum(dims)
        sums = torch.cat([grad_bias, grad_weight]).float()
        dist.all_reduce(sums, group=ctx.group)
        mean_grad, mean_product = (sums / total).chunk(2)
        inner = grad - _per_channel(mean_grad, grad) - normal * _per_channel(mean_product, grad)
        factor = scale if weight is None else scale * weight
        grad_x = (inner * _per_channel(factor, grad)).to(grad.dtype)
        # Weight and bias stay local sums: data parallel averages them like every other gradient.
        return grad_x, None if weight is None else grad_weight, None if weight is None else grad_bias, None


def _gather(local: Tensor, group: Any) -> Tensor:
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, local, group=group)
    return torch.stack(parts)


def _per_channel(values: Tensor, like: Tensor) -> Tensor:
    return values.to(like.dtype).view(1, -1, *[1] * (like.dim() - 2))


def convert_batch_norm(module: nn.Module, group: Any) -> nn.Module:
    """Returns ``module`` with each batch norm in it replaced by :class:`SharedBatchNorm`, parameters shared."""
    if isinstance(module, _BatchNorm) and not isinstance(module, SharedBatchNorm):
        return SharedBatchNorm(module, group)
    for name, child in list(module.named_children()):
        replacement = convert_batch_norm(child, group)
        if replacement is not child:
            setattr(module, name, replacement)
    return module
