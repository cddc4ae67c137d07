"""The command line of the training scripts."""

from __future__ import annotations

import argparse

import pytest

from tests.examples.scripts import example_module

options = example_module("options")


def parse(*arguments: str) -> argparse.Namespace:
    """Returns the parsed options of a training script."""
    namespace: argparse.Namespace = options.parse(options.training_options("test"), arguments)
    return namespace


def test_defaults_are_those_of_the_quick_start() -> None:
    """002-03: Momentum(0.1, 0.9) with L2Decay(1e-4), batches of 32."""
    args = parse()
    assert (args.data, args.lr, args.momentum, args.weight_decay, args.batch_size) == ("digits", 0.1, 0.9, 1e-4, 32)
    assert (args.depth, args.epochs, args.seed, args.max_batches, args.history) == (18, 10, 0, None, None)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), (16, 32, "small")),
        (("--data", "flowers"), (224, 64, "imagenet")),
        (("--data", "flowers", "--image-size", "64"), (64, 64, "small")),
        (("--image-size", "65", "--width", "8"), (65, 8, "imagenet")),
    ],
)
def test_image_size_and_width_suit_the_data(arguments: tuple[str, ...], expected: tuple[int, int, str]) -> None:
    args = parse(*arguments)
    assert (args.image_size, args.width, args.stem) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("--epochs", "0"), "'0' is below 1"), (("--depth", "19"), "invalid choice"), (("--batch-size", "x"), "invalid")],
)
def test_wrong_values_are_refused(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(*arguments)
    assert message in capsys.readouterr().err


def test_help_shows_every_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert "None" not in text
    assert "(default: 32 for digits, 64 as published for a folder)" in text


def test_a_script_offers_only_the_optimizers_it_can_train_with(capsys: pytest.CaptureFixture[str]) -> None:
    """Never ignored: checkpoints carry SGD's momentum, so that script refuses --optimizer adam."""
    assert options.parse(options.training_options("d"), ["--optimizer", "adam"]).optimizer == "adam"
    with pytest.raises(SystemExit):
        options.parse(options.training_options("d", optimizers=("sgd",)), ["--optimizer", "adam"])
    assert "invalid choice: 'adam'" in capsys.readouterr().err
