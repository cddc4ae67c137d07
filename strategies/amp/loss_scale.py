"""LossScale: the factor on the backward signal of a float16 model, and when it grows and shrinks.

The factor is a number of the host: a step decides once, on the host, whether it happens, and nothing else waits.
"""

from __future__ import annotations

from typing import Any

import torch

from fleet.errors import CheckpointError

_LARGEST = torch.finfo(torch.float32).max


class LossScale:
    """The loss scale of one job, with the counters of Paddle's ``update_loss_scaling``.

    A finite step: ``good`` rises by 1 and ``bad`` is 0; at ``incr_every_n_steps`` the scale is multiplied by
    ``incr_ratio``, unless that is not finite in float32, and ``good`` starts again. A step with an inf or nan: ``bad``
    rises by 1 and ``good`` is 0; at ``decr_every_n_nan_or_inf`` the scale is multiplied by ``decr_ratio``, not below
    1, and ``bad`` starts again.

    Args:
        config: the values of ``amp_configs``.
        enabled: False for bfloat16, whose range is that of float32; the factor is then 1 for good.

    Attributes:
        in_use: whether the backward signal is scaled here: enabled, and no explicit scaler has taken over.
    """

    def __init__(self, config: Any, *, enabled: bool) -> None:
        self._config = config
        self.in_use = enabled
        self.scale: float = config.init_loss_scaling if enabled else 1.0
        self.good = self.bad = 0
        self._stepped: dict[int, bool] = {}
        self.scaler: Any = None

    @property
    def factor(self) -> float:
        """What the backward signal is multiplied by at this moment."""
        return self.scale if self.in_use else 1.0

    def give_way(self, scaler: Any = None) -> None:
        """Leaves scaling to ``scaler`` (a GradScaler, or ``None`` when it is not known) from now on."""
        self.in_use = False
        self.scaler = scaler if scaler is not None else self.scaler

    def current(self) -> float:
        """Returns the scale in force: the explicit scaler's when there is one, 1.0 without scaling."""
        return float(self.scaler.get_scale()) if self.scaler is not None else self.factor

    def count(self, optimizer: int, *, finite: bool, num_optimizers: int) -> None:
        """Counts a step of one optimizer; the scale moves once for each round of all of them.

        A round ends when each has stepped, or when one steps again (a discriminator that steps more often). It is
        finite when all its steps were.
        """
        if optimizer in self._stepped:
            self._end_round()
        self._stepped[optimizer] = finite
        if len(self._stepped) >= num_optimizers:
            self._end_round()

    def _end_round(self) -> None:
        finite, self._stepped = all(self._stepped.values()), {}
        self.update(finite=finite)

    def update(self, *, finite: bool) -> None:
        """Counts a round of steps and moves the scale."""
        config = self._config
        if not self.in_use or not config.use_dynamic_loss_scaling:
            return
        if finite:
            self.good, self.bad = self.good + 1, 0
            if self.good == config.incr_every_n_steps:
                grown = self.scale * config.incr_ratio
                self.scale, self.good = (grown if grown <= _LARGEST else self.scale), 0
        else:
            self.good, self.bad = 0, self.bad + 1
            if self.bad == config.decr_every_n_nan_or_inf:
                self.scale, self.bad = max(1.0, self.scale * config.decr_ratio), 0

    def state_dict(self) -> dict[str, Any]:
        """Returns what :meth:`load_state_dict` needs to continue exactly."""
        return {"scale": self.scale, "good": self.good, "bad": self.bad}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where ``state`` was taken; without scaling there is nothing to continue.

        Raises CheckpointError when an entry is missing or the scale is not a positive number.
        """
        if not self.in_use:
            return
        try:
            scale, good, bad = float(state["scale"]), int(state["good"]), int(state["bad"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"The optimizer state holds {state!r} as the state of amp; scale, good and bad are "
                                  "numbers. Save it again with optimizer.state_dict().") from error  # fmt: skip
        if not 0 < scale <= _LARGEST:
            raise CheckpointError(f"The optimizer state holds the loss scale {scale!r}; it must be above 0 and finite.")
        self.scale, self.good, self.bad = scale, good, bad
