"""What a worker process may learn about which of two servers leads."""

from __future__ import annotations

from fleet.ps.client.fence import Fence, Fences


def test_epochs_only_rise() -> None:
    """The highest one counts."""
    fence = Fence()
    assert fence.learn(3)
    assert fence.learn(1)
    assert fence.epoch == 3


def test_a_worker_that_asked_the_standby_does_not_follow_the_server_alone() -> None:
    """Its question may have promoted the standby; then the server's next epoch is not the one that counts."""
    fence = Fence(epoch=1, bound=1)
    assert not fence.learn(2)
    assert fence.epoch == 1
    assert fence.learn(3)  # that of the standby


def test_all_clients_of_a_process_share_one() -> None:
    """By the number of the server."""
    fences = Fences()
    assert fences.of(0) is fences.of(0)
    assert fences.of(0) is not fences.of(1)
