"""The numbers that rule kernels read."""

from __future__ import annotations

import numpy as np

from fleet.ps import Rule
from fleet.ps.table.kernels import rule_kernels as numbers


def test_adam_corrections_are_those_of_step_one_on() -> None:
    """G16: step 1 is corrected with beta^1, not beta^2; the table and the formula agree at every step it holds."""
    rule = Rule("adam", {"beta1": 0.8, "beta2": 0.99})
    params = numbers.rule_parameters(rule)
    steps = np.arange(1, numbers.CORRECTED_STEPS + 1)
    pairs = params[numbers.CORRECTIONS + 2 :].reshape(-1, 2)
    assert len(pairs) == params[numbers.NUM_CORRECTIONS] == numbers.CORRECTED_STEPS
    np.testing.assert_allclose(pairs[0], (1 / 0.2, 1 / np.sqrt(0.01)), rtol=1e-12)
    np.testing.assert_allclose(pairs[:, 0], 1 / (1 - 0.8**steps))
    np.testing.assert_allclose(pairs[:, 1], 1 / np.sqrt(1 - 0.99**steps))


def test_absent_numbers_change_nothing() -> None:
    """A rule without bounds, decay or show scaling has the neutral values there."""
    params = numbers.rule_parameters(Rule("sgd", {"learning_rate": 0.5}))
    assert len(params) == numbers.CORRECTIONS
    assert params[numbers.RATE] == 0.5
    assert (params[numbers.LOWER], params[numbers.UPPER]) == (-np.inf, np.inf)
    assert params[numbers.WEIGHT_DECAY] == params[numbers.SHOW_SCALE] == params[numbers.NESTEROV] == 0
