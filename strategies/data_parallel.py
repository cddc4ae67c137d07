"""data_parallel: every worker holds the whole model and the gradients are averaged while backward runs.

Always on in a collective job of more than one worker, unless another strategy takes the exchange over.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fleet.strategies._base import Guide, Stage, Strategy
from fleet.strategies._config import Config, setting
from fleet.strategies._exchange import exchange_of

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


@dataclass(frozen=True, kw_only=True)
class DataParallelSettings(Config):
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


class DataParallel(Strategy):
    """Averages gradients over all workers with torch's DistributedDataParallel."""

    name = "data_parallel"
    meaning = "Average the gradients of all workers while backward runs."
    stage = Stage.SHARD
    Settings = DataParallelSettings
    always = True
    model_effect = "averages the gradients of all workers in buckets while backward runs; parameters start as rank 0's"
    guide = Guide(
        when="Always on with more than one worker. Larger buckets suit a slow network, smaller ones a small model.",
        cost="One all-reduce of each gradient per step, mostly hidden behind backward. The buckets are the gradients.",
        formula="g = (g_1 + ... + g_N) / N",
        source="Li et al., 2020, arXiv 2006.15704",
        example={"fuse_grad_size_in_MB": 16},
    )

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Returns a DistributedDataParallel module; parameters and buffers then equal rank 0's everywhere."""
        parameters = [p for p in model.parameters() if p.requires_grad]
        if not parameters:
            return model  # nothing to exchange, and DistributedDataParallel refuses such a module
        wrapped = wrap_data_parallel(
            model,
            device=self.session.device,
            process_group=self.session.process_group,
            bucket_MiB=self.session.options["fuse_grad_size_in_MB"],
            last_bucket_MiB=self.session.options["last_comm_group_size_MB"],
            fuse=self.session.options["fuse_all_reduce_ops"],
            find_unused_parameters=self.session.options["find_unused_parameters"],
        )
        if self.session.options["gradient_scale_configs"].scale_strategy != "avg":
            exchange_of(wrapped).change(average=False)
        return wrapped


def wrap_data_parallel(
    model: nn.Module,
    *,
    device: torch.device,
    process_group: Any,
    bucket_MiB: float,
    last_bucket_MiB: float,
    fuse: bool = True,
    find_unused_parameters: bool = False,
) -> DistributedDataParallel:
    """Returns ``model`` in DistributedDataParallel with buckets as Fleet describes them (sizes in MiB)."""
    keywords: dict[str, Any] = {
        "device_ids": [device.index] if device.type == "cuda" else None,
        "process_group": process_group,
        "find_unused_parameters": find_unused_parameters,
        # The bucket is the gradient: one copy and its memory less per step.
        "gradient_as_bucket_view": True,
    }
    if not fuse:
        keywords["bucket_cap_mb"] = 1 / _MIB  # one byte: every parameter fills a bucket
    elif "bucket_cap_mb_list" in inspect.signature(DistributedDataParallel).parameters:
        sizes = [p.numel() * p.element_size() for p in model.parameters() if p.requires_grad]
        keywords["bucket_cap_mb_list"] = plan_bucket_caps_MiB(sizes, bucket_MiB, last_bucket_MiB)
    else:
        keywords["bucket_cap_mb"] = bucket_MiB
    return DistributedDataParallel(model, **keywords)


def plan_bucket_caps_MiB(sizes_bytes: Sequence[int], bucket_MiB: float, last_MiB: float) -> list[float]:
    """Returns the cap of each bucket, in the order in which backward fills them.

    Backward produces gradients roughly from the last parameter to the first, and a bucket closes at the parameter
    that reaches its cap. The parameters defined first therefore make the last bucket; it holds as many of them as
    fit into ``last_MiB`` (at least one), and the bucket before it ends exactly where it begins.

    Example:
        >>> plan_bucket_caps_MiB([1 << 20, 1 << 20, 4 << 20], bucket_MiB=32, last_MiB=1.0)
        [5.0, 32.0]
    """
    last_bytes, num_last = 0, 0
    for size in sizes_bytes:
        if num_last and last_bytes + size > last_MiB * _MIB:
            break
        last_bytes, num_last = last_bytes + size, num_last + 1
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
