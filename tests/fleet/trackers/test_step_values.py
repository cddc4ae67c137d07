"""StepValues: peaks of devices by name; the values themselves are tested with fleet.log."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from fleet.trackers.step_values import peak_of


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40S", 362.0),
        ("Tesla V100-SXM2-32GB", 125.0),
        ("NVIDIA GeForce GT 710", 0.0),
    ],
)
def test_peaks(name: str, peak: float) -> None:
    with patch("torch.cuda.get_device_name", return_value=name):
        assert peak_of(torch.device("cuda", 0)) == peak


def test_a_cpu_has_no_known_peak() -> None:
    assert peak_of(torch.device("cpu")) == 0
