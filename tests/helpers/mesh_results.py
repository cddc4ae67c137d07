"""Holds what the workers of a mesh found against one process (study section 6)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from tests.helpers.meshes import Mesh, joined, train_alone


@cache
def _alone(**asked: Any) -> dict[str, Any]:
    return train_alone(Mesh({}, **asked))


def alone(mesh: Mesh) -> dict[str, Any]:
    """Returns what one plain process computes for the model, the data and the rule of ``mesh``."""
    asked = ("tied", "clip", "norm", "experts", "rule", "rows", "steps")
    return _alone(**{name: getattr(mesh, name) for name in asked})


def check_results(mesh: Mesh, found: Sequence[dict[str, Any]]) -> None:
    """Raises AssertionError unless ``found``, a result of each worker, is what one process computes.

    Losses of all steps and weights after the last to 1e-5, every whole gradient of the first step to 1e-5 of its
    largest entry, and its norm to 1e-6.
    """
    expected = alone(mesh)
    rows = {worker["row"]: worker["losses"] for worker in found}
    for worker in found:
        assert worker["losses"] == rows[worker["row"]], "workers of one model copy return different losses"
    assert len(rows) == mesh.replicas
    mean = torch.tensor(list(rows.values())).mean(0)
    torch.testing.assert_close(mean, torch.tensor(expected["losses"]), rtol=0, atol=1e-5)
    gradients = joined([worker["gradients"] for worker in found])
    assert gradients.keys() == expected["gradients"].keys()
    for name, gradient in gradients.items():
        scale = expected["gradients"][name].abs().max().item()
        # A key's bias has no gradient but rounding: softmax ignores it.
        difference = (gradient - expected["gradients"][name]).abs().max().item()
        assert difference <= 1e-5 * max(scale, 1e-2), f"gradient of {name} is off by {difference:.3g} of {scale:.3g}"
    for worker in found:
        assert len(worker["norms"]) == mesh.steps, "not one update for each batch"
        torch.testing.assert_close(worker["norms"][0], expected["norms"][0], rtol=1e-6, atol=0)
    weights = joined([worker["weights"] for worker in found])
    assert weights.keys() == expected["weights"].keys()
    for name, weight in weights.items():
        torch.testing.assert_close(
            weight, expected["weights"][name], rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )
