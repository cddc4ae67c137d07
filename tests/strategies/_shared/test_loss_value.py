"""watch_losses sees every scalar on which backward is called, and leaves torch as it was."""

from __future__ import annotations

import torch

from fleet.strategies._shared.loss_value import watch_losses


def test_sees_scalars_until_stopped() -> None:
    """A.8 adaptive: both ways of calling backward are seen; tensors that are no loss are not."""
    original = torch.autograd.backward
    seen: list[torch.Tensor] = []
    stop = watch_losses(lambda loss, gradient: seen.append(loss))
    x = torch.tensor([2.0, 3.0], requires_grad=True)
    (x * x).sum().backward()
    torch.autograd.backward([(x * 5).sum()])
    (x * 2).backward(torch.ones(2))
    stop()
    (x * 7).sum().backward()
    assert [loss.item() for loss in seen] == [13.0, 25.0]
    assert all(loss.grad_fn is not None for loss in seen)
    assert torch.autograd.backward is original
    torch.testing.assert_close(x.grad, torch.tensor([4.0 + 5 + 2 + 7, 6.0 + 5 + 2 + 7]))
