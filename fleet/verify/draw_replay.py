"""Random draws: the workers write theirs down, and one process takes the draws of all workers in place of its own.

[Note: Draws]
One process that trains on the samples of N workers cannot draw what they drew: the numbers fall differently. So every
draw that the training loop makes (masks of dropout, noise, rows of a batch) is written down by each worker, and the
single process gets them joined. A draw in a backward pass repeats one of the forward pass (recomputation): it is not
counted, and the single process finds it by the state of the generator. Draws without gradients (latents of a frozen
encoder, targets) are counted apart, so that an evaluation by one worker alone moves no draw of the training.

Operations that draw inside torch, as many numbers as their input has of a kind, give no numbers that could be written
down. Of those that are known the state of the generator is, and the single process calls them with each worker's rows
and state. Of all others the generator tells: it has moved, and no draw that goes through here moved it.

The loop begins with the first batch of a DataLoader. A script without one draws its batches, often one before its
loop: there it begins with the last optimizer that is made before a model is trained.
"""

from __future__ import annotations

import math
import random
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from inspect import signature
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import get_worker_info

from fleet.verify.draw_joins import PERMUTATIONS, drawing_state, drawn_as, joined, tensor_of, with_states
from fleet.verify.generator_states import GeneratorWatch
from fleet.verify.record_files import RecordFile, read_record
from fleet.verify.tensor_digest import content
from fleet.verify.tensor_files import load_tensors, save_tensors
from fleet.verify.user_lines import user_site

_MAKERS = (
    "rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "normal", "bernoulli", "multinomial",
    "randperm",
)  # fmt: skip
_FILLERS = ("normal_", "uniform_", "bernoulli_", "exponential_", "random_", "log_normal_", "cauchy_", "geometric_")
_NUMPY = (
    "rand", "randn", "random", "random_sample", "uniform", "normal", "standard_normal", "beta", "gamma", "exponential",
    "dirichlet", "binomial", "poisson", "randint", "choice", "permutation",
)  # fmt: skip
_GENERATORS = ("integers", "random", "uniform", "normal", "standard_normal", "beta", "choice", "permutation")  # numpy's
_PYTHON = ("random", "uniform", "gauss", "normalvariate", "betavariate", "randint", "randrange")
_PICKERS = ("choice", "choices", "sample")  # of Python's random
_SHARED = ("randperm", "numpy.random.randint", "numpy.random.choice", "numpy.random.permutation")  # may well be equal
_INSIDE = ("rrelu", "alpha_dropout", "feature_alpha_dropout")  # functions that draw inside torch
_INSIDE_TORCH = ("poisson", "_standard_gamma")
_SEEDS = ("seed", "manual_seed", "set_rng_state")
_BEGUN = "begun"
_MOST_WITHOUT_GRADIENTS = 64  # of one kind before an update; an evaluation may draw any number
_MOST_PERMUTATIONS = 64  # that are noted of one process
_COMPARED = 4096  # numbers of a permutation
_Drawn = TypeVar("_Drawn")


