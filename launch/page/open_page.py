"""Opens the page of a job where ``--page`` asks for one, and says where it is."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Iterator

from fleet.launch.page.job_view import JobFacts, JobView
from fleet.launch.page.page_server import PageServer
from fleet.launch.plan.records import LaunchConfig
from fleet.launch.processes.logs import LaunchLog
from fleet.launch.processes.redact import redact_arguments


@contextlib.contextmanager
def open_page(config: LaunchConfig, log: LaunchLog) -> Iterator[JobView | None]:
    """Serves the page while the block runs; yields what it shows, None where no page is asked for.

    Raises:
        LaunchError: the port is taken.
    """
    if config.page is None:
        yield None
        return
    config.page_folder.mkdir(mode=0o700)
    facts = JobFacts(
        job_id=config.job_id,
        mode=config.mode,
        command=shlex.join([config.script, *redact_arguments(config.script_args)]),
        launcher_log=config.log_dir / f"{config.job_id}.{config.pod_name}.log",
    )
    view = JobView(facts, config.page_folder)
    try:
        server = PageServer(view, config.page)
        try:
            log.file_only(f"The page of the job is at {server.address}")
            log.count_shown(1)
            with contextlib.suppress(OSError):  # nobody reads; the job goes on
                print(_address_line(config, server), flush=True)
            yield view
        finally:
            server.close()
    finally:
        view.requests.close_pipe()


def _address_line(config: LaunchConfig, server: PageServer) -> str:
    """Returns the line with the address, for a terminal with the token: a file might be read by others."""
    if sys.stdout is not None and sys.stdout.isatty():
        return f"Page of the job: {server.address}?token={server.token}"
    path = config.scratch_path / "page_token"
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(f"{server.token}\n")
    return f'Page of the job: {server.address} (open what this prints: echo "{server.address}?token=$(cat {path})")'
