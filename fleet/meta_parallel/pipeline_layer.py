"""PipelineLayer: a model as a list of layers; each worker builds the layers of its stage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from fleet.errors import ConfigError, NotInitializedError, UnsupportedOptionError
from fleet.job.running import running_job
from fleet.strategies.pipeline.descriptions import LayerDesc, StagedLayers


class PipelineLayer(StagedLayers):
    """The layers of this worker's stage. The running job says which stage that is: ``fleet.init`` comes first.

    ``fleet.distributed_model`` turns it into a model with ``train_batch``. Names of parameters hold the place in the
    list: ``"3.weight"``; layers of ``SharedLayerDesc`` are ``"shared_layers.<key>.<name>"``. They are the same for
    every number of stages, and so are the values at the start.

    Args:
        layers: ``LayerDesc``, ``SharedLayerDesc``, ready layers and functions, in order; or an ``nn.Sequential``.
            Each takes the result of the layer before it, a tuple as one argument.
        num_stages: must be the pp degree, when given.
        topology: accepted; its pipe axis must be the pp degree.
        loss_fn: ``loss_fn(output, label)``, a mean over the rows that it is given; or a list of such functions. A
            warning names a function that is no such mean, as far as two micro-batches show it.
        seg_method: ``"uniform"``, ``"layer:REGEX"`` (class names) or a list of the first layer of each part.
        recompute_interval: above 0, each run of so many layers computes its activations again in backward.
        recompute_ctx: ``{"offload": True}`` keeps the inputs of these runs in host memory.
        num_virtual_pipeline_stages: chunks of layers per stage; above 1 they take turns, which shortens the time in
            which stages wait.
        use_cudagraph: refused.
        use_dualpipev: refused.

    Example:
        >>> layers = [LayerDesc(nn.Linear, 8, 8), nn.functional.relu, LayerDesc(nn.Linear, 8, 2)]
        >>> model = PipelineLayer(layers, loss_fn=nn.functional.cross_entropy)
    """

    def __init__(
        self,
        layers: Iterable[LayerDesc | nn.Module | Callable[..., Any]],
        num_stages: int | None = None,
        topology: Any = None,
        loss_fn: Any = None,
        seg_method: str | Sequence[int] = "uniform",
        recompute_interval: int = 0,
        recompute_ctx: Mapping[str, Any] | None = None,
        num_virtual_pipeline_stages: int | None = None,
        use_cudagraph: bool = False,
        use_dualpipev: bool = False,
    ) -> None:
        _check_offered(use_cudagraph, use_dualpipev, recompute_interval, recompute_ctx)
        job = running_job()
        if job is None and (num_stages or 1) > 1:
            raise NotInitializedError("PipelineLayer() needs to know its stage: call fleet.init(...) before it.")
        degree = 1 if job is None else job.axes.size("pp")
        asked = {"num_stages": num_stages, "topology": None if topology is None else topology.get_dim("pipe")}
        for name, value in asked.items():
            if value is not None and value != degree:
                raise ConfigError(
                    f"PipelineLayer({name}=...) asks for {value} stages, and the job has {degree}. Set "
                    "hybrid_configs['pp_degree'], or omit the argument."
                )
        super().__init__(
            layers,
            degree,
            0 if job is None else job.axes.rank("pp"),
            loss_fn=loss_fn,
            seg_method=seg_method,
            recompute_interval=recompute_interval,
            offload=bool((recompute_ctx or {}).get("offload")),
            num_chunks=_checked_chunks(num_virtual_pipeline_stages),
        )
        self.__dict__["_topo"] = topology

    def save_state_dict(self, path: str) -> None:
        """Refused: one file per layer and worker would load wrongly where the mesh is another one."""
        raise UnsupportedOptionError(_one_state("save_state_dict", path))

    def set_state_dir(self, path: str) -> None:
        """Refused, as :meth:`save_state_dict`."""
        raise UnsupportedOptionError(_one_state("set_state_dir", path))


def _one_state(call: str, path: str) -> str:
    return (
        f"PipelineLayer.{call}({path!r}): a file per layer and worker fits one mesh, and another one would take parts "
        "for whole weights. Use fleet.elastic.Checkpoint, or model.full_state_dict() and load_full_state_dict()."
    )


def _check_offered(cudagraph: bool, dualpipev: bool, interval: int, context: Mapping[str, Any] | None) -> None:
    if dualpipev:
        raise UnsupportedOptionError(
            "PipelineLayer(use_dualpipev=True): the schedule is not offered. Use num_virtual_pipeline_stages=2, which "
            "also gives each stage two parts of the model."
        )
    if cudagraph:
        raise UnsupportedOptionError(
            "PipelineLayer(use_cudagraph=True): transfers between stages are not part of a graph. Turn "
            "strategy.to_static on, which compiles the layers of a stage."
        )
    if isinstance(interval, bool) or not isinstance(interval, int) or interval < 0:
        raise ConfigError(f"PipelineLayer(recompute_interval={interval!r}): it is a number of layers, 0 for none.")
    if (context or {}).get("partition"):
        raise UnsupportedOptionError(
            "PipelineLayer(recompute_ctx={'partition': True}) would keep a part of each activation on each worker of "
            "the mp axis; it is not offered. Set offload, or use sequence parallelism, which divides activations."
        )


def _checked_chunks(number: int | None) -> int:
    if number is None:
        return 1
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ConfigError(f"PipelineLayer(num_virtual_pipeline_stages={number!r}): it is a number of at least 1.")
    return number
