"""The launcher, tied to the process that holds the other end of its standard input: when that ends, it stops.

``python -m fleet.integrations._tied_launcher FLAGS SCRIPT ...`` is ``python -m fleet.launch`` with a pipe as standard
input, to which nobody writes. However its holder dies, SIGKILL included, the kernel closes that end and sends this
process SIGTERM: the launcher then ends its workers, as for any SIGTERM. No thread waits for it, because the launcher
forks its guardian.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys

from fleet.launch.cli.cli import main


def tie(descriptor: int) -> bool:
    """Makes the kernel send SIGTERM when a pipe's last writer is gone; returns whether there is one now."""
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGTERM)
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_ASYNC | os.O_NONBLOCK)
    try:
        # The writer may have gone before the signal was requested; then the pipe is at its end and no signal comes.
        return os.read(descriptor, 1) != b""
    except BlockingIOError:
        return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) if tie(0) else 128 + signal.SIGTERM)
