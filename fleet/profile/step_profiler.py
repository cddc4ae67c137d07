"""StepProfiler: torch's profiler for some steps of this worker, and the files that the launcher joins."""

from __future__ import annotations

import json
import os
import socket
import tempfile
from pathlib import Path
from typing import Any

import torch

from fleet.common.log import LOGGER
from fleet.common.plain_files import replace_file
from fleet.env import Environment
from fleet.launch.processes.logs import PROFILE_FOLDER
from fleet.launch.processes.profile_report import PROFILE, read_range
from fleet.profile.step_times import StepTimes


class StepProfiler:
    """Profiles the steps ``first`` to ``last - 1``, counted from 0.

    Args:
        times: measures the parts of the steps.
        first: the first step.
        last: the first step after the profile.
        folder: receives the files.
        rank: the rank of this worker.
        device: the device that it trains on.
    """

    def __init__(self, times: StepTimes, first: int, last: int, folder: Path, rank: int, device: torch.device) -> None:
        self.times = times
        self._first = first
        self._last = last
        self._folder = folder
        self._rank = rank
        self._device = device
        self._profile: Any = None
        self._is_done = False
        self._steps: list[dict[str, Any]] = []
        self._begun = 0

    def before_forward(self, step: int) -> None:
        """Called before each forward, after ``step`` steps; starts where the job begins or resumes inside the range."""
        if self._profile is None and not self._is_done and self._first <= step < self._last:
            self._start(step)

    def after_step(self, step: int) -> None:
        """Called when ``step`` steps are finished."""
        if self._profile is not None:
            spans = self.times.spans or []
            self._steps.append({"step": step - 1, "begin_ns": self._begun, "end_ns": spans[-1][2]})
            self._steps[-1]["parts_ns"] = self.times.take()
            self._begun = spans[-1][2]
            if step >= self._last:
                self.close()
        else:
            self.before_forward(step)

    def close(self) -> None:
        """Writes the profile; further calls do nothing."""
        if self._profile is None:
            return
        profile = self._profile
        self._profile = None
        self._is_done = True
        profile.stop()
        spans = self.times.spans
        self.times.spans = None
        self.times.waits = None
        try:
            self._write(profile, spans or [])
        # A full disk must not end a training run that only wanted a profile.
        except OSError as error:
            LOGGER.warning(f"--profile: {self._folder} cannot be written: {error.strerror}. Training goes on.")
        self.times.restart()

    def _start(self, step: int) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
            # Kernels run later than their calls; without waiting, the time of one part would count in another.
            self.times.waits = lambda: torch.cuda.current_stream(self._device).synchronize()
        self._profile = torch.profiler.profile(activities=activities)
        self._profile.start()
        self.times.spans = []
        self.times.restart()
        self._begun = self.times.since
        LOGGER.info("Profiling steps %d to %d", step, self._last - 1)

    def _write(self, profile: Any, spans: list[tuple[str, int, int]]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        trace = self._folder / f"rank{self._rank}.trace.json"
        # torch writes to a name and would follow a link there, so it gets a folder that only this user can write.
        with tempfile.TemporaryDirectory(dir=self._folder) as own:
            profile.export_chrome_trace(f"{own}/{trace.name}")
            os.replace(f"{own}/{trace.name}", trace)
        described = {"rank": self._rank, "host": socket.gethostname(), "pid": os.getpid(), "steps": self._steps}
        whole = self._folder / f"rank{self._rank}.steps.json"
        replace_file(whole, json.dumps({**described, "spans": spans}), is_durable=False)


def start_profiler(rank: int, device: torch.device) -> StepProfiler | None:
    """Returns the profiler of the steps that FLEET_PROFILE names; None when it names none.

    Raises ConfigError when FLEET_PROFILE is no range.
    """
    environment = Environment()
    text = environment.raw(PROFILE)
    if text is None:
        return None
    first, last = read_range(text, PROFILE)
    folder = Path(environment.str("PADDLE_LOG_DIR")) / PROFILE_FOLDER
    return StepProfiler(StepTimes(), first, last, folder, rank, device)