class Draws:
    """Counts the draws between two updates; writes them down, or replaces them.

    ``active`` is False outside the training loop. ``sources`` are the folders of the workers' records, in the order of
    their samples: with them, draws are replaced, joined or, where ``in_turn``, one worker's after the other's. With
    ``alike``, the folder of worker 0's record in an earlier run, single numbers are those of that run. ``own`` holds
    what a worker drew from the global generator since the last update, for its own samples. ``unequal`` lists draws
    that could not be replaced, and ``numbers`` those of them that give each worker a number of its own. ``unseen`` says
    where numbers were drawn since the last update that did not go through here; empty where none were.
    """

    def __init__(
        self, folder: Path, sources: Sequence[Path] = (), *, in_turn: bool = False, alike: Path | None = None
    ) -> None:
        self.folder = folder
        self.sources = list(sources)
        self._watch = GeneratorWatch()
        self._unseen = False
        self.unseen: dict[str, Any] = {}
        self.active = False
        self.window = 0
        self.own: list[str] = []
        self.unequal: list[str] = []
        self.numbers: list[str] = []
        self._grows = bool(sources) and not any(read_record(source, "batch") for source in sources)
        self._read = self.sources or ([alike] if alike is not None else [])
        self._turns = _in_turn(self.sources) if in_turn else None
        self._begun = 0
        self._made: dict[str, Tensor] = {}
        self._counts: Counter[str] = Counter()
        self._taken: Counter[str] = Counter()
        self._known: list[dict[str, Tensor]] = []
        self._known_window = -1
        self._by_state: dict[str, Tensor] = {}
        self._inside = False
        self._permutations = 0

    @property
    def active(self) -> bool:
        """Whether the training loop is at work."""
        return self._active

    @active.setter
    def active(self, active: bool) -> None:
        self._active = active
        self._watch.settle()

    @property
    def copies(self) -> int:
        """The workers whose draws this process takes together."""
        return len(self.sources) if self.sources and self._turns is None else 1

    def look(self) -> None:
        """Keeps in mind whether torch's generator has moved by a draw that did not go through here."""
        if self._active and not self._inside:
            self._unseen |= self._watch.has_moved()

    def settle(self) -> None:
        """Takes for known what has moved torch's generator since the last look: a draw from here, or a seed."""
        if not self._inside:
            self._watch.settle()

    def place_unseen(self, module: nn.Module | None, names: Mapping[int, str] = {}, *, ended: bool = False) -> None:
        """Keeps the first place of a window where torch's generator was moved by draws that did not go through here.

        They were made since the last call of this method: in ``module``, whose name ``names`` has under its id, in its
        call at the user's line now or, unless that has ``ended``, before that line.
        """
        self.look()
        if self._unseen and not self.unseen:
            kind = "" if module is None else type(module).__name__
            name = names.get(id(module), "")
            self.unseen = {"module": name, "type": kind, "where": user_site(), "ended": ended}
        self._unseen = False

    def begin(self) -> None:
        """Begins the training loop, anew where it had begun: what was drawn before is none of it."""
        self._begun += 1
        self._counts.clear()
        self._made = {}
        self.own = []
        if not self.sources:
            self.active = True
        elif self._grows:
            known = load_tensors(path) if (path := self.sources[0] / "draws0.npz").exists() else {}
            self.active = _BEGUN in known and self._begun >= int(known[_BEGUN])

    def next_window(self) -> None:
        """Starts a new window after an update, and writes the draws of the last one."""
        begun = {_BEGUN: torch.tensor(self._begun)} if self.window == 0 and self._begun else {}
        if (self._made or begun) and not self.sources:
            save_tensors(self.folder / f"draws{self.window}.npz", self._made | begun)
        self.window += 1
        self._counts.clear()
        self._made = {}
        self.own = []
        self.unseen = {}
        self._by_state.clear()

    def counted(self, name: str, draw: Callable[[], _Drawn], own: bool = False) -> _Drawn:
        """Returns what ``draw`` returns, written down or replaced; ``own`` ones come from the global generator."""
        if name in PERMUTATIONS and not self._inside and get_worker_info() is None:
            draw = partial(self._permuted, name, draw)
        if not self.active or self._inside or get_worker_info() is not None:
            return draw()  # hands on
        self.look()
        try:
            return self._exchanged(name, draw, own=own)
        finally:
            self.settle()

    def _exchanged(self, name: str, draw: Callable[[], _Drawn], *, own: bool) -> _Drawn:
        """Returns what ``draw`` returns in the training loop, written down or replaced."""
        trains = torch.is_grad_enabled()
        label = name if trains else f"{name} without gradients"  # one worker alone may evaluate
        if not trains and self._counts[label] >= _MOST_WITHOUT_GRADIENTS:
            return draw()  # hands on
        again = torch._C._current_graph_task_id() != -1
        state = content(torch.get_rng_state()) if self.sources else ""
        self._inside = True
        try:
            drawn = draw()  # hands on
        finally:
            self._inside = False
        value = tensor_of(drawn)
        if value is None:
            return drawn
        repeated: Any = self._by_state.get(f"{state} {tuple(value.shape)}")
        if again:
            return drawn if repeated is None else repeated
        key = f"{self._counts[label]} {label}"
        self._counts[label] += 1
        found = self._replaced(key, value) if self._read else None
        if not self.sources:
            self._made[key] = (value if found is None else found).detach().clone()
            if own and trains and value.numel() >= 16 and name not in _SHARED:
                self.own.append(content(value))
        if found is None:
            return drawn
        self._by_state[f"{state} {tuple(value.shape)}"] = found
        replaced: _Drawn = drawn_as(drawn, found)
        return replaced

    def _permuted(self, name: str, draw: Callable[[], _Drawn]) -> _Drawn:
        """Returns what ``draw`` returns; a worker notes its line, also where a DataLoader draws it."""
        drawn = draw()  # hands on
        value = tensor_of(drawn)
        if value is not None and value.ndim and not self.sources and self._permutations < _MOST_PERMUTATIONS:
            self._permutations += 1
            record = RecordFile(self.folder)
            begins = content(value[:_COMPARED])
            record.write("permutation", name=name, where=user_site(), n=len(value), content=begins)
            record.close()
        return drawn

    def _replaced(self, key: str, wanted: Tensor) -> Tensor | None:
        """Returns what this process gets for a draw; ``None`` where it keeps its own."""
        label = key.partition(" ")[2]
        name, _, evaluates = label.partition(" ")
        if self._turns is not None:
            turn = self._turns[label][self._taken[label] :][:1]
            self._taken[label] += 1
            parts: list[Tensor | None] = [*turn] or [None]
        else:
            parts = [known.get(key) for known in self._known_now()]
        given = [part.to(wanted.dtype) for part in parts if part is not None]
        if not self.sources:  # a worker takes single numbers alone
            return given[0] if given and given[0].numel() == wanted.numel() == 1 else None
        found = joined(name, wanted, given, grows=self._grows) if len(given) == len(parts) else None
        if found is None and not evaluates and len(self.unequal) < 20:
            self.unequal.append(name)
            if len(given) == len(parts) and wanted.numel() == 1:
                self.numbers.append(name)
        return found

    def _known_now(self) -> list[dict[str, Tensor]]:
        """Returns what the workers drew up to the update that follows."""
        if self._known_window != self.window:
            paths = [source / f"draws{self.window}.npz" for source in self._read]
            self._known = [load_tensors(path) if path.exists() else {} for path in paths]
            self._known_window = self.window
        return self._known


