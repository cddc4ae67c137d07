"""Secrets in texts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.launch._redact import is_secret_name, redact, redact_arguments

SECRET = "s3cr3tValue"


@pytest.mark.parametrize(
    "text",
    [
        "API_KEY={}",
        "--api-key={}",
        "--hf_token='{}'",
        'x --password="{}" y',
        "http://me:{}@host:80/x",
        "etcd://{}@a:1",
        "a FLEET_JOB_SECRET={} python",
    ],
)
def test_values_are_hidden(text: str) -> None:
    assert SECRET not in redact(text.format(SECRET))
    assert "***" in redact(text.format(SECRET))


@pytest.mark.parametrize("text", ["FLEET_JOB_SECRET is not set", "--master=10.0.0.1:80", "http://host/a@b", "lr=0.1"])
def test_other_texts_stay(text: str) -> None:
    assert redact(text) == text


def test_arguments() -> None:
    assert redact_arguments(["--token", SECRET, "--lr", "1", "--key", "--x", f"--key={SECRET}"]) == [
        "--token",
        "***",
        "--lr",
        "1",
        "--key",
        "--x",
        "--key=***",
    ]


def test_names() -> None:
    assert [is_secret_name(name) for name in ("WANDB_API_KEY", "hf-token", "PASSWORD", "PADDLE_MASTER")] == [
        True,
        True,
        True,
        False,
    ]


@given(
    st.sampled_from(["KEY", "TOKEN", "SECRET", "PASSWORD"]),
    st.text(alphabet="abcXYZ_", max_size=5),
    st.lists(st.sampled_from(["--lr", "0.1", "train.py", "--out=x"]), max_size=4),
)
def test_no_assignment_to_a_secret_name_is_shown(word: str, prefix: str, around: list[str]) -> None:
    arguments = [*around, f"{prefix}{word}={SECRET}", *around, f"--{prefix}{word.lower()}", SECRET]
    assert not any(SECRET in shown for shown in redact_arguments(arguments))
    assert SECRET not in redact(" ".join(arguments[:-2]))
