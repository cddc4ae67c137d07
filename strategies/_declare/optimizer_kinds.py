"""Which optimizers a strategy accepts: the torch classes behind Fleet's Momentum, SGD and Adam."""

from __future__ import annotations

from torch.optim import SGD, Adam, AdamW, Optimizer

from fleet.errors import ConfigError


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
