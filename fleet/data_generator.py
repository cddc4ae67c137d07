"""Data generators: programs that turn raw lines into the MultiSlot text form that datasets read.

The user writes a generator as a class; a script that runs it is the ``pipe_command`` of a dataset::

    from fleet.data_generator import MultiSlotDataGenerator

    class Clicks(MultiSlotDataGenerator):
        def generate_sample(self, line):
            def read():
                label, *words = line.split()
                yield ("words", [int(word) for word in words]), ("label", [int(label)])
            return read

    Clicks().run_from_stdin()

Standard library only, so that such a script starts fast: one process is started for each file.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from fleet.errors import ConfigError

__all__ = ["DataGenerator", "MultiSlotDataGenerator", "MultiSlotStringDataGenerator"]

Sample: TypeAlias = Any
_EXAMPLE = "[('words', [1926, 8, 17]), ('label', [1])]"


class DataGenerator:
    """The base of a generator: lines to samples, samples to batches, batches to text on standard output.

    A subclass parses a line in :meth:`generate_sample` and formats a sample in ``_gen_str``.
    """

    def __init__(self) -> None:
        self._proto_info: list[tuple[str, str]] | None = None
        self.batch_size_ = 32

    def set_batch(self, batch_size: int) -> None:
        """Sets how many samples :meth:`generate_batch` gets at once; 32 by default."""
        if type(batch_size) is not int or batch_size < 1:
            raise ConfigError(f"set_batch({batch_size!r}) takes an integer of at least 1.")
        self.batch_size_ = batch_size

    def generate_sample(self, line: Any) -> Callable[[], Iterable[Sample]]:
        """Returns a function that yields the samples of a line; the user's class overrides it.

        A sample is a list of (name, values), one for each slot. ``None`` is skipped. ``line`` keeps its newline; it
        is ``None`` in :meth:`run_from_memory`.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define generate_sample(line), which returns a function that yields samples "
            f"such as {_EXAMPLE}."
        )

    def generate_batch(self, samples: list[Sample]) -> Callable[[], Iterable[Sample]]:
        """Returns a function that yields the samples of a batch to write; override it to pad them, for example."""

        def unchanged() -> Iterator[Sample]:
            yield from samples

        return unchanged

    def run_from_stdin(self) -> None:
        """Writes to standard output the text form of the samples of every line on standard input.

        Raises:
            ConfigError: a sample that the text form cannot hold; the samples before it are written.
        """
        self._run(sys.stdin)

    def run_from_memory(self) -> None:
        """Writes the text form of the samples that ``generate_sample(None)`` yields; to try a generator out."""
        self._run([None])

    def _run(self, lines: Iterable[str | None]) -> None:
        waiting: list[Sample] = []
        for line in lines:
            for sample in _called(self, "generate_sample", self.generate_sample(line)):
                if sample is None:
                    continue
                waiting.append(sample)
                if len(waiting) == self.batch_size_:
                    self._write(waiting)
                    waiting = []
        if waiting:
            self._write(waiting)

    def _write(self, samples: list[Sample]) -> None:
        for sample in _called(self, "generate_batch", self.generate_batch(samples)):
            sys.stdout.write(self._gen_str(sample))

    def _gen_str(self, line: Sample) -> str:
        raise NotImplementedError(
            f"{type(self).__name__} must define _gen_str, or derive from MultiSlotDataGenerator or "
            "MultiSlotStringDataGenerator."
        )


class MultiSlotStringDataGenerator(DataGenerator):
    """Writes values that are already strings, unchanged; the fastest form.

    Example:
        >>> class Words(MultiSlotStringDataGenerator):
        ...     def generate_sample(self, line):
        ...         return lambda: [[("words", ["1926", "8", "17"]), ("label", ["1"])]]
        >>> Words().run_from_memory()
        3 1926 8 17 1 1
    """

    def _gen_str(self, line: Sample) -> str:
        words: list[str] = []
        for name, values in _slots_of(self, line):
            words.append(str(len(values)))
            words += values
            _check_texts(self, name, values)
        return " ".join(words) + "\n"


class MultiSlotDataGenerator(DataGenerator):
    """Writes numbers, integers or floats; every sample has the same slots in the same order.

    A slot is ``"uint64"`` until a float appears in it, and ``"float"`` from then on; ``_proto_info`` has the types.

    Example:
        >>> class Words(MultiSlotDataGenerator):
        ...     def generate_sample(self, line):
        ...         return lambda: [[("words", [1926, 8, 17]), ("price", [0.5])]]
        >>> words = Words()
        >>> words.run_from_memory()
        3 1926 8 17 1 0.5
        >>> words._proto_info
        [('words', 'uint64'), ('price', 'float')]
    """

    def _gen_str(self, line: Sample) -> str:
        slots = _slots_of(self, line)
        for name, values in slots:
            if not isinstance(values, list) or not values:
                raise _wrong(self, f"slot {name!r} holds {values!r}; it takes a list with at least one number; pad it")
            for value in values:
                if isinstance(value, bool) or not isinstance(value, int | float):
                    raise _wrong(self, f"slot {name!r} holds {value!r}; values are int or float")
        names = [name for name, _ in slots]
        known = self._proto_info if self._proto_info is not None else [(name, "uint64") for name in names]
        if names != [name for name, _ in known]:
            raise _wrong(self, f"its slots are {names}; those of the first sample are {[name for name, _ in known]}")
        self._proto_info = [
            (name, "float" if kind == "float" or any(isinstance(value, float) for value in values) else kind)
            for (name, values), (_, kind) in zip(slots, known, strict=True)
        ]
        return " ".join(f"{len(values)} {' '.join(map(str, values))}" for _, values in slots) + "\n"


def _called(generator: DataGenerator, method: str, made: object) -> Iterable[Sample]:
    """Returns the samples of the function that ``generate_sample`` or ``generate_batch`` returned."""
    found = made() if callable(made) else made
    if not callable(made) or not isinstance(found, Iterable):
        what = f"the function returned {found!r}" if callable(made) else f"got {made!r}"
        raise ConfigError(
            f"{type(generator).__name__}.{method} returns a function without arguments that yields samples such as "
            f"{_EXAMPLE}; {what}."
        )
    return found


def _slots_of(generator: DataGenerator, line: Sample) -> Sequence[tuple[str, Any]]:
    slots = list(line) if isinstance(line, zip) else line
    if not isinstance(slots, list | tuple) or not slots:
        raise _wrong(generator, f"a sample is a list such as {_EXAMPLE}, got {line!r}")
    for slot in slots:
        if not isinstance(slot, list | tuple) or len(slot) != 2 or not isinstance(slot[0], str):
            raise _wrong(generator, f"a slot is a name and its values, got {slot!r}")
    return slots


def _check_texts(generator: DataGenerator, name: str, values: Sequence[str]) -> None:
    """Raises ConfigError for an empty value or one with a space, which would change the number of values read."""
    for value in values:
        if not isinstance(value, str) or len(value.split()) != 1 or value != value.strip():
            raise _wrong(generator, f"slot {name!r} holds {value!r}; values are non-empty strings without spaces")


def _wrong(generator: DataGenerator, what: str) -> ConfigError:
    return ConfigError(f"{type(generator).__name__}.generate_sample: {what}.")
