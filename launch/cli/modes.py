"""Collective or parameter server: read from the flags' parsed values, never from the text of the command line."""

from __future__ import annotations

from fleet.env import Environment
from fleet.errors import ConfigError, UnsupportedOptionError, did_you_mean
from fleet.launch.cli.flag import FLEETRUN, LAUNCH
from fleet.launch.cli.flags import FLAGS, PS_FLAGS
from fleet.launch.cli.settings import Settings

COLLECTIVE, PS = "collective", "ps"
_REFUSED_MODES = {
    "ps-heter": "heterogeneous parameter servers are not part of this project",
    "rpc": "torch.distributed.rpc jobs are started as collective ones",
}


def infer_mode(settings: Settings, environment: Environment, num_gpus: int) -> str:
    """Returns "collective" or "ps"; raises ConfigError when the flags ask for both."""
    ps_flags = [name for name in PS_FLAGS if settings.has(name)]
    hosts = [part for part in (settings.text("ips") or "").split(",") if part.strip()]
    if ps_flags and len(hosts) > 1:
        raise ConfigError(
            f"Only one mode can be run: {settings.named(ps_flags[0])} asks for parameter servers and "
            f"{settings.named('ips')}={settings.text('ips')} for a collective job. For parameter servers "
            "on several nodes use --servers and --workers."
        )
    mode = _given_mode(settings, ps_flags)
    if mode is None:
        mode = PS if ps_flags or is_scheduled_ps(environment) else COLLECTIVE
        if log_style(settings) == FLEETRUN:
            _note_choice(settings, ps_flags, num_gpus)
    return mode


def _given_mode(settings: Settings, ps_flags: list[str]) -> str | None:
    mode = settings.text("run_mode")
    if mode is None:
        return None
    if mode in _REFUSED_MODES:
        raise UnsupportedOptionError(
            f"{settings.named('run_mode')}={mode} cannot be honoured: {_REFUSED_MODES[mode]}. Use collective or ps."
        )
    if mode not in (COLLECTIVE, PS):
        raise ConfigError(
            f"{settings.named('run_mode')} is {mode!r}; it takes collective or ps."
            f"{did_you_mean(mode, (COLLECTIVE, PS))}"
        )
    if mode == COLLECTIVE and ps_flags:
        raise ConfigError(
            f"{settings.named('run_mode')}=collective and {settings.named(ps_flags[0])} exclude each "
            "other. Omit one of them."
        )
    return mode


def is_scheduled_ps(environment: Environment) -> bool:
    """Returns whether a scheduler made this node one server or one worker of a parameter-server job."""
    return environment.has("PADDLE_PSERVERS_IP_PORT_LIST") and (
        environment.first("TRAINING_ROLE", "PADDLE_TRAINING_ROLE") is not None
    )


def _note_choice(settings: Settings, ps_flags: list[str], num_gpus: int) -> None:
    """Notes the choice in fleetrun's words, spelled as scripts that read its log expect them."""
    if ps_flags:
        found = [f"--{name}" for name in ps_flags]
        settings.note("INFO", f"Run parameter-sever mode. pserver arguments:{found}, cuda count:{num_gpus}")
    elif settings.has("ips"):
        settings.note("INFO", f"Run collective mode. gpu arguments:['--ips'], cuda count:{num_gpus}")
    elif num_gpus:
        settings.warn("Not found distinct arguments and compiled with cuda. Default use collective mode")


def log_style(settings: Settings) -> str:
    """Returns "launch" or "fleetrun": as ``--log_style`` says, else by the family of the flags that were written."""
    asked = settings.text("log_style")
    if asked is not None:
        return asked
    styles = {FLAGS[name].style for name in settings.on_command_line}
    return FLEETRUN if FLEETRUN in styles and LAUNCH not in styles else LAUNCH
