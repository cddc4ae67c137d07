"""run_check: the order of its lines, and what it says when something does not work."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fleet.utils import _run_check
from fleet.utils._run_check import check_parallel, check_single, choose_devices, run_check

CPU = torch.device("cpu")


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Returns what was printed."""
    return capsys.readouterr().out.splitlines()


def devices(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Makes the check believe in ``count`` devices."""
    monkeypatch.setattr(_run_check, "choose_devices", lambda: (CPU, count))


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="counts CPUs")
def test_the_command_of_the_documentation(tmp_path: Path) -> None:
    """000-01, 000-03b: the lines in order, from a script that new processes must not run; exit status 0."""
    quiet = "ignore:torch was built for GPUs"  # a CUDA build on a machine without a driver, of which the check warns
    script = tmp_path / "check.py"
    script.write_text("import fleet\nfleet.utils.run_check()\n")
    command = [sys.executable, "-W", "error", "-W", quiet, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=os.getcwd())
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    for_gpus = torch.version.cuda is not None or torch.version.hip is not None
    assert done.stdout.splitlines() == [
        "Running verify fleet program ...",
        *(["No GPU can be used: checking the CPU."] if for_gpus else []),
        "fleet works well on 1 CPU.",
        "fleet works well on 2 processes of the CPU.",
        "fleet is installed successfully. You can start training with fleet now.",
    ]


def test_several_devices(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """000-01: a line for one device, then a line for all."""
    calls: list[Any] = []
    devices(monkeypatch, 3)
    monkeypatch.setattr(_run_check, "check_single", calls.append)
    monkeypatch.setattr(_run_check, "check_parallel", lambda *args: calls.append(args))
    run_check()
    verifying, single, several, installed = lines(capsys)
    assert verifying.startswith("Running verify")
    assert "works well on 1 CPU." in single
    assert "works well on 3 processes of the CPU." in several
    assert "installed successfully." in installed
    assert calls == [CPU, (3, "gloo")]


def test_a_failure_of_one_device_propagates(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """000-03: nothing says success."""
    devices(monkeypatch, 2)

    def broken(device: torch.device) -> None:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(_run_check, "check_single", broken)
    with pytest.raises(RuntimeError, match="no kernel image"):
        run_check()
    assert "success" not in "".join(lines(capsys))


@pytest.mark.parametrize(
    ("device", "several", "causes"),
    [
        (CPU, "2 processes of the CPU", "1. .*no gloo.* 2. .*127.0.0.1.* 3. .*/dev/shm"),
        (torch.device("cuda"), "2 GPUs", "1. .*CUDA_VISIBLE_DEVICES.* 2. .*busy.* 3. NCCL"),
    ],
)
def test_a_failure_of_several_devices_is_a_warning(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    device: torch.device,
    several: str,
    causes: str,
) -> None:
    """000-03: three possible causes, the original error, and success for a single device only."""
    monkeypatch.setattr(_run_check, "choose_devices", lambda: (device, 2))
    monkeypatch.setattr(_run_check, "check_single", lambda device: None)

    def broken(count: int, backend: str) -> None:
        raise RuntimeError("unhandled system error")

    monkeypatch.setattr(_run_check, "check_parallel", broken)
    with pytest.warns(UserWarning, match=f"(?s)not work on {several} together.* {causes}.*unhandled system error"):
        run_check()
    printed = lines(capsys)
    name = "GPU" if device.type == "cuda" else "CPU"
    assert printed[-1] == f"fleet is installed successfully ONLY for a single {name}."
    assert not any(several in line or "You can start" in line for line in printed)


def test_a_gpu_build_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """000-02, 000-03c: a warning with the original error, and a line about what is used instead."""
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(_run_check, "_gpu_error", lambda: "the driver is too old")
    with pytest.warns(UserWarning, match="the driver is too old"):
        assert choose_devices() == (CPU, 2)
    assert lines(capsys) == ["No GPU can be used: checking the CPU."]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU gives no error")
def test_the_original_error_is_torchs_own() -> None:
    """000-02."""
    assert _run_check._gpu_error() != ""


def test_two_kinds_of_devices(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """000-03c: the message says which kind is used."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(_run_check, "_is_usable", lambda kind: kind == "xpu")
    assert choose_devices() == (torch.device("cuda", 0), 2)
    assert lines(capsys) == ["Found GPUs and xpu devices: checking the GPUs."]


def test_wrong_numbers_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """000-03b: the single check compares with known results."""
    check_single(CPU)
    right = nn.functional.linear
    monkeypatch.setattr(nn.functional, "linear", lambda *args: right(*args) * 1.001)
    with pytest.raises(RuntimeError, match="plain layer on cpu gave wrong numbers"):
        check_single(CPU)


def test_the_parallel_check_trains_in_real_processes() -> None:
    """000-03b: init_parallel_env, DataParallel of two layers, Adam, one step."""
    check_parallel(2, "gloo", start_method="forkserver")


@pytest.mark.slow
def test_the_parallel_check_as_it_is_started() -> None:
    """000-03b, in fresh interpreters."""
    check_parallel(2, "gloo")


def test_the_parallel_check_fails_when_a_worker_does() -> None:
    """000-03: a device that is not there is the original error of the warning."""
    if torch.cuda.is_available():
        pytest.skip("needs a machine on which NCCL cannot work")
    with pytest.raises(Exception, match="nccl"):
        check_parallel(2, "nccl")


@pytest.mark.gpu
def test_on_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    """000-01, 000-03b on real devices."""
    run_check()
    count = torch.cuda.device_count()
    printed = lines(capsys)
    assert "works well on 1 GPU." in printed[1]
    assert count == 1 or f"works well on {count} GPUs." in printed[2]
    assert "installed successfully." in printed[-1]


def test_a_prompt_has_no_file_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """fleet.spawn refuses functions of a prompt, which it knows by the file that is missing."""
    main = sys.modules["__main__"]
    monkeypatch.delattr(main, "__file__", raising=False)
    with _run_check._without_script():
        assert getattr(main, "__file__", None) is None
    assert not hasattr(main, "__file__")
