"""Errors of torch and gloo, explained for a job: which worker is missing and where, which parameter, which option."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from fleet.common.log import LOGGER
from fleet.errors import ConfigError, FleetError, RendezvousError
from fleet.job.whereabouts import account, user_line, user_line_of

if TYPE_CHECKING:
    from fleet.job.roll_call import RollCall
    from fleet.job.wrapped_model import WrappedModel

_BROKEN = re.compile(
    r"Connection (closed by peer|reset by peer|refused)|Broken pipe|Timed out waiting|Application timeout|Read error|"
    r"Read timeout|Wait timeout|wait timeout|remote process exited|NCCL (communicator was )?aborted|Watchdog caught"
)
_DIVIDED = re.compile(
    r"mixed torch\.Tensor and DTensor|in-place operations that require placement changes|"
    r"output with shape \[1((?:, \d+)*)\] doesn't match the broadcast shape \[0\1\]"  # a worker without rows
)
_WRAPPED = "its data is not allocated yet"  # torch.tensor(list) of parts
_GIVEN_UP = "out of bounds for storage of size 0"
_DEVICES = "Expected all tensors to be on the same device"


def lost_a_peer(text: str) -> bool:
    """Returns whether an error says no more than that another worker is gone or does not answer."""
    return _BROKEN.search(text) is not None


def explained(
    error: BaseException, models: Iterable[WrappedModel], roll_call: RollCall | None, who: str
) -> FleetError | None:
    """Returns an error that explains ``error`` for this job; ``None`` where it says enough itself."""
    text = f"{error}"
    if isinstance(error, FleetError) or not isinstance(error, RuntimeError):
        return None
    if _DEVICES in text and (card := _card_of(models)) is not None:
        return ConfigError(
            f"{who} the model and what it was given are on different devices. fleet.distributed_model() moves the "
            f"model to the worker's GPU, here {card}; move each batch there, too: batch = batch.to({card!r}), or in a "
            f"script for every worker to next(model.parameters()).device. torch said: {text.splitlines()[0]}"
        )
    if (meaning := _of_parts(text)) is not None:
        return ConfigError(f"{who} {meaning}")
    if roll_call is None or _BROKEN.search(text) is None:
        return None
    where = user_line_of(error.__traceback__, otherwise=user_line())  # caught inside this package
    during = "".join(f" {note}" for note in getattr(error, "__notes__", ()))  # which micro-batch, of which stage
    what = f"{who} the exchange with the other workers broke off at {where}:{during}"
    # A launcher that sees a killed worker ends this one before the killed one's answer is given up.
    LOGGER.error("%s Asking the other workers where they are.", what)
    return RendezvousError(
        f"{what}\n"
        f"{account(roll_call.others_after(error), roll_call.described)}\n"
        "If one failed, its own message gives the cause. If one ended normally, it had fewer batches: give every "
        "worker the same number, with fleet.elastic.ElasticSampler or torch's DistributedSampler, and leave a loop "
        "after the same one."
    )


class UncaughtErrors:
    """Prints the explanation for the job below an uncaught torch error; active until :meth:`close`."""

    def __init__(self, models: Sequence[WrappedModel], roll_call: RollCall, who: str) -> None:
        self._models = models
        self._roll_call = roll_call
        self._who = who
        self._before = sys.excepthook
        sys.excepthook = self._hook

    def close(self) -> None:
        """Restores the previous hook, unless another one has been installed since."""
        if sys.excepthook == self._hook:
            sys.excepthook = self._before

    def _hook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._before(kind, error, trace)
        meaning = explained(error, self._models, self._roll_call, self._who)
        if meaning is not None:
            print(f"\n{type(meaning).__name__}: {meaning}", file=sys.stderr, flush=True)


def _card_of(models: Iterable[WrappedModel]) -> str | None:
    """Returns the GPU that a model is on; ``None`` on a machine without one."""
    devices = (p.device for model in models for p in model.module.parameters())
    return next((str(device) for device in devices if device.type == "cuda"), None)


def _of_parts(text: str) -> str | None:
    """Returns the explanation of an error about parameters that sharding stage 3 has divided; ``None`` for others."""
    if _DIVIDED.search(text) is not None:
        return (
            "a sharded parameter or gradient was used outside the model, where a worker holds a shard of it. Change "
            "a gradient with a whole tensor out of place: p.grad = p.grad + 0.1 * p. For a penalty "
            "on the weights add p.full_tensor().square().sum(), and let AveragedModel average a plain copy "
            "(docs/guides/recipes.md); or use the optimizer's weight_decay, or set sharding_configs['stage'] to 1 or 2."
        )
    if _WRAPPED in text:
        return (
            "code read the numbers of a sharded parameter or gradient, of which a worker holds a shard, past "
            "torch's own operations, as torch.tensor([p.grad.norm() for p in ...]) and Lightning's grad_norm() do. "
            "Call .full_tensor() on each on every worker, as in p.grad.norm().full_tensor(); or set "
            "sharding_configs['stage'] to 1."
        )
    if _GIVEN_UP in text:
        return (
            "backward reached parameters a second time that sharding stage 3 had gathered and freed (a "
            "gradient penalty, or two backward passes of one forward). Set sharding_configs['stage'] to 1 or 2, or run "
            "the model again for the second pass."
        )
    return None


def listed(names: list[str]) -> str:
    """Returns one or several parameters' ``names`` as the subject of a sentence."""
    return f"parameter{'s' if len(names) > 1 else ''} {', '.join(map(repr, names))}"
