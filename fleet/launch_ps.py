"""``python -m fleet.launch_ps``: the command of the oldest launcher, kept for scripts that use it.

It starts two servers and two workers on this node, at consecutive ports.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from fleet.common.addresses import join_endpoint, split_endpoint, split_list
from fleet.errors import ConfigError
from fleet.launch.cli.cli import USAGE_ERROR
from fleet.launch.cli.cli import main as launch
from fleet.launch.cli.flags import BY_SPELLING
from fleet.launch.cli.settings import value_of

_HOST = "127.0.0.1"
_DEFAULTS = {"worker_num": "2", "server_num": "2", "start_port": "6170", "endpoints": "", "log_dir": "logs"}


def main(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> int:
    """Runs a parameter-server job from launch_ps's flags and returns the launcher's exit code."""
    try:
        translated = translate(sys.argv[1:] if argv is None else list(argv))
    except ConfigError as error:
        print(f"launch_ps: error: {error}", file=sys.stderr)
        return USAGE_ERROR
    return launch(translated, environ)


def translate(argv: list[str]) -> list[str]:
    """Returns the launcher's arguments for launch_ps's: servers take the first ports, workers the next.

    ``--endpoints`` lists the servers instead. Every other flag of the launcher passes through.
    """
    own, passed, at = dict(_DEFAULTS), [], 0
    while at < len(argv) and argv[at].startswith("-") and argv[at] not in ("-", "--"):
        name, equals, value = argv[at].partition("=")
        at += 1
        key = name.lstrip("-").replace("-", "_")
        flag = BY_SPELLING.get(name)
        if key in own and not equals and at == len(argv):
            raise ConfigError(f"{name}: a value is missing; write {name}=VALUE.")
        if key in own:
            own[key] = value if equals else argv[at]
            at += 0 if equals else 1
        elif flag is None or equals:
            passed.append(argv[at - 1])
        else:
            value, at = value_of(flag, name, argv, at)
            passed.append(f"--{flag.name}={value}")
    return ["--run_mode=ps", *_places(own), f"--log_dir={own['log_dir']}", *passed, *argv[at:]]


def _places(own: Mapping[str, str]) -> list[str]:
    first, num_servers, num_workers = (_number(own, name) for name in ("start_port", "server_num", "worker_num"))
    servers = [split_endpoint(item, "--endpoints") for item in split_list(own["endpoints"])] or [
        (_HOST, port) for port in range(first, first + num_servers)
    ]
    taken = {port for _, port in servers}
    free = (port for port in range(first + num_servers, 65536) if port not in taken)
    workers = [(_HOST, next(free)) for _ in range(num_workers)]
    return [
        f"--servers={','.join(join_endpoint(*item) for item in servers)}",
        f"--workers={','.join(join_endpoint(*item) for item in workers)}",
    ]


def _number(own: Mapping[str, str], name: str) -> int:
    text = own[name].strip()
    if not text.isdigit() or not 0 < int(text) < 32768:
        raise ConfigError(f"--{name} is {text!r}; it takes an integer from 1 to 32767.")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