def _in_turn(sources: Sequence[Path]) -> defaultdict[str, list[Tensor]]:
    """Returns the draws of each name in the order in which one process makes them: the workers' first, their second."""
    of_each: list[defaultdict[str, list[Tensor]]] = []
    for source in sources:
        of_each.append(defaultdict(list))
        for path in sorted(source.glob("draws*.npz"), key=lambda path: int(path.stem.removeprefix("draws"))):
            for key, value in load_tensors(path).items():
                of_each[-1][key.partition(" ")[2]].append(value)
    found: defaultdict[str, list[Tensor]] = defaultdict(list)
    for name in of_each[0]:
        found[name] = list(chain.from_iterable(zip(*(drawn[name] for drawn in of_each), strict=False)))
    return found


def install_draws(draws: Draws) -> None:
    """Makes the functions of torch, numpy and Python that draw random numbers go through ``draws``, in this process."""
    for name in _MAKERS:
        setattr(torch, name, _maker(draws, name, getattr(torch, name)))
    for module, names in ((np.random, _NUMPY), (random, _PYTHON)):
        for name in names:
            made = _outside_torch(draws, f"{module.__name__}.{name}", getattr(module, name))
            setattr(module, name, made)
    for name in _PICKERS:
        setattr(random, name, _picker(draws, f"random.{name}", getattr(random, name)))
    np.random.default_rng = _generators(draws, np.random.default_rng)
    for name in _FILLERS:
        setattr(Tensor, name, _filler(draws, name, getattr(Tensor, name)))
    for name, spread in (("dropout", 0), ("dropout1d", 1), ("dropout2d", 2), ("dropout3d", 3)):
        setattr(functional, name, _dropout(draws, spread, getattr(functional, name)))
    for place, name in (*((functional, name) for name in _INSIDE), *((torch, name) for name in _INSIDE_TORCH)):
        setattr(place, name, _by_rows(draws, name, getattr(place, name)))
    for name in _SEEDS:
        given = _seed(draws, getattr(torch.random, name))
        for place in (torch, torch.random):
            setattr(place, name, given)
    functional.scaled_dot_product_attention = _attention(draws, functional.scaled_dot_product_attention)


