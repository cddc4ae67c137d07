"""Random draws: the workers write theirs down, and one process takes the draws of all workers in place of its own.

[Note: Draws]
One process that trains on the samples of N workers cannot draw what they drew: the numbers fall differently. So every
draw that the training loop makes (masks of dropout, noise) is written down by each worker, and the single process gets
them joined along the dimension in which its own draw is larger. A draw in a backward pass repeats one of the forward
pass (recomputation): it is not counted, and the single process finds it by the state of the generator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import get_worker_info

from fleet.verify.tensor_digest import content
from fleet.verify.tensor_files import load_tensors, save_tensors

_MAKERS = ("rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "normal", "bernoulli", "multinomial")
_FILLERS = ("normal_", "uniform_", "bernoulli_", "exponential_", "random_", "log_normal_", "cauchy_", "geometric_")
_Read = Callable[[int], dict[str, Tensor]]


class Draws:
    """Counts the draws between two updates; writes them down, or replaces them.

    ``active`` is False outside the training loop. ``sources`` are the folders of the workers' records, in the order of
    their samples: with them, draws are replaced. ``own`` holds what a worker drew from the global generator since the
    last update, for its own samples. ``unequal`` lists draws that could not be replaced.
    """

    def __init__(self, folder: Path, sources: Sequence[Path] = ()) -> None:
        self.folder, self.sources = folder, list(sources)
        self.active = False
        self.window = 0
        self.own: list[str] = []
        self.unequal: list[str] = []
        self._made: dict[str, Tensor] = {}
        self._number = 0
        self._known: list[dict[str, Tensor]] = []
        self._known_window = -1
        self._by_state: dict[str, Tensor] = {}
        self._inside = False

    def next_window(self) -> None:
        """Starts a new window after an update, and writes the draws of the last one."""
        if self._made and not self.sources:
            save_tensors(self.folder / f"draws{self.window}.npz", self._made)
        self.window += 1
        self._number, self._made, self.own = 0, {}, []
        self._by_state.clear()

    def counted(self, name: str, draw: Callable[[], Tensor], own: bool = False) -> Tensor:
        """Returns what ``draw`` returns, written down or replaced; ``own`` ones come from the global generator."""
        if not self.active or self._inside or not torch.is_grad_enabled() or get_worker_info() is not None:
            return draw()
        again = torch._C._current_graph_task_id() != -1
        state = content(torch.get_rng_state()) if self.sources else ""
        self._inside = True
        try:
            drawn = draw()
        finally:
            self._inside = False
        if not isinstance(drawn, Tensor) or drawn.is_meta:
            return drawn
        if again:
            return self._by_state.get(f"{state} {tuple(drawn.shape)}", drawn)
        key = f"{self._number} {name}"
        self._number += 1
        if not self.sources:
            self._made[key] = drawn.detach().clone()
            if own and drawn.numel() >= 16:
                self.own.append(content(drawn))
            return drawn
        found = self._joined(key, drawn)
        if found is not None:
            self._by_state[f"{state} {tuple(drawn.shape)}"] = found
        return drawn if found is None else found

    def _joined(self, key: str, drawn: Tensor) -> Tensor | None:
        if self._known_window != self.window:
            paths = [source / f"draws{self.window}.npz" for source in self.sources]
            self._known = [load_tensors(path) if path.exists() else {} for path in paths]
            self._known_window = self.window
        parts = [known.get(key) for known in self._known]
        if any(part is None or part.ndim != drawn.ndim for part in parts):
            self._miss(key)
            return None
        tensors = [part.to(drawn.dtype) for part in parts if part is not None]
        if all(t.shape == drawn.shape for t in tensors):
            if all(torch.equal(t, tensors[0]) for t in tensors):
                return tensors[0]
            self._miss(key)
            return None
        for axis in range(drawn.ndim):
            sizes = [t.shape[:axis] + t.shape[axis + 1 :] for t in tensors]
            rest = drawn.shape[:axis] + drawn.shape[axis + 1 :]
            if all(s == rest for s in sizes) and sum(t.shape[axis] for t in tensors) == drawn.shape[axis]:
                return torch.cat(tensors, axis)
        self._miss(key)
        return None

    def _miss(self, key: str) -> None:
        if len(self.unequal) < 20:
            self.unequal.append(key.partition(" ")[2])


def install_draws(draws: Draws) -> None:
    """Makes torch's functions that draw random numbers go through ``draws``, in this process."""
    for name in _MAKERS:
        setattr(torch, name, _maker(draws, name, getattr(torch, name)))
    for name in _FILLERS:
        setattr(Tensor, name, _filler(draws, name, getattr(Tensor, name)))
    for name, spread in (("dropout", 0), ("dropout1d", 1), ("dropout2d", 2), ("dropout3d", 3)):
        setattr(functional, name, _dropout(draws, spread, getattr(functional, name)))
    functional.scaled_dot_product_attention = _attention(draws, functional.scaled_dot_product_attention)


def _maker(draws: Draws, name: str, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(original)
    def drawn(*args: Any, **kwargs: Any) -> Tensor:
        return draws.counted(name, lambda: original(*args, **kwargs), own=kwargs.get("generator") is None)

    return drawn


def _filler(draws: Draws, name: str, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(original)
    def filled(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        own = kwargs.get("generator") is None
        found = draws.counted(name, lambda: original(self, *args, **kwargs), own=own)
        if found is not self:
            with torch.no_grad():
                self.copy_(found)
        return self

    return filled


def _dropout(draws: Draws, spread: int, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(original)
    def dropped(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        plain = not draws.active or not training or not 0 < p < 1 or not torch.is_grad_enabled()
        if plain or type(input) not in (Tensor, torch.nn.Parameter) or (spread and input.ndim != spread + 2):
            return original(input, p, training, inplace)
        shape = [*input.shape[:2], *([1] * spread)] if spread else list(input.shape)
        noise = _mask(draws, input, shape, p)
        return input.mul_(noise) if inplace else input * noise

    return dropped


def _mask(draws: Draws, like: Tensor, shape: Sequence[int], p: float) -> Tensor:
    """Returns zeros with probability ``p``, and 1 / (1 - p) elsewhere, computed as torch does it on a CPU."""

    def draw() -> Tensor:
        return torch.empty(shape, dtype=like.dtype, device=like.device).bernoulli_(1 - p)

    return draws.counted("dropout", draw, own=True) / (1 - p)


def _attention(draws: Draws, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(original)
    def attended(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        given = dict(zip(("attn_mask", "dropout_p", "is_causal"), args, strict=False)) | kwargs
        p = given.get("dropout_p", 0.0)
        if not draws.active or not 0 < p < 1 or not torch.is_grad_enabled() or given.get("enable_gqa"):
            return original(query, key, value, *args, **kwargs)
        scale = given.get("scale") or 1 / math.sqrt(query.shape[-1])
        scores = query @ key.transpose(-2, -1) * scale
        mask = given.get("attn_mask")
        if given.get("is_causal"):
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        weights = scores.softmax(-1)
        return weights * _mask(draws, weights, list(weights.shape), p) @ value

    return attended
