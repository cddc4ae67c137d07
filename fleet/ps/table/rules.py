"""Rule: how a pushed gradient changes a row of weights, as data (name, hyper-parameters, state layout).

The formulas stand here in words, in :mod:`fleet.ps.table.kernels.rule_kernels` as numba kernels, and in the tests in
numpy. ``w`` is the weight, ``g`` the gradient (plus ``weight_decay * w``
where the rule has one), ``s`` the gradient divided by the row's pushed shows:

==================  ===========================================================================================
sgd                 w -= lr g
momentum            m = momentum m + g;  w -= lr m  (nesterov: w -= lr (g + momentum m))
adagrad             G += g^2;  w -= lr g / (sqrt(G) + eps)                                  (torch.optim.Adagrad)
rowwise_adagrad     G += mean(g^2), one per row;  w -= lr g / (sqrt(G) + eps)
shared_adagrad      w -= lr s sqrt(g0 / (g0 + G));  then G += mean(s^2), one per row   (Paddle SparseAdaGradSGDRule)
std_adagrad         the same with one G per dimension                                     (Paddle StdAdaGradSGDRule)
adagrad_v2          G += mean(s^2), one per row;  w -= lr s / sqrt(G)               (Paddle SparseAdaGradV2SGDRule)
adam                t += 1; m, v moments;  w -= lr / (1 - b1^t) m / (sqrt(v) / sqrt(1 - b2^t) + eps)   (torch Adam)
shared_adam         one m and v per row: each dimension moves by its own new moments; the row keeps their mean
sum                 w += g                                                                    (geo: g is a delta)
adam_d2sum          dense only: decays 0.99 and 0.9999, see :mod:`fleet.ps.table.dense_table`
summary             dense only: w = 0.999999 w + g                                         (data_norm statistics)
==================  ===========================================================================================

Paddle's Adams add epsilon before the bias correction, (sqrt(v) + eps) / sqrt(1 - b2^t): shared_adam always, adam with
``epsilon_first``. Adam counts its steps per row from 1 and uses the given betas: Paddle's dense table is one step ahead
and both its tables ignore the user's betas.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from fleet.errors import ConfigError, did_you_mean

LEARNING_RATE = "learning_rate"
FLOAT32_MAX = (2 - 2**-23) * 2.0**127  # larger numbers are infinite in a row
_BOUNDS = {"lower_bound": -math.inf, "upper_bound": math.inf}
_SHOW = {"initial_g2sum": 3.0, "show_scale": 1.0}
_DECAY = {"weight_decay": 0.0}


@dataclass(frozen=True)
class RuleSpec:
    """What a rule reads and keeps: default hyper-parameters, and its state as (name, per dimension or one)."""

    defaults: Mapping[str, float]
    per_dim: tuple[str, ...] = ()
    per_row: tuple[str, ...] = ()
    sparse: bool = True
    dense: bool = False

    @property
    def by_element(self) -> bool:
        """Whether elements of a row are updated alike and alone, but for a count of steps: also a piece at a time."""
        return self.sparse and self.per_row in ((), ("step",))


RULES: dict[str, RuleSpec] = {
    "sgd": RuleSpec({LEARNING_RATE: 0.05, **_DECAY, **_BOUNDS}, dense=True),
    "momentum": RuleSpec(
        {LEARNING_RATE: 0.05, "momentum": 0.9, "nesterov": 0.0, **_DECAY, **_BOUNDS}, ("momentum",), dense=True
    ),
    "adagrad": RuleSpec(
        {LEARNING_RATE: 0.05, "epsilon": 1e-10, "initial_accumulator": 0.0, **_DECAY, **_BOUNDS},
        ("sum",),
        dense=True,
    ),
    "rowwise_adagrad": RuleSpec(
        {LEARNING_RATE: 0.05, "epsilon": 1e-10, "initial_accumulator": 0.0, **_DECAY, **_BOUNDS},
        (),
        ("sum",),
    ),
    "shared_adagrad": RuleSpec({LEARNING_RATE: 0.05, **_SHOW, **_BOUNDS}, (), ("g2sum",)),
    "std_adagrad": RuleSpec({LEARNING_RATE: 0.05, **_SHOW, **_BOUNDS}, ("g2sum",)),
    "adagrad_v2": RuleSpec(
        {LEARNING_RATE: 0.05, "show_scale": 1.0, "initial_accumulator": 0.0, **_BOUNDS}, (), ("g2sum",)
    ),
    "adam": RuleSpec(
        {
            LEARNING_RATE: 0.001,
            "beta1": 0.9,
            "beta2": 0.999,
            "epsilon": 1e-8,
            "epsilon_first": 0.0,
            **_DECAY,
            **_BOUNDS,
        },
        ("m", "v"),
        ("step",),
        dense=True,
    ),
    "shared_adam": RuleSpec(
        {LEARNING_RATE: 0.001, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, **_BOUNDS},
        (),
        ("m", "v", "step"),
    ),
    "sum": RuleSpec({}, dense=True),
    "adam_d2sum": RuleSpec({LEARNING_RATE: 5e-6, **_DECAY}, ("velocity", "squares", "decay"), sparse=False, dense=True),
    "summary": RuleSpec({"decay": 0.999999}, sparse=False, dense=True),
}

# The rule names of Paddle's table configuration: class names of the accessor, and `sparse_optimizer` words.
PADDLE_RULES = {
    "SparseNaiveSGDRule": "sgd",
    "SparseAdaGradSGDRule": "shared_adagrad",
    "StdAdaGradSGDRule": "std_adagrad",
    "SparseAdaGradV2SGDRule": "adagrad_v2",
    "SparseAdamSGDRule": "adam",
    "SparseSharedAdamSGDRule": "shared_adam",
    "naive": "sgd",
    "sgd": "sgd",
    "adagrad": "shared_adagrad",
    "std_adagrad": "std_adagrad",
    "adagrad_v2": "adagrad_v2",
    "adam": "adam",
    "shared_adam": "shared_adam",
}


@dataclass(frozen=True)
class Rule:
    """An update rule with its hyper-parameters; one the rule does not read is refused, not ignored.

    Args:
        name: a key of :data:`RULES`.
        hyper: hyper-parameters that differ from the rule's defaults.

    Raises:
        ConfigError: unknown name or hyper-parameter, or a value out of range.

    Example:
        >>> Rule("adam", {"learning_rate": 0.01})["beta2"]
        0.999
    """

    name: str
    hyper: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or self.name not in RULES:
            raise ConfigError(
                f"the rule {self.name!r} does not exist; one of {sorted(RULES)}." + did_you_mean(str(self.name), RULES)
            )
        if not isinstance(self.hyper, Mapping):
            raise ConfigError(f"rule {self.name!r}: the hyper-parameters are {self.hyper!r}; they are a dictionary.")
        defaults = RULES[self.name].defaults
        for key, value in self.hyper.items():
            if key not in defaults:
                raise ConfigError(
                    f"rule {self.name!r} does not read {key!r}; it reads {sorted(defaults)}."
                    + did_you_mean(key, defaults)
                )
            _check_hyper(self.name, key, value)
        merged = {key: float(self.hyper.get(key, value)) for key, value in defaults.items()}
        if merged.get("lower_bound", 0.0) > merged.get("upper_bound", 0.0):
            raise ConfigError(
                f"rule {self.name!r}: the weight bounds are [{merged['lower_bound']!r}, "
                f"{merged['upper_bound']!r}]; the lower one must not exceed the upper one."
            )
        object.__setattr__(self, "hyper", merged)

    def __getitem__(self, key: str) -> float:
        return self.hyper[key]

    def get(self, key: str, default: float = 0.0) -> float:
        """Returns the hyper-parameter, or ``default`` where the rule has none of that name."""
        return self.hyper.get(key, default)

    def __iter__(self) -> Iterator[str]:
        return iter(self.hyper)

    def __hash__(self) -> int:
        return hash((self.name, tuple(sorted(self.hyper.items()))))

    @property
    def spec(self) -> RuleSpec:
        """The rule's entry in :data:`RULES`."""
        return RULES[self.name]

    def state_width(self, dim: int) -> int:
        """Returns how many floats of state a block of ``dim`` weights keeps."""
        return len(self.spec.per_dim) * dim + len(self.spec.per_row)

    @property
    def initial_state(self) -> float:
        """The value that the accumulator of a new row starts with (0 for everything else)."""
        return self.get("initial_accumulator", 0.0)

    @property
    def adds_up(self) -> bool:
        """Whether one update with the sum of some gradients is the same as one update with each of them."""
        plain = not self.get("weight_decay") and self.get("lower_bound") == -math.inf
        return self.name == "sgd" and plain and self.get("upper_bound") == math.inf

    def with_learning_rate(self, learning_rate: float) -> Rule:
        """Returns the same rule with another learning rate."""
        return Rule(self.name, {**self.hyper, LEARNING_RATE: learning_rate})


