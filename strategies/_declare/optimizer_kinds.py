"""The optimizers that a strategy accepts: the torch classes behind Fleet's Momentum, SGD and Adam."""

from __future__ import annotations

from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer

from fleet.errors import ConfigError

_MATRICES = {
    "Adafactor": "it takes means over the rows and columns of a parameter",
    "Muon": "it orthogonalizes the update of a whole matrix",
}
_WHOLE_ONLY = {
    **_MATRICES,
    "Rprop": "it writes into single elements by their index, which torch cannot do in a part",
    "SparseAdam": "it takes sparse gradients, and a part has dense ones",
}


def check_momentum(option: str, optimizer: Optimizer) -> None:
    """Raises ConfigError unless ``optimizer`` is ``torch.optim.SGD`` with momentum, which Fleet calls Momentum."""
    example = f"Pass torch.optim.SGD(parameters, lr, momentum=0.9), or turn {option} off."
    if not isinstance(optimizer, SGD):
        raise ConfigError(f"{option} needs torch.optim.SGD with momentum, got {type(optimizer).__name__}. {example}")
    for group in optimizer.param_groups:
        if group["momentum"] == 0:
            got = f"momentum={group['momentum']!r}"
            raise ConfigError(f"{option} needs torch.optim.SGD with momentum, got {got}. {example}")


def check_settings_off(option: str, optimizer: Optimizer, *settings: str) -> None:
    """Raises ConfigError when a group of ``optimizer`` uses a setting that the rule of ``option`` does not have."""
    for group in optimizer.param_groups:
        for setting in settings:
            if group.get(setting):
                raise ConfigError(
                    f"{option} has no {setting}, got an optimizer with {setting}={group[setting]!r}. "
                    f"Leave {setting} at its default, or turn {option} off."
                )


def check_sgd(option: str, optimizer: Optimizer) -> None:
    """Raises ConfigError unless ``optimizer`` is ``torch.optim.SGD``, with or without momentum."""
    if not isinstance(optimizer, SGD):
        raise ConfigError(
            f"{option} needs torch.optim.SGD, with or without momentum, got {type(optimizer).__name__}. "
            f"Pass torch.optim.SGD(parameters, lr), or turn {option} off."
        )


def check_adam(option: str, optimizer: Optimizer) -> None:
    """Raises ConfigError unless ``optimizer`` is ``torch.optim.Adam``; AdamW, which decays differently, is not."""
    if not isinstance(optimizer, Adam) or isinstance(optimizer, AdamW):
        raise ConfigError(
            f"{option} needs torch.optim.Adam, got {type(optimizer).__name__}. "
            f"Pass torch.optim.Adam(parameters, lr), or turn {option} off."
        )


def whole_only(optimizer: Optimizer) -> tuple[str, str] | None:
    """Returns name and reason of an optimizer of torch that cannot update DTensors, ``None`` for any other."""
    return next(
        ((f"torch.optim.{name}", _WHOLE_ONLY[name]) for name in _torch_kinds(optimizer) if name in _WHOLE_ONLY), None
    )


def check_parts_of_model(optimizer: Optimizer, *, has_parts: bool) -> None:
    """Raises ConfigError for an optimizer that computes over whole parameters, or over all of them together.

    Args:
        optimizer: the user's, in a job whose workers hold parts of one model.
        has_parts: whether some of its parameters are divided themselves.
    """
    if isinstance(optimizer, LBFGS):
        raise ConfigError(
            "torch.optim.LBFGS keeps one history over all parameters, and with mp_degree or pp_degree above 1 a worker "
            "holds some of them. Use an optimizer that updates each parameter by itself."
        )
    name = next((name for name in _torch_kinds(optimizer) if name in _MATRICES), None)
    if has_parts and name is not None:
        instead = "fleet.optimizer.Muon, which gathers what it needs" if name == "Muon" else "AdamW"
        raise ConfigError(
            f"torch.optim.{name} needs whole parameters: {_MATRICES[name]}. With mp_degree above 1 a worker holds "
            f"parts of some, and the result would be another one. Use {instead}."
        )


def _torch_kinds(optimizer: Optimizer) -> list[str]:
    return [kind.__name__ for kind in type(optimizer).__mro__ if kind.__module__.startswith("torch.optim")]
