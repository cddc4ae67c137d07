"""Descriptions of layers, built where they are needed; and StagedLayers, the part of a list of layers on this worker.

[Note: Same on every mesh]
Layer ``i`` of the list is built with a seed that depends on ``i`` and on the random stream before the list, and the
streams continue as if one number had been drawn. Names hold the place in the whole list. So neither the start nor the
names of a state depend on how many stages and chunks there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from fleet.errors import ConfigError, UnsupportedOptionError
from fleet.strategies._shared.segments import run_segment
from fleet.strategies.pipeline.cut import Method, plan_cut

if TYPE_CHECKING:
    from fleet.strategies.pipeline.mean_loss import MeanLoss

TIED = "fleet_tied"
_SEEDS = 2**31


class LayerDesc:
    """A layer that is built on the stage that runs it.

    Args:
        layer_func: the class of the layer, a subclass of ``torch.nn.Module``.
        inputs: positional arguments of the class.
        kwargs: keyword arguments of the class.

    Example:
        >>> LayerDesc(nn.Linear, 4, 2).build_layer()
        Linear(in_features=4, out_features=2, bias=True)
    """

    def __init__(self, layer_func: type[nn.Module], *inputs: Any, **kwargs: Any) -> None:
        if not (isinstance(layer_func, type) and issubclass(layer_func, nn.Module)):
            raise ConfigError(
                f"{type(self).__name__}() takes a class derived from torch.nn.Module, got {layer_func!r}. Put a ready "
                "layer or a function into the list as it is."
            )
        self.layer_func = layer_func
        self.inputs = inputs
        self.kwargs = kwargs

    def build_layer(self) -> nn.Module:
        """Returns a new layer."""
        return self.layer_func(*self.inputs, **self.kwargs)

    def __repr__(self) -> str:
        shown = [*map(repr, self.inputs), *(f"{name}={value!r}" for name, value in self.kwargs.items())]
        return f"{type(self).__name__}({', '.join([self.layer_func.__name__, *shown])})"


class SharedLayerDesc(LayerDesc):
    """A layer that stands at several places of the list and is one layer: its parameters are equal on all of them.

    Args:
        key: the name of the layer; descriptions of one key are one layer.
        layer_func: the class of the layer, the same in all descriptions of the key.
        forward_func: called as ``forward_func(layer, x)`` in place of the layer.
        shared_weight_attr: the attribute of the shared parameter, or several; all parameters of the layer are shared.
        inputs: positional arguments of the class.
        kwargs: keyword arguments of the class.
    """

    def __init__(
        self,
        key: str,
        layer_func: type[nn.Module],
        forward_func: Callable[[Any, Any], Any] | None = None,
        shared_weight_attr: str | Sequence[str] = "weight",
        *inputs: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(layer_func, *inputs, **kwargs)
        self.layer_name = key
        self.forward_func = forward_func
        self.shared_weight_attr = shared_weight_attr

    def build_layer(self) -> nn.Module:
        """Returns a new layer; raises ConfigError when it lacks a shared attribute."""
        layer = super().build_layer()
        names = [self.shared_weight_attr] if isinstance(self.shared_weight_attr, str) else self.shared_weight_attr
        for name in names:
            if not isinstance(getattr(layer, name, None), Tensor):
                raise ConfigError(
                    f"SharedLayerDesc({self.layer_name!r}, ..., shared_weight_attr={self.shared_weight_attr!r}): "
                    f"{self.layer_func.__name__} has no parameter {name!r}. Name a direct attribute of the layer."
                )
        return layer


class LocalSharedLayerDesc(LayerDesc):
    """Refused: it shares a layer between the two halves of a DualPipeV stage, and that schedule is not offered."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise UnsupportedOptionError(
            "LocalSharedLayerDesc belongs to the DualPipeV schedule, which is not offered. Write SharedLayerDesc, "
            "which shares a layer between any stages."
        )


Layer = LayerDesc | nn.Module | Callable[..., Any]
Runner = Callable[[Any], Any]
# The name of a layer, which a strategy or the user may replace by another module, and the function that runs it.
Entry = tuple[str | None, Callable[..., Any] | None]


