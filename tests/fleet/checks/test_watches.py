"""What is remembered about wrapped models and optimizers."""

from __future__ import annotations

import torch

from fleet.checks.watched import LoadNote, ModelWatch, OptimizerWatch
from tests.helpers.checked_training import batch, job


def test_a_model_knows_when_its_parameters_change() -> None:
    net, _, _, model = job({})
    watch = ModelWatch(model, registered=3)
    assert not watch.has_changed(3)
    assert watch.has_changed(4), "a parameter was registered somewhere"
    net[0].weight.requires_grad_(False)
    assert watch.has_changed(3)
    watch.note_parameters(3)
    assert not watch.has_changed(3)
    assert watch.trained_names == {"0.bias", "2.weight", "2.bias"}


def test_a_gradient_without_a_forward_is_named() -> None:
    net, _, _, model = job({})
    net[0].weight.requires_grad_(False)
    watch = ModelWatch(model, registered=0)
    net[0].weight.requires_grad_(True)
    assert watch.unseen(0, [watch]) == ""
    net[0].weight.grad = torch.ones(8, 4)
    assert watch.unseen(0, [watch]) == "0.weight"


def test_an_optimizer_knows_old_gradients() -> None:
    net, _, optimizer, model = job({})
    watch = OptimizerWatch(optimizer, optimizer.user_optimizer)
    model(batch(0, 0)).square().mean().backward()
    assert not watch.has_only_old_gradients()
    watch.note_step()
    assert watch.has_only_old_gradients()
    model(batch(1, 0)).square().mean().backward()
    assert not watch.has_only_old_gradients(), "the same tensor, with another version"
    assert net[0].weight.grad is not None


def test_a_load_is_noted_once_with_its_line() -> None:
    _, _, _, model = job({})
    watch = ModelWatch(model, registered=0)
    note = LoadNote(watch)
    note()
    before, place = watch.before, watch.loaded_at
    assert "test_watches.py" in place
    with torch.no_grad():
        model.module[0].weight.zero_()
    note()
    assert (watch.before, watch.loaded_at) == (before, place)
