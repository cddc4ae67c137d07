"""Which sizes of a batch a program takes, beside those that its model takes."""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import is_concrete_int
from torch.utils._pytree import tree_leaves, tree_map

from fleet.errors import ConfigError

Batches = dict[int, tuple[Any, ...]]  # by their number of samples

_NOT_ONE = re.compile(r"\.size\(\)\[0\] != 1$")
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in \S+\n\s*(\S[^\n]*)')


def other_sizes(inputs: tuple[Any, ...], output: object, takes: Callable[[tuple[Any, ...]], bool]) -> Batches:
    """Returns batches of other sizes than the example's, by their number of samples, that the model takes.

    The size of the example's batch is a leading size of ``inputs`` for which the model takes twice as many samples;
    the leading size of its ``output`` is tried first.

    Args:
        inputs: the example.
        output: of the model for it.
        takes: whether the model runs on such inputs.
    """
    own = [leaf.shape[0] for leaf in tree_leaves(inputs) if leaf.ndim]
    first = [leaf.shape[0] for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.ndim]
    for size in dict.fromkeys([size for size in first if size in own] + own):
        batches = {samples: resized(inputs, size, samples) for samples in (2 * size, 1)}
        if takes(batches[2 * size]):
            return {samples: batch for samples, batch in batches.items() if takes(batch)}
    return {}


def resized(inputs: tuple[Any, ...], size: int, samples: int) -> tuple[Any, ...]:
    """Returns ``inputs``, a batch of ``size`` samples, with another number of them.

    Samples are repeated or left out. Offsets, which begin with 0 and do not fall, give further samples no ids, so that
    flat ids stay as they are; there may be several per sample, and one more at the end.

    Example:
        >>> resized((torch.tensor([7, 8]), torch.tensor([5, 6, 7]), torch.tensor([0, 2])), 2, 4)
        (tensor([7, 8, 7, 8]), tensor([5, 6, 7]), tensor([0, 0, 0, 2]))
    """

    def changed(leaf: Tensor) -> Tensor:
        if not leaf.ndim:
            return leaf
        slots, rest = divmod(leaf.shape[0], size)
        if slots and rest <= 1 and _are_offsets(leaf):
            empty = leaf.new_zeros(max(0, samples - size) * slots)
            return torch.cat([empty, leaf[: min(samples, size) * slots + rest]])
        return leaf[torch.arange(samples) % size] if leaf.shape[0] == size else leaf

    found: tuple[Any, ...] = tree_map(changed, inputs)
    return found


def _are_offsets(leaf: Tensor) -> bool:
    is_integer = not leaf.is_floating_point() and not leaf.is_complex() and leaf.dtype != torch.bool
    return leaf.ndim == 1 and is_integer and int(leaf[0]) == 0 and bool((leaf.diff() >= 0).all())


def wrong_size(module: nn.Module, program: torch.export.ExportedProgram, others: Batches) -> str | None:
    """Returns how ``program`` differs from ``module`` on a batch of ``others``; None where it differs on none."""
    for samples, arguments in others.items():
        if (reason := _difference(module, program, arguments)) is not None:
            return f"the model takes {samples} sample{'s' * (samples > 1)}, its program does not: {reason}"
    if not others and not _varies(program):
        return "the model takes batches of the example's size alone"
    return None


def free_of_one(program: torch.export.ExportedProgram, others: Batches) -> None:
    """Removes torch's guards that a leading size is not 1, for :func:`wrong_size` to compare values on one sample.

    torch sets them for views with gaps, such as ``rows[:, 1:].flatten(1)``, whose program is right for one sample too.
    """
    if 1 in others:  # otherwise nothing would tell a guard that a branch of the model needs
        program._guards_code = [guard for guard in program._guards_code if not _NOT_ONE.search(guard)]


def fixed_leaves(
    program: torch.export.ExportedProgram, arguments: tuple[Any, ...], other: tuple[Any, ...] | None
) -> list[bool]:
    """Returns for each tensor in ``arguments`` whether the program fixes its leading size, which ``other`` changes."""
    names = program.graph_signature.user_inputs
    inputs = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder" and node.name in names]
    changed = [leaf.shape for leaf in tree_leaves(arguments if other is None else other)]
    leaves = zip(tree_leaves(arguments), inputs, changed, strict=True)
    return [
        bool(leaf.ndim) and is_concrete_int(given.shape[0]) and (other is None or leaf.shape != shape)
        for leaf, given, shape in leaves
    ]


def _difference(module: nn.Module, program: torch.export.ExportedProgram, arguments: tuple[Any, ...]) -> str | None:
    """Returns how ``program`` differs from ``module`` on ``arguments``, or None where it gives the same."""
    runs = program.module()
    found = []
    for part in (module, runs):
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # for models that draw numbers in evaluation
            try:
                output = part(*tree_map(torch.clone, arguments))
            except Exception as error:  # of any kind: guards and operators raise their own
                return str(error).strip().partition("\n")[0]
            found.append([leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)])
    try:
        torch.testing.assert_close(found[1], found[0], equal_nan=True)
    except AssertionError as error:
        return f"it gives other values than the model: {' '.join(str(error).split())}"
    return None


def _varies(program: torch.export.ExportedProgram) -> bool:
    """Returns whether the sizes of the program's outputs vary; True where it has no output with sizes."""
    (output,) = (node for node in program.graph.nodes if node.op == "output")
    values = [node.meta.get("val") for node in tree_leaves(output.args) if isinstance(node, torch.fx.Node)]
    shapes = [value.shape for value in values if isinstance(value, Tensor) and value.ndim]
    return not shapes or any(not is_concrete_int(size) for shape in shapes for size in shape)


def fixing_line(trace: Callable[[], object]) -> str | None:
    """Returns the line of the model at which ``trace``, with sizes that must vary, makes one of them a constant."""
    try:
        trace()
    except ConfigError as error:
        frames = [frame for frame in _FRAME.findall(str(error.__cause__)) if "/torch/" not in frame[0]]
        if frames:
            file, line, text = frames[-1]
            return f"{file}, line {line}: {text}"
    return None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps torch from warnings about :class:`_Calls`, and from logging errors that :func:`fixing_line` expects."""
    logger = logging.getLogger("torch._guards")
    before = logger.disabled
    logger.disabled = True
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "While compiling, we found certain side effects")
            yield
    finally:
        logger.disabled = before