def _outside_torch(draws: Draws, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of numpy or ``random``; other threads than that of the training loop are left alone."""

    @wraps(original)
    def drawn(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            return original(*args, **kwargs)  # hands on
        return draws.counted(name, lambda: original(*args, **kwargs), own=name.startswith("numpy"))  # hands on

    return drawn


def _picker(draws: Draws, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of ``random`` that picks from a sequence; what it draws are the places."""
    places = _outside_torch(draws, name, original)

    @wraps(original)
    def picked(population: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("counts") is not None or not hasattr(population, "__getitem__"):
            return original(population, *args, **kwargs)  # hands on
        found = places(range(len(population)), *args, **kwargs)  # hands on
        return [population[i] for i in found] if isinstance(found, list) else population[found]

    return picked


def _generators(draws: Draws, original: Callable[..., np.random.Generator]) -> Callable[..., np.random.Generator]:
    """Returns numpy's maker of generators, whose draws then count as those of numpy's global one."""
    own: dict[str, Any] = {
        name: _outside_torch(draws, f"generator.{name}", getattr(np.random.Generator, name)) for name in _GENERATORS
    }
    kind = type("Generator", (np.random.Generator,), own)

    @wraps(original)
    def made(seed: Any = None) -> np.random.Generator:
        found = original(seed)  # hands on
        return found if isinstance(found, kind) else kind(found.bit_generator)

    return made


def _maker(draws: Draws, name: str, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(original)
    def drawn(*args: Any, **kwargs: Any) -> Tensor:
        return draws.counted(name, lambda: original(*args, **kwargs), own=kwargs.get("generator") is None)  # hands on

    return drawn


def _filler(draws: Draws, name: str, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(original)
    def filled(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        own = kwargs.get("generator") is None
        found = draws.counted(name, lambda: original(self, *args, **kwargs), own=own)  # hands on
        if found is not self:
            with torch.no_grad():
                self.copy_(found)
        return self

    return filled


def _dropout(draws: Draws, spread: int, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(original)
    def dropped(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        plain = not draws.active or not training or not 0 < p < 1 or not torch.is_grad_enabled()
        if plain or type(input) not in (Tensor, nn.Parameter) or (spread and input.ndim != spread + 2):
            return original(input, p, training, inplace)  # hands on
        shape = [*input.shape[:2], *([1] * spread)] if spread else list(input.shape)
        noise = _mask(draws, input, shape, p)
        return input.mul_(noise) if inplace else input * noise  # hands on

    return dropped


def _mask(draws: Draws, like: Tensor, shape: Sequence[int], p: float) -> Tensor:
    """Returns zeros with probability ``p``, and 1 / (1 - p) elsewhere, computed as torch does it on a CPU."""

    def draw() -> Tensor:
        return torch.empty(shape, dtype=like.dtype, device=like.device).bernoulli_(1 - p)

    return draws.counted("dropout", draw, own=True) / (1 - p)


def _by_rows(draws: Draws, name: str, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Returns an operation that draws inside torch; one process calls it with each worker's rows and state."""
    names = ("input", *list(signature(original).parameters)[1:]) if name in _INSIDE else ("input",)

    @wraps(original)
    def drawn(*args: Any, **kwargs: Any) -> Tensor:
        given = dict(zip(names, args, strict=False)) | kwargs
        input: Any = given.get("input")
        rest = args[len(names) :]
        idle = name in _INSIDE and (not given.get("training", False) or not 0 < given.get("p", 0.5) < 1)
        plain = not draws.active or not torch.is_grad_enabled() or rest or given.get("generator") is not None
        if plain or idle or type(input) not in (Tensor, nn.Parameter) or input.ndim > 8:
            return original(*args, **kwargs)  # hands on
        states = draws.counted(name, lambda: drawing_state(input, draws.copies), own=True)
        changed = {key: value for key, value in given.items() if key not in ("input", "inplace")}
        kept = input.clone() if given.get("inplace") else input  # the parts are saved for backward, and input changes
        made = with_states(lambda part: original(part, **changed), kept, states) if draws.sources else None  # hands on
        if made is None:
            draws.unequal += [name] if draws.sources else []
            made = original(*args, **kwargs)  # hands on
        elif given.get("inplace"):
            made = input.copy_(made)
        draws.settle()
        return made

    return drawn


def _seed(draws: Draws, original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that gives torch's generator a state: no draw has moved it."""

    @wraps(original)
    def seeded(*args: Any, **kwargs: Any) -> Any:
        draws.look()
        try:
            return original(*args, **kwargs)  # hands on
        finally:
            draws.settle()

    return seeded


def _attention(draws: Draws, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(original)
    def attended(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        given = dict(zip(("attn_mask", "dropout_p", "is_causal"), args, strict=False)) | kwargs
        p = given.get("dropout_p", 0.0)
        if not draws.active or not 0 < p < 1 or not torch.is_grad_enabled():
            return original(query, key, value, *args, **kwargs)  # hands on
        if given.get("enable_gqa"):
            key, value = (one.repeat_interleave(query.shape[-3] // one.shape[-3], -3) for one in (key, value))
        scale = given.get("scale") or 1 / math.sqrt(query.shape[-1])
        scores = query @ key.transpose(-2, -1) * scale  # hands on
        mask = given.get("attn_mask")
        if given.get("is_causal"):
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask  # hands on
        weights = scores.softmax(-1)
        return weights * _mask(draws, weights, list(weights.shape), p) @ value  # hands on

    return attended
