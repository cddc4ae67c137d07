"""The per-communicator NCCL settings of hybrid_configs; torch offers no such knobs, so every key has no meaning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fleet.strategies._declare.fields import Config, setting

_REASON = "torch tunes NCCL for the whole process; set NCCL_ALGO, NCCL_PROTO, NCCL_BUFFSIZE or NCCL_MAX_NCHANNELS"


def _knob(default: Any, meaning: str, **rules: Any) -> Any:
    return setting(default, meaning, no_meaning=_REASON, **rules)


@dataclass(frozen=True, kw_only=True)
class NcclConfig(Config, option="nccl_config"):
    """Tuning of one NCCL communicator; -1 and empty text leave the choice to NCCL."""

    commName: str = _knob("", "name of the communicator in NCCL's log")
    ll_buffsize: int = _knob(-1, "bytes of a buffer of the LL protocol", at_least=-1)
    ll128_buffsize: int = _knob(-1, "bytes of a buffer of the LL128 protocol", at_least=-1)
    simple_buffsize: int = _knob(-1, "bytes of a buffer of the Simple protocol", at_least=-1)
    buffsize_align: int = _knob(-1, "alignment of the buffers in bytes", at_least=-1)
    nchannels: int = _knob(-1, "channels of the communicator", at_least=-1)
    algoStr: str = _knob("", "algorithm: Ring or Tree")
    protoStr: str = _knob("", "protocol: LL, LL128 or Simple")


@dataclass(frozen=True, kw_only=True)
class NcclOnlyConfig(Config, option="hybrid_configs[...]"):
    """Settings of one communicator."""

    nccl_config: NcclConfig = setting(NcclConfig, "tuning of the communicator")


@dataclass(frozen=True, kw_only=True)
class NcclAndCheckConfig(Config, option="hybrid_configs[...]"):
    """Settings of a communicator and of the one that checks for inf and nan."""

    nccl_config: NcclConfig = setting(NcclConfig, "tuning of the communicator")
    check_nccl_config: NcclConfig = setting(NcclConfig, "tuning of the communicator that checks for inf and nan")


@dataclass(frozen=True, kw_only=True)
class NcclTwiceConfig(Config, option="hybrid_configs[...]"):
    """Settings of the communicators of the expert axis."""

    nccl_config: NcclConfig = setting(NcclConfig, "tuning of the communicator")
    grad_nccl_config: NcclConfig = setting(NcclConfig, "tuning of the communicator of the gradients")
