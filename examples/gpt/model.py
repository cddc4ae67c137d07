"""A decoder-only transformer in plain torch, as a sequence of parts: embedding, blocks, head.

Every part takes one tensor and returns one, so ``nn.Sequential`` runs the model in one process and ``PipelineLayer``
over stages, with the same parameter names. The large layers are made by ``Layers``: torch's here, Fleet's in
``train_fleet_hybrid.py``. Nothing below counts heads: a worker that holds half of the columns has half of the heads.

Rotary positions: Su et al., "RoFormer" (2021). Grouped queries: Ainslie et al., "GQA" (2023). RMSNorm: Zhang and
Sennrich (2019). SwiGLU: Shazeer, "GLU Variants Improve Transformer" (2020).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

# How every matrix begins.
fill = partial(nn.init.normal_, std=0.05)


def linear(inputs: int, outputs: int) -> nn.Linear:
    """Returns a linear layer without bias."""
    layer = nn.Linear(inputs, outputs, bias=False)
    fill(layer.weight)
    return layer


def embedding(size: int, values: int) -> nn.Embedding:
    """Returns a table of ``size`` rows."""
    table = nn.Embedding(size, values)
    fill(table.weight)
    return table


@dataclass(frozen=True)
class GptConfig:
    """The sizes and the kinds of parts of a model.

    Args:
        vocab_size: number of tokens; 256 for bytes.
        hidden: values of a token between blocks.
        layers: number of blocks.
        heads: query heads; ``hidden`` is a multiple of it.
        kv_heads: key and value heads; each serves ``heads / kv_heads`` query heads.
        length: longest sequence.
        positions: ``rotary`` or ``learned``.
        norm: ``rms`` or ``layer``.
        activation: ``swiglu`` or ``gelu``.

    Raises:
        ValueError: sizes do not divide, or a kind is not one of those above.
    """

    vocab_size: int = 256
    hidden: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    length: int = 128
    positions: str = "rotary"
    norm: str = "rms"
    activation: str = "swiglu"

    def __post_init__(self) -> None:
        kinds = {"positions": ("rotary", "learned"), "norm": ("rms", "layer"), "activation": ("swiglu", "gelu")}
        for name, known in kinds.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is one of {', '.join(known)}; got {getattr(self, name)!r}.")
        for name, whole, part in (("hidden", self.hidden, self.heads), ("heads", self.heads, self.kv_heads)):
            if whole % part:
                raise ValueError(f"{name} is {whole}, which is not a multiple of {part}.")
        if self.positions == "rotary" and self.head_dim % 2:
            raise ValueError(f"Rotary positions turn pairs of values; a head has {self.head_dim}.")

    @property
    def head_dim(self) -> int:
        """Values of a token in one head."""
        return self.hidden // self.heads

    @property
    def inner(self) -> int:
        """Values of a token inside the feed-forward network; SwiGLU has three matrices, so two thirds as many."""
        return 4 * self.hidden if self.activation == "gelu" else 8 * self.hidden // 3 // 16 * 16


@dataclass(frozen=True)
class Layers:
    """How the large layers are made: each takes (inputs, outputs), the embedding (tokens, values)."""

    column: Callable[[int, int], nn.Module] = linear
    row: Callable[[int, int], nn.Module] = linear
    embedding: Callable[[int, int], nn.Module] = embedding


TORCH = Layers()


class Embedding(nn.Module):
    """Turns tokens (batch, length) into values (batch, length, hidden)."""

    def __init__(self, config: GptConfig, layers: Layers = TORCH) -> None:
        super().__init__()
        self.token = layers.embedding(config.vocab_size, config.hidden)
        self.position = embedding(config.length, config.hidden) if config.positions == "learned" else None

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the values of each token, with its position where that is learned."""
        x: Tensor = self.token(tokens)
        if self.position is not None:
            x = x + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        return x


class Attention(nn.Module):
    """Causal self-attention with grouped queries."""

    def __init__(self, config: GptConfig, layers: Layers = TORCH) -> None:
        super().__init__()
        self.head_dim, self.rotary = config.head_dim, config.positions == "rotary"
        self.q = layers.column(config.hidden, config.heads * config.head_dim)
        self.k = layers.column(config.hidden, config.kv_heads * config.head_dim)
        self.v = layers.column(config.hidden, config.kv_heads * config.head_dim)
        self.o = layers.row(config.heads * config.head_dim, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Returns what each token reads from itself and from those before it."""
        batch, length, _ = x.shape
        q, k, v = (part(x).view(batch, length, -1, self.head_dim).transpose(1, 2) for part in (self.q, self.k, self.v))
        if self.rotary:
            q, k = rotated(q), rotated(k)
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        read: Tensor = self.o(y.transpose(1, 2).reshape(batch, length, -1))
        return read


class FeedForward(nn.Module):
    """The two or three matrices that follow attention in a block."""

    def __init__(self, config: GptConfig, layers: Layers = TORCH) -> None:
        super().__init__()
        self.gate = layers.column(config.hidden, config.inner) if config.activation == "swiglu" else None
        self.up = layers.column(config.hidden, config.inner)
        self.down = layers.row(config.inner, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Returns a value per token of the same size."""
        up = self.up(x)
        inner = functional.gelu(up) if self.gate is None else functional.silu(self.gate(x)) * up
        y: Tensor = self.down(inner)
        return y


class Block(nn.Module):
    """Attention and feed-forward network, each behind a norm and beside a shortcut."""

    def __init__(self, config: GptConfig, layers: Layers = TORCH) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm_of(config), norm_of(config)
        self.attention = Attention(config, layers)
        self.mlp = FeedForward(config, layers)
        for last in (self.attention.o, self.mlp.down):  # 2 sums per block: the values between blocks keep their size
            with torch.no_grad():
                last.get_parameter("weight").mul_((2 * config.layers) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the values after this block; ``x`` is (batch, length, hidden)."""
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Head(nn.Module):
    """Turns values into logits (batch, length, vocab_size)."""

    def __init__(self, config: GptConfig, layers: Layers = TORCH) -> None:
        super().__init__()
        self.norm = norm_of(config)
        self.logits = layers.column(config.hidden, config.vocab_size)

    def forward(self, x: Tensor) -> Tensor:
        """Returns one logit per token of the vocabulary, for the token that follows."""
        logits: Tensor = self.logits(self.norm(x))
        return logits


def make_gpt(config: GptConfig) -> nn.Sequential:
    """Returns the whole model for one process."""
    return nn.Sequential(Embedding(config), *(Block(config) for _ in range(config.layers)), Head(config))


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean cross-entropy; ``targets`` (batch, length) holds the token that follows each token."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def norm_of(config: GptConfig) -> nn.Module:
    """Returns a norm over the values of a token."""
    return nn.RMSNorm(config.hidden, eps=1e-5) if config.norm == "rms" else nn.LayerNorm(config.hidden)


def rotated(x: Tensor) -> Tensor:
    """Returns ``x`` (batch, heads, length, head_dim) with each pair of values turned by an angle of its position."""
    half = x.shape[-1] // 2
    speed = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angle = torch.arange(x.shape[-2], device=x.device)[:, None] * speed
    first, second = x[..., :half], x[..., half:]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