def _check_hyper(rule: str, key: str, value: float) -> None:
    where = f"rule {rule!r}: {key} is {value!r}"
    if not isinstance(value, int | float) or math.isnan(value):
        raise ConfigError(f"{where}; it takes a number.")
    if key in ("beta1", "beta2", "momentum", "decay") and not 0.0 <= value <= 1.0:
        raise ConfigError(f"{where}; it must lie in [0, 1].")
    if key in ("beta1", "beta2") and value == 1.0:
        raise ConfigError(f"{where}; it must be less than 1.")
    if key in (LEARNING_RATE, "epsilon", "weight_decay", "initial_accumulator") and not 0.0 <= value <= FLOAT32_MAX:
        raise ConfigError(f"{where}; it must be finite in float32 and not negative.")
    if key == "initial_g2sum" and not 0.0 < value <= FLOAT32_MAX:
        raise ConfigError(f"{where}; it must be finite in float32 and greater than 0.")


def rule_from_paddle(name: str, hyper: Mapping[str, float] | None = None) -> Rule:
    """Returns the rule that Paddle's table configuration calls ``name``, weights clamped to [-10, 10] by default.

    Paddle's Adam adds epsilon before the bias correction (D.5), torch's after it: they differ for tiny gradients.

    Example:
        >>> rule_from_paddle("SparseAdaGradSGDRule").name
        'shared_adagrad'
    """
    if name not in PADDLE_RULES:
        raise ConfigError(
            f"the sparse rule {name!r} does not exist; one of {sorted(PADDLE_RULES)}."
            + did_you_mean(name, PADDLE_RULES)
        )
    kind = PADDLE_RULES[name]
    own = {"epsilon_first": 1.0} if kind == "adam" else {}
    return Rule(kind, {"lower_bound": -10.0, "upper_bound": 10.0, **own, **(hyper or {})})
