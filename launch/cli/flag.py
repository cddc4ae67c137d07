"""Flag: one flag of the launcher, and the groups and fates that flags have."""

from __future__ import annotations

from dataclasses import dataclass

USED, WARNED, REFUSED = "used", "warned", "refused"
LAUNCH, FLEETRUN = "launch", "fleetrun"

NODES = "Nodes"
PROCESSES = "Processes and devices"
SERVERS = "Parameter server"
LOGS = "Logs"
FAILURE = "Failure and elastic"
NO_EFFECT = "Flags of other launchers that do nothing here (accepted, one warning says why)"
NOT_HERE = "Flags of other launchers that are refused (the message says why)"
# As the help shows them: what most jobs need first, what does nothing last.
GROUPS = (PROCESSES, LOGS, NODES, FAILURE, SERVERS, NO_EFFECT, NOT_HERE)


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One flag; ``name`` is its key in the configuration block and its spelling after two dashes."""

    name: str
    group: str
    meaning: str
    default: str | int | bool | None = None
    kind: str = "text"  # text, int, seconds or switch
    aliases: tuple[str, ...] = ()
    env: tuple[str, ...] = ()  # twins in the environment, the first that is set counts
    style: str = ""  # the log style its presence on the command line asks for
    choices: tuple[str, ...] = ()
    fate: str = USED
    reason: str = ""

    @property
    def spellings(self) -> tuple[str, ...]:
        """Every spelling the command line takes: the name and its aliases, with ``_`` and with ``-``."""
        both = [s for name in (self.name, *self.aliases) for s in (f"--{name}", f"--{name.replace('_', '-')}")]
        short = ("-m",) if self.name == "module" else ()
        return (*short, *dict.fromkeys(both))


def make_flag(name: str, group: str, default: str | int | bool | None, meaning: str, **more: object) -> Flag:
    """Returns a flag whose kind follows from its default unless ``more`` says it."""
    kind = "switch" if isinstance(default, bool) else "int" if isinstance(default, int) else "text"
    return Flag(name=name, group=group, default=default, meaning=meaning, **{"kind": kind, **more})  # type: ignore[arg-type]
