"""Fleet's names of the results of ``distributed_model``, for ``isinstance``: one class here, one name for each mesh.

``PipelineParallel`` is the class of every model made from a PipelineLayer, which all have ``train_batch``.
"""

from __future__ import annotations

from typing import Any

from fleet.errors import UnsupportedOptionError
from fleet.job.axes import Axes
from fleet.training.fleet_model import FleetModel
from fleet.training.pipeline_model import PipelineModel

# The first axis with more than one worker names a model without stages.
_BY_AXIS = {"mp": "TensorParallel", "sep": "SegmentParallel", "sharding": "ShardingParallel"}


def _names_of(model: FleetModel) -> tuple[str, ...]:
    """Returns Fleet's names of the wrapper that the mesh of ``model`` asks for."""
    axes: Axes = getattr(model.__dict__.get("_job"), "axes", None) or Axes({}, 0)
    if not isinstance(model, PipelineModel):
        return (next((name for axis, name in _BY_AXIS.items() if axes.size(axis) > 1), "DataParallel"),)
    if axes.size("pp") == 1:
        return ("NoPipelineParallel",)
    if model.module.num_chunks == 1:
        return ()
    interleaved = "PipelineParallelWithInterleave"
    return (interleaved, f"{interleaved}FthenB") if model.runs_forwards_first() else (interleaved,)


class _WrapperName(type):
    """Makes ``isinstance`` ask for the mesh, and a call say who makes the model."""

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, FleetModel) and cls.__name__ in _names_of(value)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedOptionError(
            f"{cls.__name__}(...): {cls._made_by}. isinstance(model, {cls.__name__}) works on what it returns."
        )

    _made_by = "fleet.distributed_model(model) makes it, from the degrees of hybrid_configs. Call that"


class NoPipelineParallel(metaclass=_WrapperName):
    """A PipelineLayer on a mesh without stages."""


class PipelineParallelWithInterleave(metaclass=_WrapperName):
    """A PipelineLayer on a mesh with stages that each have several chunks."""


class PipelineParallelWithInterleaveFthenB(metaclass=_WrapperName):
    """The same with an order that runs all forwards first, as it is with few micro-batches."""


class VPPFhenBInBalancedMemory(metaclass=_WrapperName):
    """Nothing is one: its option, ``best_unbalanced_scheduler``, is refused."""

    _made_by = (
        "pp_configs['best_unbalanced_scheduler'] would choose it, and is refused. Omit the option; fleet."
        "distributed_model(model) takes another order with as many micro-batches"
    )


class DualPipeVParallel(metaclass=_WrapperName):
    """Nothing is one: its option, ``use_dualpipev``, is refused."""

    _made_by = (
        "pp_configs['use_dualpipev'] would choose it, and is refused. Omit the option; fleet.distributed_model(model) "
        "takes 1F1B, or chunks with PipelineLayer(num_virtual_pipeline_stages=2)"
    )


class TensorParallel(metaclass=_WrapperName):
    """A model on a mesh with mp, without stages."""


class SegmentParallel(metaclass=_WrapperName):
    """A model on a mesh with sep, without stages and mp."""


class ShardingParallel(metaclass=_WrapperName):
    """A model on a mesh with sharding alone, or with dp."""
