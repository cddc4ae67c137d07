# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Compiled loops: parse a block of MultiSlot text into numbers, and copy runs of values.

Twin of the parser: :func:`fleet.dataset.text.parse_plain`, which reads unusual numbers and words the errors.

[Note: Floats]
A decimal with at most 19 digits and a power of ten up to 22 needs one multiplication or division. The result is exact
if the digits fit in 53 bits. Otherwise the double is off by at most two units in its last place, so rounding it to
float32 is right unless it lies that close to the midpoint of two float32 values. Python parses such a text, and any
other unusual one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from fleet.ps.table.kernels.numba_cache import keep_compiled

TEXT, INT, FLOAT = 0, 1, 2
_POWERS = 10.0 ** np.arange(23)


def _kernel(function: Callable[..., Any]) -> Any:
    return keep_compiled(njit(nogil=True, error_model="numpy")(function), function)


@_kernel
def copy_runs(values, starts, offsets, out):
    """Copies ``values[starts[i]:]`` to ``out[offsets[i]:offsets[i + 1]]`` for every i."""
    for i in range(len(starts)):
        source = starts[i] - offsets[i]
        for at in range(offsets[i], offsets[i + 1]):
            out[at] = values[source + at]


@_kernel
def _is_space(c):
    return c == 32 or c == 9 or c == 13 or c == 11 or c == 12


@_kernel
def _read_int(data, at, end):
    """Returns the integer in ``data[at:end]`` and whether it is one of at most 18 digits."""
    negative = data[at] == 45
    if negative or data[at] == 43:
        at += 1
    if at == end or end - at > 18:
        return np.int64(0), False
    value = np.int64(0)
    for i in range(at, end):
        digit = np.int64(data[i]) - 48
        if digit < 0 or digit > 9:
            return np.int64(0), False
        value = value * 10 + digit
    return -value if negative else value, True


@_kernel
def _read_decimal(data, at, end):
    """Returns digits, power of ten, sign and whether ``data[at:end]`` is a decimal of at most 19 digits."""
    negative = data[at] == 45
    if negative or data[at] == 43:
        at += 1
    mantissa = np.uint64(0)
    power = np.int64(0)
    digits = 0
    seen = point = False
    while at < end:
        c = np.int64(data[at])
        if 48 <= c <= 57:
            seen = True
            if digits > 0 or c > 48:
                digits += 1
            if digits > 19:
                return mantissa, 0, negative, False
            mantissa = mantissa * np.uint64(10) + np.uint64(c - 48)
            power -= 1 if point else 0
        elif c == 46 and not point:
            point = True
        else:
            break
        at += 1
    if at < end and seen and (data[at] == 101 or data[at] == 69):
        exponent, good = _read_int(data, at + 1, end) if at + 1 < end else (np.int64(0), False)
        if not good or exponent > 1000 or exponent < -1000:
            return mantissa, 0, negative, False
        power += exponent
        at = end
    return mantissa, power, negative, seen and at == end


@_kernel
def _read_float(data, at, end, double, bits):
    """Returns the float32 in ``data[at:end]`` and whether it is certain; see [Note: Floats]."""
    mantissa, power, negative, good = _read_decimal(data, at, end)
    if not good or power > 22 or power < -22:
        return np.float32(0), False
    value = np.float64(mantissa)
    value = value * _POWERS[power] if power >= 0 else value / _POWERS[-power]
    if mantissa > np.uint64(1 << 53):
        # The 29 bits that float32 lacks: near the middle, the errors of two roundings could add up to a wrong one.
        double[0] = value
        middle = np.int64(bits[0] & 0x1FFFFFFF) - 0x10000000
        if -8 < middle < 8:
            return np.float32(0), False
    if value != 0.0 and (value < 1e-37 or value > 3e38):
        return np.float32(0), False
    return np.float32(-value if negative else value), True


@_kernel
def _next_word(data, at):
    """Returns where the next word of the line starts and stops; at the end of the line the two are equal."""
    while _is_space(data[at]):
        at += 1
    start = at
    while data[at] != 10 and not _is_space(data[at]):
        at += 1
    return start, at


@_kernel
def _count_fits(count, kind, width, multiples):
    """Returns whether a field may have this many values."""
    if count < 1 or (kind == TEXT and count != 1):
        return False
    return width == 0 or count == width or (multiples and count % width == 0)


@_kernel
def _read_value(data, start, stop, kind, double, bits, single, word):
    """Returns a value as ``numbers`` stores it and whether it is certain."""
    if kind == INT:
        return _read_int(data, start, stop)
    single[0], good = _read_float(data, start, stop, double, bits)
    return np.int64(word[0]), good


@_kernel
def parse_block(data, kinds, widths, multiples, starts, counts, numbers, hard):
    """Reads lines of ``data`` (whole lines, each ended by a newline) in one pass.

    Args:
        data: uint8 text.
        kinds: TEXT, INT or FLOAT of each field of a line.
        widths: number of values a field must have, 0 for any.
        multiples: accept any multiple of the width.
        starts: out, int64 [lines, fields], where the values of a field start in ``numbers`` (for a TEXT, in ``data``).
        counts: out, int64 [lines, fields], number of values (for a TEXT, of bytes).
        numbers: out, int64, values in order: the integer, or the float32's bits.
        hard: out, int64 rows (index in ``numbers``, start, stop, line * fields + field) of what Python must parse.

    Returns:
        Lines read, rows of ``hard``, and a code: 0 all read, 1 the next line is malformed, 2 ``hard`` is full.
    """
    # A float and its bits share one word of memory.
    double = np.zeros(1, np.float64)
    single = np.zeros(1, np.float32)
    bits = double.view(np.int64)
    word = single.view(np.int32)
    at = line = total = num_hard = 0
    while at < len(data):
        for f in range(len(kinds)):
            start, at = _next_word(data, at)
            count, good = _read_int(data, start, at) if start < at else (np.int64(0), False)
            if not good or not _count_fits(count, kinds[f], widths[f], multiples):
                return line, num_hard, 1
            starts[line, f] = total
            counts[line, f] = count
            for _ in range(count):
                start, at = _next_word(data, at)
                if start == at:
                    return line, num_hard, 1
                if kinds[f] == TEXT:
                    starts[line, f] = start
                    counts[line, f] = at - start
                    continue
                numbers[total], good = _read_value(data, start, at, kinds[f], double, bits, single, word)
                if not good:
                    if num_hard == len(hard):
                        return line, num_hard, 2
                    hard[num_hard, 0] = total
                    hard[num_hard, 1] = start
                    hard[num_hard, 2] = at
                    hard[num_hard, 3] = line * len(kinds) + f
                    num_hard += 1
                total += 1
        start, at = _next_word(data, at)
        if start != at:
            return line, num_hard, 1
        at += 1
        line += 1
    return line, num_hard, 0
