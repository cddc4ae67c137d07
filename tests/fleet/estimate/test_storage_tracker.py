"""StorageTracker: what lives when, and what kind it is in the end (issue 3)."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fleet.estimate.storage_tracker import KINDS, StorageTracker


def test_storages_begin_and_end() -> None:
    """The peak is the largest sum at one time; views and in-place results are no storages of their own."""
    with FakeTensorMode(), StorageTracker("cpu") as tracker:
        tracker.phase = "forward"
        a = torch.empty(100)
        b = a.view(10, 10).add_(1).t()
        del a
        c = torch.empty(50)
        del b, c
        torch.empty(120)
    used = tracker.usage()
    assert used.peak_bytes == 600
    assert used.largest == {**dict.fromkeys(KINDS, 0), "activations": 600}
    assert used.peak_phase == "forward"


def test_what_autograd_holds_lives() -> None:
    """A tensor that only the graph holds is alive until backward has used it."""
    with FakeTensorMode(), StorageTracker("cpu") as tracker:
        x = torch.empty(100, requires_grad=True)
        tracker.mark([x], "parameters")
        tracker.phase = "forward"
        y = x.exp().exp()  # both results are kept
        tracker.phase = "backward"
        assert tracker.usage().largest["activations"] == 800
        y.sum().backward()
        tracker.mark([x.grad], "gradients")
        del y
        # exp, exp and the gradient of the outer one are gone.
        tracker.phase = "step"
        torch.empty(1000)
    used = tracker.usage()
    assert used.at_peak == {**dict.fromkeys(KINDS, 0), "parameters": 400, "gradients": 400, "temporary": 4000}
    assert used.peak_phase == "step"


def test_a_kind_may_be_said_later() -> None:
    """What was temporary when the peak was is counted as what it became."""
    with FakeTensorMode(), StorageTracker("cpu") as tracker:
        tracker.phase = "step"
        state = torch.empty(100)
        block = tracker.hold(400, "communication")
        tracker.release(block)
        tracker.mark([state, None], "optimizer_state")
    used = tracker.usage()
    assert used.at_peak["optimizer_state"] == used.at_peak["communication"] == 400
    assert used.largest["temporary"] == 0


def test_rounding_and_other_devices() -> None:
    """Sizes are rounded up; tensors on other devices and what is left out do not count."""
    with FakeTensorMode(), StorageTracker("cpu", 512) as tracker:
        kept = torch.empty(129)
        torch.empty(5, device="meta")
        left = torch.empty(1000)
        tracker.leave_out([left])
        tracker.pass_by(1, "communication")
    assert kept.numel() == 129
    assert tracker.usage().peak_bytes == 1024 + 512


def test_values_are_answered_in_step_only() -> None:
    """An optimizer's step count reads as 1; elsewhere a fake tensor has no value."""
    with FakeTensorMode(), StorageTracker("cpu") as tracker:
        count = torch.empty((), dtype=torch.float32)
        tracker.phase = "step"
        assert count.item() == 1.0
        assert torch.empty((), dtype=torch.int64).item() == 1
        tracker.phase = "forward"
        try:
            count.item()
        except RuntimeError:
            return
    raise AssertionError("a fake tensor gave a value in forward")
