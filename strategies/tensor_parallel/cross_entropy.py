"""The cross entropy of logits that are divided by vocabulary, without gathering them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fleet.errors import ConfigError, UnsupportedOptionError
from fleet.strategies.tensor_parallel.equal_inputs import Occasions, check_labels
from fleet.strategies.tensor_parallel.layers import check_ids
from fleet.strategies.tensor_parallel.place import CurrentJob, place_in
from fleet.strategies.tensor_parallel.regions import applied


class ParallelCrossEntropy(nn.Module):
    """The cross entropy of each row, from this worker's part of the logits.

    It exchanges three numbers a row. It is computed in float32 at least, and returned in the type of the logits, or in
    float32 under autocast.

    Args:
        mp_group: the workers that share the vocabulary; ``None`` is the mp axis of the job.
        name: accepted for Fleet's signature.
        ignore_index: the label whose rows have loss 0 and no gradient.

    Example:
        >>> loss = ParallelCrossEntropy()(torch.zeros(3, 4), torch.tensor([0, 1, 3])).mean()
    """

    def __init__(self, mp_group: Any = None, name: str | None = None, ignore_index: int = -100) -> None:
        super().__init__()
        self._name = name
        self.ignore_index = ignore_index
        self.place = place_in(mp_group, type(self).__name__)
        self._occasions = Occasions()

    def forward(self, input: Tensor, label: Tensor) -> Tensor:
        """Returns the loss of every row, of shape ``[..., 1]``; nothing is reduced.

        Args:
            input: this worker's part of the logits, ``[..., vocabulary / workers]``.
            label: whole numbers of shape ``[...]`` or ``[..., 1]``.

        Raises:
            ConfigError: the shapes do not fit, a label is outside the vocabulary and is not ``ignore_index``, or the
            workers have different labels, which is looked at now and then.
        """
        rows = input.shape[:-1]
        if label.shape not in (rows, (*rows, 1)) or label.is_floating_point():
            raise ConfigError(
                f"ParallelCrossEntropy: logits of shape {tuple(input.shape)} take whole-number labels of shape "
                f"{tuple(rows)} or {(*rows, 1)}, got {tuple(label.shape)} of {label.dtype}."
            )
        compared = CurrentJob.compared
        place = self.place
        place = place if compared is None else compared.place(place, input.shape[-1])
        label = label.reshape(-1)
        group = place.group
        if isinstance(group, dist.ProcessGroup) and self._occasions.now():  # an estimate has a stand-in
            check_labels(label, group)
        vocabulary = input.shape[-1] * place.size
        known = ((label >= 0) & (label < vocabulary)) | (label == self.ignore_index)
        check_ids(label, known, vocabulary, "ParallelCrossEntropy", "label")
        logits = input.reshape(-1, input.shape[-1])
        if group is None:
            loss = F.cross_entropy(logits, label.long(), ignore_index=self.ignore_index, reduction="none")
        else:
            loss = applied(_DividedCrossEntropy, logits, label, group, self.ignore_index)
            loss = loss if torch.is_autocast_enabled(logits.device.type) else loss.to(logits.dtype)
        return loss.reshape(*rows, 1)

    def extra_repr(self) -> str:
        """Returns the settings, for ``print(model)``."""
        return f"ignore_index={self.ignore_index}, {self.place}"


class _DividedCrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, label: Tensor, group: dist.ProcessGroup, ignore_index: int) -> Tensor:
        kind = torch.promote_types(logits.dtype, torch.float32)
        # The largest logit of the whole row first, as in a plain softmax: exp() of a large logit would overflow.
        top = logits.amax(-1).to(kind)
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        exp = logits - top[:, None] if logits.dtype == kind else logits.to(kind).sub_(top[:, None])
        local = label.long() - group.rank() * logits.shape[-1]
        elsewhere = (local < 0) | (local >= logits.shape[-1]) | (label == ignore_index)
        local = local.masked_fill(elsewhere, 0)
        picked = exp.gather(-1, local[:, None])[:, 0].masked_fill(elsewhere, 0.0)
        exp.exp_()
        sums = torch.stack([exp.sum(-1), picked])  # one message for both
        dist.all_reduce(sums, group=group)
        softmax = exp.div_(sums[0][:, None]).to(logits.dtype)
        ignored = label == ignore_index
        ctx.save_for_backward(softmax, local, elsewhere, ignored)
        return (sums[0].log() - sums[1]).masked_fill(ignored, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        softmax, local, elsewhere, ignored = ctx.saved_tensors
        scale = gradients[0].masked_fill(ignored, 0.0)[:, None].to(softmax.dtype)
        gradient = softmax * scale
        gradient.scatter_add_(-1, local[:, None], -scale.masked_fill(elsewhere[:, None], 0.0))
        return gradient, None, None, None


class ParallelMultiLabelCrossEntropy(nn.Module):
    """Refused: several labels a row.

    Raises:
        UnsupportedOptionError: always.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise UnsupportedOptionError(
            "ParallelMultiLabelCrossEntropy is not supported: no model of Fleet's examples has several labels a row, "
            "and its kernel is not documented. Use ParallelCrossEntropy once for each label and add the losses up, "
            "weighted by smooth_weight."
        )