class StagedLayers(nn.Module):
    """The layers of a list that run on one stage; see [Note: Same on every mesh].

    Args:
        layers: descriptions, ready layers and functions, in the order in which data passes them; or an nn.Sequential.
        num_stages: how many stages there are.
        stage: which of them this worker is.
        loss_fn: ``loss_fn(output, label)`` returns the loss; a list of such functions is chosen from by train_batch.
        seg_method: where the list is cut, see :func:`fleet.strategies.pipeline.cut.plan_cut`.
        recompute_interval: above 0, so many layers in a row forget their activations and compute them again.
        offload: keep the inputs of recomputed layers in host memory.
        num_chunks: chunks of layers per stage; above 1 the schedule is interleaved.

    Attributes:
        segment_parts: the boundaries of the parts; part ``i`` runs on stage ``i % num_stages``.
        shared_layers: the layers of SharedLayerDesc on this stage, by key.
        ties: the stages that hold each key that more than one stage holds, the owner first.
    """

    def __init__(
        self,
        layers: Iterable[Layer],
        num_stages: int,
        stage: int,
        *,
        loss_fn: Any = None,
        seg_method: Method = "uniform",
        recompute_interval: int = 0,
        offload: bool = False,
        num_chunks: int = 1,
    ) -> None:
        super().__init__()
        self._layers_desc = [*layers.children()] if isinstance(layers, nn.Sequential) else list(layers)
        self.num_stages = num_stages
        self.stage = stage
        self.num_chunks = num_chunks
        self._recompute_interval = recompute_interval
        self._offload = offload
        self.set_loss(loss_fn)  # not a part of the model: its name would depend on the stage
        names = [_name_of(layer, at) for at, layer in enumerate(self._layers_desc)]
        self.segment_parts = plan_cut(names, num_stages * num_chunks, seg_method)
        self.seg_method = seg_method
        self.ties = self._plan_ties()
        self.shared_layers = nn.ModuleDict()
        # Drawn before anything is built, on every stage: the seeds of layers are this number and their place.
        base = int(torch.randint(_SEEDS, ()))
        self._entries = [self._build(chunk, base) for chunk in range(num_chunks)]
        self._mark_ties()

    # ---- what user code reads -------------------------------------------------------------------------------------

    @property
    def loss_functions(self) -> list[Callable[[Any, Any], Tensor]]:
        """The loss functions, in a list also where there is one; empty without."""
        loss = self.__dict__["_loss_fn"]
        return [] if loss is None else [*loss] if isinstance(loss, list | tuple) else [loss]

    @property
    def run_function(self) -> list[Runner]:
        """The functions that this stage runs, in order, over all its chunks."""
        return [runner for chunk in range(self.num_chunks) for runner, _ in self._runners(chunk)]

    @property
    def _start_pos(self) -> int:
        return self.segment_parts[self.stage]

    @property
    def _end_pos(self) -> int:
        return self.segment_parts[self.stage + 1]

    def get_stage_from_index(self, layer_idx: int) -> int:
        """Returns the stage that runs the layer at ``layer_idx`` of the list."""
        if not 0 <= layer_idx < len(self._layers_desc):
            raise ConfigError(f"get_stage_from_index({layer_idx}): the list has {len(self._layers_desc)} layers.")
        part = sum(boundary <= layer_idx for boundary in self.segment_parts[1:])
        return part % self.num_stages

    def get_num_virtual_stages(self) -> int:
        """Returns the number of chunks per stage."""
        return self.num_chunks

    def get_model_chunks(self) -> list[Runner] | None:
        """Returns one callable for each chunk of this stage; ``None`` when there is one chunk."""
        if self.num_chunks == 1:
            return None
        return [partial(self.forward, chunk_id=chunk) for chunk in range(self.num_chunks)]

    def layers_of(self, chunk: int) -> range:
        """Returns the places in the list of the layers of ``chunk``."""
        part = chunk * self.num_stages + self.stage
        return range(self.segment_parts[part], self.segment_parts[part + 1])

    def modules_of(self, chunk: int) -> list[nn.Module]:
        """Returns the modules of ``chunk``, in order; a module that is shared within the stage may occur again."""
        return [module for _, module in self._runners(chunk) if module is not None]

    def tied_parameters(self, key: str) -> list[nn.Parameter]:
        """Returns the parameters of the shared layer ``key``; none where another stage holds it."""
        return list(self.shared_layers[key].parameters()) if key in self.shared_layers else []

    def tied_buffers(self, key: str) -> list[Tensor]:
        """Returns the buffers of the shared layer ``key``; none where another stage holds it."""
        return list(self.shared_layers[key].buffers()) if key in self.shared_layers else []

    def holds(self, key: str) -> bool:
        """Returns whether this stage has the shared layer ``key``."""
        return key in self.shared_layers

    def set_loss(self, loss_fn: Any) -> None:
        """Makes ``loss_fn`` the loss, or the list of losses."""
        self.__dict__["_loss_fn"] = loss_fn
        self._mean_loss: MeanLoss | None = None
        for loss in self.loss_functions:
            check_loss(loss)

    @property
    def mean_loss(self) -> MeanLoss:
        """The watch over loss functions that should be means over rows."""
        if self._mean_loss is None:
            from fleet.strategies.pipeline.mean_loss import MeanLoss  # only where a pipeline trains

            self._mean_loss = MeanLoss()
        return self._mean_loss

    # ---- running --------------------------------------------------------------------------------------------------

    def forward(self, input: Any, chunk_id: int | None = None) -> Any:  # noqa: A002 - the name of Fleet
        """Returns ``input`` after the layers of this stage; with several chunks ``chunk_id`` says which."""
        if chunk_id is None and self.num_chunks > 1 and self.num_stages > 1:
            raise ConfigError(
                f"forward(input) of a stage with {self.num_chunks} chunks: other stages run in between. Give chunk_id."
            )
        chunks = range(self.num_chunks) if chunk_id is None else (chunk_id,)
        value = input
        for runners in map(self._runners, chunks):
            if self._recompute_interval:
                for start in range(0, len(runners), self._recompute_interval):
                    value = self._recomputed(runners[start : start + self._recompute_interval], value)
            else:
                for runner, _ in runners:
                    value = runner(value)
        return value

    def _runners(self, chunk: int) -> list[tuple[Runner, nn.Module | None]]:
        """Returns the function of each entry of ``chunk``, with the module that now has the entry's name."""
        # By name, in each forward: strategies replace layers (qat, sync_batch_norm) after the list was built.
        found: list[tuple[Runner, nn.Module | None]] = []
        for name, function in self._entries[chunk]:
            module = None if name is None else self.get_submodule(name)
            if module is not None:
                found.append((module if function is None else partial(function, module), module))
            elif function is not None:
                found.append((function, None))
        return found

    def _recomputed(self, runners: list[tuple[Runner, nn.Module | None]], value: Any) -> Any:
        def run(given: Any) -> Any:
            for runner, _ in runners:
                given = runner(given)
            return given

        modules = [module for _, module in runners if module is not None]
        if not any(p.requires_grad for module in modules for p in module.parameters()):
            return run(value)
        offloaded: set[int] | None = None if self._offload else set()
        return run_segment(run, (value,), {}, modules, offloaded, name="a segment of recompute_interval")

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # A loss that is a module (weights of classes) is no submodule, and would stay behind on .to() and .cuda().
        for loss in self.loss_functions:
            if isinstance(loss, nn.Module):
                loss._apply(fn, recurse)
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    # ---- building -------------------------------------------------------------------------------------------------

    def _build(self, chunk: int, base: int) -> list[Entry]:
        return [self._built(at, self._layers_desc[at], base) for at in self.layers_of(chunk)]

    def _built(self, at: int, layer: Layer, base: int) -> Entry:
        if isinstance(layer, SharedLayerDesc):
            self._share(layer, base)
            return f"shared_layers.{layer.layer_name}", layer.forward_func
        if isinstance(layer, LayerDesc):
            with seeded(base + at):
                layer = layer.build_layer()
        if isinstance(layer, nn.Module):
            self.add_module(str(at), layer)
            return str(at), None
        return None, layer

    def _share(self, desc: SharedLayerDesc, base: int) -> None:
        key = desc.layer_name
        if key not in self.shared_layers:
            with seeded(base + self._places(key)[0]):
                self.shared_layers[key] = desc.build_layer()

    def _places(self, key: str) -> list[int]:
        descs = enumerate(self._layers_desc)
        return [at for at, desc in descs if isinstance(desc, SharedLayerDesc) and desc.layer_name == key]

    def _plan_ties(self) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {}
        for desc in self._layers_desc:
            if isinstance(desc, SharedLayerDesc) and desc.layer_name not in found:
                places = self._places(desc.layer_name)
                classes = {cast(SharedLayerDesc, self._layers_desc[at]).layer_func: None for at in places}
                if len(classes) > 1:
                    raise ConfigError(
                        f"SharedLayerDesc({desc.layer_name!r}) names the classes "
                        f"{', '.join(kind.__name__ for kind in classes)}; descriptions of one key are one layer. Give "
                        "them one class, and let forward_func(layer, x) do what is different at a place."
                    )
                found[desc.layer_name] = tuple(sorted(set(map(self.get_stage_from_index, places))))
        return {key: stages for key, stages in found.items() if len(stages) > 1}

    def _mark_ties(self) -> None:
        for key, stages in self.ties.items():
            for parameter in self.tied_parameters(key):
                parameter.__dict__[TIED] = stages


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Makes torch draw from ``seed`` inside the context; its streams continue afterwards as if nothing was drawn."""
    # A generator that CUDA does not have yet is not forked: fork_rng would initialize CUDA.
    device = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=device):
        torch.default_generator.manual_seed(seed)
        if device:
            torch.cuda.manual_seed(seed)
        yield


def _name_of(layer: Any, at: int) -> str:
    if isinstance(layer, LayerDesc):
        return layer.layer_func.__name__
    if isinstance(layer, type) or not callable(layer):
        raise ConfigError(
            f"PipelineLayer: entry {at} of the list is {layer!r}; it takes LayerDesc(class, ...), a ready layer or a "
            "function."
        )
    return getattr(layer, "__name__", type(layer).__name__)


def check_loss(loss: Any) -> None:
    """Raises ConfigError unless ``loss`` is a function without parameters."""
    if not callable(loss):
        raise ConfigError(f"PipelineLayer(loss_fn=...) takes a function of output and label, got {loss!r}.")
    if isinstance(loss, nn.Module) and any(True for _ in loss.parameters()):
        raise ConfigError(
            f"PipelineLayer(loss_fn=...): {type(loss).__name__} has parameters, which only the last stage would train. "
            "Make it the last layer of the list."
        )
