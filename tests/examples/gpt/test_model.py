"""The GPT example's model: kinds of parts, causality, sizes, and attention against the formula."""

from __future__ import annotations

import pytest
import torch

from tests.examples.gpt.example import example_module

model = example_module("model")


@pytest.mark.parametrize("positions", ["rotary", "learned"])
@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_a_logit_depends_on_the_tokens_up_to_it(positions: str, norm: str, activation: str) -> None:
    config = model.GptConfig(
        vocab_size=11, hidden=16, layers=2, length=8, positions=positions, norm=norm, activation=activation
    )
    torch.manual_seed(0)
    gpt = model.make_gpt(config)
    tokens = torch.randint(11, (2, 8))
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 11
    before, after = gpt(tokens), gpt(changed)
    assert before.shape == (2, 8, 11)
    torch.testing.assert_close(before[:, :5], after[:, :5], rtol=0, atol=0)
    assert ((before - after).abs().amax(dim=(0, 2))[5:] > 1e-6).all()


def test_grouped_queries_equal_attention_with_repeated_heads() -> None:
    """Each of the 2 key and value heads serves 2 query heads, in order."""
    config = model.GptConfig(hidden=16, heads=4, kv_heads=2, length=6, positions="learned")
    torch.manual_seed(0)
    attention = model.Attention(config)
    x = torch.randn(1, 6, 16)
    heads = []
    for head in range(4):
        q, k, v = (
            (part(x)[0])[:, 4 * place : 4 * place + 4]
            for part, place in ((attention.q, head), (attention.k, head // 2), (attention.v, head // 2))
        )
        scores = (q @ k.T / 2).masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf)
        heads.append(scores.softmax(dim=-1) @ v)
    expected = torch.cat(heads, dim=-1) @ attention.o.weight.T
    torch.testing.assert_close(attention(x)[0], expected)


def test_a_rotation_keeps_lengths_and_counts_distances() -> None:
    """RoFormer: the product of two rotated vectors depends on how far they are apart."""
    torch.manual_seed(0)
    x, y = torch.randn(2, 1, 1, 1, 8).expand(2, 1, 1, 10, 8)
    a, b = model.rotated(x)[0, 0], model.rotated(y)[0, 0]
    torch.testing.assert_close(a.norm(dim=-1), x[0, 0].norm(dim=-1))
    products = a @ b.T
    torch.testing.assert_close(products[:-1, :-1], products[1:, 1:], rtol=1e-4, atol=1e-5)
    assert (products[0, 0] - products[0, 5]).abs() > 0.1


def test_sizes_and_kinds_are_checked() -> None:
    with pytest.raises(ValueError, match="hidden is 30, which is not a multiple of 4"):
        model.GptConfig(hidden=30)
    with pytest.raises(ValueError, match="heads is 4, which is not a multiple of 3"):
        model.GptConfig(kv_heads=3)
    with pytest.raises(ValueError, match="norm is one of rms, layer; got 'batch'"):
        model.GptConfig(norm="batch")
    with pytest.raises(ValueError, match="a head has 3"):
        model.GptConfig(hidden=12, heads=4)


def test_swiglu_has_about_as_many_parameters_as_gelu() -> None:
    counts = [
        sum(p.numel() for p in model.FeedForward(model.GptConfig(hidden=96, activation=kind)).parameters())
        for kind in ("swiglu", "gelu")
    ]
    assert counts[0] == pytest.approx(counts[1], rel=0.1)
