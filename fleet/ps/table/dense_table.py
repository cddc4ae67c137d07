"""DenseTable: this server's block of all dense parameters, one flat float32 buffer with the state of its rule."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from fleet.errors import ConfigError
from fleet.ps.table.gate import Gate
from fleet.ps.table.ids import addressed, mean_of
from fleet.ps.table.kernels.numba_cache import address_of, load_kernels, naming_the_cause
from fleet.ps.table.layout import Float32s
from fleet.ps.table.rules import Rule

f32 = np.float32
# adam_d2sum: fixed decays of the velocity and of the sum of squares, and its epsilon.
D2SUM_VELOCITY, D2SUM_SQUARES, D2SUM_EPSILON = 0.99, 0.9999, 1e-8


@dataclass(frozen=True)
class DenseTableConfig:
    """One dense table: ``size`` elements on this server under ``rule``.

    ``shapes`` are those of the parameters that the elements of all servers together are, in this order: a save of
    others is refused. ``None``: they are not known, and saves are told apart by their number of elements. ``names`` are
    how messages call these parameters; "" for one without a name.

    Raises:
        ConfigError: a negative size, a rule that is for sparse tables only, or shapes of fewer elements.
    """

    name: str
    size: int
    rule: Rule = field(default_factory=lambda: Rule("sgd"))
    shapes: tuple[tuple[int, ...], ...] | None = None
    names: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.size, int) or self.size < 0:
            raise ConfigError(f"dense table {self.name!r}: size is {self.size!r}; it takes an integer, 0 or more.")
        if not self.rule.spec.dense:
            raise ConfigError(f"dense table {self.name!r}: rule {self.rule.name!r} is for sparse tables only.")
        if self.shapes is not None:
            self._check_shapes(self.shapes)

    def _check_shapes(self, shapes: tuple[tuple[int, ...], ...]) -> None:
        if not all(type(dim) is int and dim >= 0 for shape in shapes for dim in shape):
            raise ConfigError(f"dense table {self.name!r}: a shape is a tuple of integers, 0 or more.")
        if (total := sum(map(math.prod, shapes))) < self.size:
            raise ConfigError(
                f"dense table {self.name!r}: parameters of {total} elements, and the table has {self.size} here. Give "
                "the shapes of all its parameters, or none."
            )

    @property
    def adds_up(self) -> bool:
        """Whether one push of a sum is the same as a push of each gradient."""
        return self.rule.adds_up


class DenseTable:
    """Elements, float32 [size], and rule state, float32 [state_width]; every call is atomic.

    Adam counts its steps from 1 and uses the rule's betas.

    Example:
        >>> table = DenseTable(DenseTableConfig("mlp", 4))
        >>> table.set_values(np.zeros(4, np.float32))
        >>> table.push(np.ones(4, np.float32))
        >>> table.pull().tolist()
        [-0.05000000074505806, ...]
    """

    def __init__(self, config: DenseTableConfig) -> None:
        self.config = config
        self.gate = Gate()
        self._lock = threading.Lock()
        self._rule = config.rule
        # One row, laid out as in a sparse table, so that the same kernels update it.
        size = config.size
        self._row = np.full(size + config.rule.state_width(size), config.rule.initial_state, np.float32)
        self._values = self._row[:size]
        self._state = self._row[size:]
        self._values[:] = 0
        self.is_set = False  # whether the values were ever written
        if config.rule.spec.sparse:  # the others are a few numpy operations
            kernels = load_kernels("rule_kernels")
            with naming_the_cause():
                self._update = kernels.update_function(config.rule.name)
                self._update_address = kernels.update_address(config.rule)
            self._params = kernels.rule_parameters(config.rule)
            self._params[kernels.SPAN] = size

    def load_kernels(self) -> None:
        """Loads the kernels of every push now, as :meth:`SparseTable.load_kernels` does."""
        with naming_the_cause():
            table = DenseTable(replace(self.config, size=0, shapes=None, names=()))
            for count in (1, 2):
                table.push_mean([np.empty(0, f32)] * count, count)

    def pull(self, out: Float32s | None = None) -> Float32s:
        """Returns the values, written to ``out`` where given."""
        with self._lock:
            if out is None:
                return self._values.copy()
            self._check("out", out)
            out[:] = self._values
        return out

    def push(self, gradient: Float32s) -> None:
        """Applies one gradient of all elements by the table's rule."""
        self._check("gradient", gradient)
        with self._lock:
            self.is_set = True
            if self._rule.name == "adam_d2sum":
                self._push_d2sum(gradient)
            elif self._rule.name == "summary":
                self._values *= f32(self._rule["decay"])
                self._values += gradient
            elif len(gradient):
                self._push_by_kernel(np.ascontiguousarray(gradient))

    def push_mean(self, gradients: Sequence[Float32s], divisor: float) -> None:
        """Applies the sum of ``gradients``, in the order given, over ``divisor``, as :meth:`push` does."""
        if not self._rule.spec.by_element:
            self.push(mean_of(gradients, divisor))
            return
        kept, sources = addressed(gradients)
        self._check("gradient", kept[0])
        kernels = load_kernels("id_kernels")
        piece, places = np.empty(kernels.PIECE, np.float32), np.empty(2, np.int64)
        where = address_of(sources), len(kept), self.config.size, float(divisor), address_of(piece)
        row, params = address_of(self._row), address_of(self._params)
        with self._lock:
            self.is_set = True
            if self._rule.name == "sgd" and len(kept) > 1:
                load_kernels("rule_kernels").sgd_by_mean(*where, row, params)
            else:
                kernels.push_mean(*where, self._update_address, row, address_of(places), params)

    def add(self, delta: Float32s) -> None:
        """Adds ``delta`` to the values (geo); the state stays."""
        self._check("delta", delta)
        with self._lock:
            self._values += delta
            self.is_set = True

    def set_values(self, values: Float32s) -> None:
        """Replaces the values; the state stays."""
        self._check("values", values)
        with self._lock:
            self._values[:] = values
            self.is_set = True

    def read_state(self) -> tuple[Float32s, Float32s]:
        """Returns copies of values and rule state, taken at the same time."""
        with self._lock:
            return self._values.copy(), self._state.copy()

    def set_state(self, values: Float32s, state: Float32s) -> None:
        """Replaces values and rule state (loading)."""
        self._check("values", values)
        if state.dtype != np.float32 or state.shape != self._state.shape:
            raise ConfigError(
                f"dense table {self.config.name!r}: state is {state.dtype} {state.shape}; rule "
                f"{self._rule.name!r} keeps float32 {self._state.shape}."
            )
        with self._lock:
            self._values[:] = values
            self._state[:] = state
            self.is_set = True

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next push; assign to change it."""
        return self._rule.get("learning_rate")

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        with self._lock:
            self._rule = self._rule.with_learning_rate(value)
            if self._rule.spec.sparse:
                self._params[load_kernels("rule_kernels").RATE] = value

    def _push_by_kernel(self, gradient: Float32s) -> None:
        size = self.config.size
        rows = np.array([address_of(self._row)])
        order = np.zeros(1, np.int32)
        # A C function called through ctypes runs without the GIL.
        self._update(
            address_of(rows),
            1,
            address_of(order),
            address_of(gradient),
            size,
            0,
            0,
            size,
            size,
            address_of(self._params),
        )

    def _push_d2sum(self, g: Float32s) -> None:
        if self._rule["weight_decay"]:
            g = g + f32(self._rule["weight_decay"]) * self._values
        velocity, squares, decay = self._state.reshape(3, -1)
        decay *= f32(D2SUM_SQUARES)
        decay += f32(1)
        squares *= f32(D2SUM_SQUARES)
        squares += g * g
        floor = decay * f32(D2SUM_EPSILON)
        ratio = np.sqrt((decay + floor) / (squares + floor))
        velocity += g
        velocity *= f32(D2SUM_VELOCITY)
        velocity -= g
        self._values += f32(self._rule["learning_rate"]) * velocity * ratio

    def _check(self, what: str, array: Float32s) -> None:
        if array.dtype != np.float32 or array.shape != (self.config.size,):
            raise ConfigError(
                f"dense table {self.config.name!r}: {what} is {array.dtype} {array.shape}; it takes "
                f"float32 ({self.config.size},)."
            )
