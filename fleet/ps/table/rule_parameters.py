"""The numbers that the kernel of an update rule reads, in one float64 array."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fleet.ps.table.rules import Rule

LEARNING_RATE, BETA_1, BETA_2, EPSILON, WEIGHT_DECAY, INITIAL_G2SUM = 0, 1, 2, 3, 4, 5
LOWER, UPPER, SHOW_SCALE, NESTEROV, NUM_CORRECTIONS, CORRECTIONS = 6, 7, 8, 9, 10, 16
EPSILON_FIRST = 11
# Adam's bias corrections stand ready for this many steps; later ones are worked out per row.
CORRECTED_STEPS = 16384


def rule_parameters(rule: Rule) -> npt.NDArray[np.float64]:
    """Returns the numbers that the rule's kernel reads."""
    adam = rule.name in ("adam", "shared_adam")
    params = np.zeros(CORRECTIONS + (2 * (CORRECTED_STEPS + 1) if adam else 0))
    params[LEARNING_RATE] = rule.get("learning_rate")
    params[BETA_1], params[BETA_2] = rule.get("momentum", rule.get("beta1")), rule.get("beta2")
    params[EPSILON], params[WEIGHT_DECAY] = rule.get("epsilon"), rule.get("weight_decay")
    params[INITIAL_G2SUM], params[SHOW_SCALE] = rule.get("initial_g2sum"), rule.get("show_scale")
    params[LOWER], params[UPPER] = rule.get("lower_bound", -np.inf), rule.get("upper_bound", np.inf)
    params[NESTEROV], params[EPSILON_FIRST] = rule.get("nesterov"), rule.get("epsilon_first")
    if adam:
        steps = np.arange(1, CORRECTED_STEPS + 1, dtype=np.float64)
        params[NUM_CORRECTIONS] = CORRECTED_STEPS
        params[CORRECTIONS + 2 :: 2] = 1.0 / (1.0 - rule["beta1"] ** steps)
        params[CORRECTIONS + 3 :: 2] = 1.0 / np.sqrt(1.0 - rule["beta2"] ** steps)
    return params
