"""Data generators: the text form, the tracking of types, the frame around them."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fleet
from fleet.data_generator import DataGenerator, MultiSlotDataGenerator, MultiSlotStringDataGenerator
from fleet.errors import ConfigError
from tests.helpers.ready_python import run_python
from tests.helpers.sources import ROOT


class Words(MultiSlotDataGenerator):
    """Label, words; a line that begins with # holds nothing."""

    def generate_sample(self, line: str | None) -> Callable[[], Iterable[Any]]:
        """Reads a line."""

        def read() -> Iterable[Any]:
            if line is None or line.startswith("#"):
                yield None
                yield ("words", [1, 2]), ("label", [1])
            else:
                label, *words = map(int, line.split())
                yield [("words", words), ("label", [label])]

        return read


def output(call: Callable[[], None], capsys: pytest.CaptureFixture[str]) -> str:
    """Returns what a call prints."""
    call()
    return capsys.readouterr().out


def test_run_from_stdin(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """B.7: run_from_stdin, run_from_memory."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("1 7 8 9\n# nothing\n0 5\n"))
    assert output(Words().run_from_stdin, capsys) == "3 7 8 9 1 1\n2 1 2 1 1\n1 5 1 0\n"
    assert output(Words().run_from_memory, capsys) == "2 1 2 1 1\n"


def test_batches(capsys: pytest.CaptureFixture[str]) -> None:
    """B.7: set_batch (default 32), generate_batch(samples)."""
    seen: list[int] = []

    class Padded(MultiSlotStringDataGenerator):
        def generate_sample(self, line: str | None) -> Callable[[], Iterable[Any]]:
            return lambda: ([("words", ["x"] * (number % 3 + 1))] for number in range(70))

        def generate_batch(self, samples: list[Any]) -> Callable[[], Iterable[Any]]:
            seen.append(len(samples))
            longest = max(len(sample[0][1]) for sample in samples)
            return lambda: ([(n, v + ["0"] * (longest - len(v)))] for ((n, v),) in samples)

    assert set(output(Padded().run_from_memory, capsys).splitlines()) == {"3 x 0 0", "3 x x 0", "3 x x x"}
    assert seen == [32, 32, 6]
    seen.clear()
    generator = Padded()
    generator.set_batch(35)
    output(generator.run_from_memory, capsys)
    assert seen == [35, 35]
    with pytest.raises(ConfigError, match="at least 1"):
        generator.set_batch(0)


def test_types_are_tracked() -> None:
    """B.7: int -> uint64; any float upgrades the slot to float."""
    generator = MultiSlotDataGenerator()
    assert generator._gen_str([("words", [1, 2]), ("price", [3])]) == "2 1 2 1 3\n"
    assert generator._proto_info == [("words", "uint64"), ("price", "uint64")]
    assert generator._gen_str((("words", [1]), ("price", [2, 0.5]))) == "1 1 2 2 0.5\n"
    generator._gen_str(zip(["words", "price"], [[3], [4]], strict=True))
    assert generator._proto_info == [("words", "uint64"), ("price", "float")]


@pytest.mark.parametrize(
    ("sample", "rule"),
    [
        ([("words", [1])], "those of the first sample are"),
        ([("words", [1]), ("prices", [1])], "those of the first sample are"),
        ([("words", []), ("price", [1])], "at least one number; pad it"),
        ([("words", (1,)), ("price", [1])], "takes a list"),
        ([("words", ["1"]), ("price", [1])], "values are int or float"),
        ([("words", [True]), ("price", [1])], "values are int or float"),
        ([(1, [1]), ("price", [1])], "a slot is a name and its values"),
        (["words", "price"], "a slot is a name and its values"),
        ("3 1 2", "a sample is a list"),
        ([], "a sample is a list"),
    ],
)
def test_wrong_samples(sample: Any, rule: str) -> None:
    """B.7: slot names and count must not change, empty list, non-number: ValueError."""
    generator = MultiSlotDataGenerator()
    generator._gen_str([("words", [1]), ("price", [0.5])])
    before = generator._proto_info
    with pytest.raises(ValueError, match=rule):
        generator._gen_str(sample)
    assert generator._proto_info is before


def test_texts_go_as_they_are() -> None:
    """B.7: value list[(name, [str, ...])] -> "n v v n v"."""
    generator = MultiSlotStringDataGenerator()
    assert generator._gen_str([("words", ["1926", "08", "17"]), ("label", ["1"])]) == "3 1926 08 17 1 1\n"
    for wrong in ("a b", "", " a", "a\n", 3):
        with pytest.raises(ConfigError, match="strings without spaces"):
            generator._gen_str([("words", [wrong])])


def test_the_frame_says_what_is_missing() -> None:
    with pytest.raises(NotImplementedError, match=r"must define generate_sample\(line\)"):
        MultiSlotDataGenerator().run_from_memory()
    with pytest.raises(NotImplementedError, match="must define _gen_str"):
        DataGenerator()._gen_str([])


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=4), st.floats(width=32)), min_size=1)
)
def test_a_dataset_reads_what_a_generator_writes(samples: list[tuple[list[int], float]]) -> None:
    """B.7: the round trip through the text form."""
    import numpy as np

    from fleet.dataset.text import TextForm, parse

    generator = MultiSlotDataGenerator()
    text = "".join(generator._gen_str([("words", words), ("price", [price])]) for words, price in samples)
    slots = (fleet.dataset.Slot("words", lod_level=1), fleet.dataset.Slot("price", (-1, 1), "float32"))
    found = parse(text.encode(), TextForm(slots), "generated")
    assert found.columns[0].values.tolist() == [word for words, _ in samples for word in words]
    np.testing.assert_array_equal(found.columns[1].values, np.array([price for _, price in samples], np.float32))


SCRIPT = """
import sys
from fleet.data_generator import MultiSlotDataGenerator
class Words(MultiSlotDataGenerator):
    def generate_sample(self, line):
        def read():
            label, *words = map(int, line.split())
            yield [("words", words), ("label", [label])]
        return read
if __name__ == "__main__":
    Words().run_from_stdin()
    sys.exit(len({"torch", "numpy"} & set(sys.modules)))
"""


def test_a_generator_is_the_pipe_command_of_a_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B.7; the script loads neither torch nor numpy, so that one for each file costs little."""
    script = tmp_path / "words.py"
    script.write_text(SCRIPT)
    (tmp_path / "raw").write_text("1 7 8\n0 9\n")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    dataset = fleet.QueueDataset()
    slots = [fleet.dataset.Slot("words", lod_level=1), fleet.dataset.Slot("label")]
    dataset.init(use_var=slots, batch_size=2, pipe_command=f"{sys.executable} '{script}'")
    dataset.set_filelist([str(tmp_path / "raw")])
    (batch,) = list(dataset)
    assert batch["words"][0].tolist() == [7, 8, 9]
    with open(tmp_path / "raw", "a") as file:
        file.write("x\n")
    with pytest.raises(ConfigError, match="exited with status 1"):
        list(dataset)


def test_import_shapes() -> None:
    """B.1, B.7."""
    code = "import fleet.data_generator as dg; from fleet import fleet; print(fleet.data_generator is dg, "
    code += "fleet.MultiSlotDataGenerator is dg.MultiSlotDataGenerator, dg.MultiSlotStringDataGenerator.__name__)"
    done = run_python(code, cwd=ROOT)
    assert done.stdout.split() == ["True", "True", "MultiSlotStringDataGenerator"], done.stderr


@pytest.mark.parametrize(
    ("made", "rule"),
    [
        ([[("words", [1])]], "generate_sample returns a function.*got \\[\\["),
        (lambda: None, "generate_sample returns a function.*the function returned None"),
    ],
)
def test_what_generate_sample_returns_is_checked(made: Any, rule: str) -> None:
    """B.7: samples in place of a function that yields them, and a function without a yield."""

    class Wrong(MultiSlotDataGenerator):
        def generate_sample(self, line: str | None) -> Any:
            return made

    with pytest.raises(ConfigError, match=rule):
        Wrong().run_from_memory()
