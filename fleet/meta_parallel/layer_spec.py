"""LayerSpec: a layer that is described by its class, or by the place of its class, and built later."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from fleet.errors import ConfigError, OptionWarning

_Made = Callable[..., Any]


@dataclass
class LayerSpec:
    """A layer for :func:`build_spec_layer`.

    Args:
        layer: the class of the layer, a function, or ``("module", "Class")``, which is imported at first use.
        extra_kwargs: keyword arguments of the class.
        sublayers_spec: handed to the class as its argument of that name, unless it is ``None``.

    Example:
        >>> build_spec_layer(LayerSpec(("torch.nn", "Linear"), {"bias": False}), 4, 2)
        Linear(in_features=4, out_features=2, bias=False)
    """

    layer: _Made | Sequence[str]
    extra_kwargs: dict[str, Any] = field(default_factory=dict)
    sublayers_spec: Any = None


def import_spec_layer(layer_path: Sequence[str]) -> Any:
    """Returns the object at ``("module", "name")``.

    Raises:
        ConfigError: it does not exist. Fleet prints a line there and returns ``None``.
    """
    if isinstance(layer_path, str) or len(layer_path) != 2:
        raise ConfigError(f"LayerSpec(layer={layer_path!r}) names a layer by its module and its name, as two texts.")
    module, name = layer_path
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"LayerSpec(layer=({module!r}, {name!r})) cannot be imported: {error}.") from error


def get_spec_layer(spec_or_layer: LayerSpec | _Made, **additional_kwargs: Any) -> Any:
    """Returns the class or function of ``spec_or_layer``; further keywords have no effect, as in Fleet."""
    layer = spec_or_layer.layer if isinstance(spec_or_layer, LayerSpec) else spec_or_layer
    return layer if callable(layer) else import_spec_layer(layer)


def build_spec_layer(spec_or_layer: LayerSpec | _Made, *args: Any, **kwargs: Any) -> Any:
    """Returns a new layer of a class, or a function as it is.

    A keyword that is given here and in ``extra_kwargs`` has the value of ``extra_kwargs``, and a warning says so.
    """
    layer = get_spec_layer(spec_or_layer)
    if not isinstance(layer, type):
        return layer
    if isinstance(spec_or_layer, LayerSpec):
        extra = spec_or_layer.extra_kwargs
        if both := sorted({*extra} & {*kwargs}):
            warnings.warn(
                f"build_spec_layer(): {both} of {layer.__name__} are given twice; extra_kwargs has precedence.",
                OptionWarning,
                stacklevel=2,
            )
        kwargs |= extra
        if spec_or_layer.sublayers_spec is not None:
            kwargs["sublayers_spec"] = spec_or_layer.sublayers_spec
    return layer(*args, **kwargs)
