"""The command line of the GPT example."""

from __future__ import annotations

import pytest

from tests.examples.gpt.example import example_module

options = example_module("options")


def test_the_options_describe_the_model() -> None:
    args = options.training_options("text").parse_args(["--hidden", "64", "--kv-heads", "4", "--norm", "layer"])
    config = options.config_of(args)
    assert (config.hidden, config.heads, config.kv_heads, config.norm) == (64, 4, 4, "layer")
    assert (config.vocab_size, config.length) == (256, args.length)


def test_a_size_is_at_least_1(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options.training_options("text").parse_args(["--steps", "0"])
    assert "'0' is below 1" in capsys.readouterr().err
