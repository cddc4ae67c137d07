"""Wire: values that pass from stage to stage, as a header of integers and the bytes of each tensor.

[Note: What a header costs]
A stage must know shapes before it can receive. A step has a signature: the shapes of its data and the flags that decide
about gradients on any stage. In the first step of a signature each message is announced by one integer, the length of
the header that follows; 0 repeats the header of the message before. Later steps of the signature send tensors alone.
Where shapes vary inside a signature (``enable_dynamic_shape``, ``p2p_cache_shape`` off) every step is like the first.
Gradients have the shapes of the activations and need no header.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fleet.common.notes import add_note
from fleet.errors import ConfigError
from fleet.strategies._gradients.exchange_names import named_exchange
from fleet.strategies._shared.through_host import begin_receiving, begin_sending
from fleet.strategies._shared.waiting import wait_for

_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
_TENSOR, _TUPLE, _LIST, _DICT, _NONE, _INT, _FLOAT, _BOOL = range(8)
_MAX_SIGNATURES = 64
Header = tuple[int, ...]


class Spec(NamedTuple):
    """The shape and type of a tensor, which a stage must know to receive it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


def dtype_code(dtype: torch.dtype) -> int:
    """Returns the number that stands for ``dtype`` in headers."""
    if dtype not in _DTYPES:
        raise ConfigError(f"A stage of the pipeline returned a tensor of type {dtype}, which does not cross the wire.")
    return _DTYPES.index(dtype)


def dtype_of(code: int) -> torch.dtype:
    """Returns the type that :func:`dtype_code` gave ``code``."""
    return _DTYPES[code]


def encode(value: Any, where: str = "a stage") -> tuple[Header, list[Tensor]]:
    """Returns the header of ``value`` and its tensors; raises ConfigError for what cannot cross the wire."""
    header: list[int] = []
    tensors: list[Tensor] = []

    def walk(part: Any) -> None:
        if isinstance(part, Tensor):
            header.extend([_TENSOR, dtype_code(part.dtype), int(part.requires_grad), part.dim(), *part.shape])
            tensors.append(part)
        elif isinstance(part, tuple | list):
            header.extend([_TUPLE if isinstance(part, tuple) else _LIST, len(part)])
            for item in part:
                walk(item)
        elif isinstance(part, Mapping):
            header.extend([_DICT, len(part)])
            for key, item in part.items():
                if not isinstance(key, str):
                    raise ConfigError(f"{where} returned a dictionary with the key {key!r}; keys are text.")
                data = key.encode()
                header.extend([len(data), *data])
                walk(item)
        elif part is None:
            header.append(_NONE)
        # A number travels as a tensor, not in the header: it may change from step to step, and headers are cached.
        elif isinstance(part, bool | int | float):
            header.append(_BOOL if isinstance(part, bool) else _INT if isinstance(part, int) else _FLOAT)
            number = torch.tensor(part, dtype=torch.float64 if isinstance(part, float) else torch.int64)
            tensors.append(number)
        else:
            raise ConfigError(
                f"{where} returned {type(part).__name__}: between stages pass tensors, numbers and None, alone or in "
                "tuples, lists and dictionaries."
            )

    walk(value)
    return tuple(header), tensors


def specs_of(header: Header) -> list[Spec]:
    """Returns the tensors to receive for ``header``."""
    found: list[Spec] = []
    _decode(header, 0, found, None)
    return found


def decode(header: Header, tensors: Sequence[Tensor]) -> Any:
    """Returns the value that :func:`encode` took apart."""
    return _decode(header, 0, [], deque(tensors))[0]


def _decode(header: Header, at: int, specs: list[Spec], tensors: deque[Tensor] | None) -> tuple[Any, int]:
    """Returns the part that begins at ``at`` and where the next one begins; without tensors it collects specs."""
    kind = header[at]
    at += 1
    if kind == _NONE:
        return None, at
    if kind in (_INT, _FLOAT, _BOOL):
        specs.append(Spec((), torch.float64 if kind == _FLOAT else torch.int64, False))
        number: Any = 0 if tensors is None else tensors.popleft().item()
        return (bool(number) if kind == _BOOL else number), at
    if kind == _TENSOR:
        dtype, requires_grad, dim = header[at : at + 3]
        end = at + 3 + dim
        specs.append(Spec(tuple(header[at + 3 : end]), dtype_of(dtype), bool(requires_grad)))
        return (None if tensors is None else tensors.popleft()), end
    count = header[at]
    at += 1
    items: list[Any] = []
    keys: list[str] = []
    for _ in range(count):
        if kind == _DICT:
            size = header[at]
            keys.append(bytes(header[at + 1 : at + 1 + size]).decode())
            at += 1 + size
        item, at = _decode(header, at, specs, tensors)
        items.append(item)
    if kind == _DICT:
        return dict(zip(keys, items, strict=True)), at
    return (tuple(items) if kind == _TUPLE else items), at


def number_of(text: str) -> int:
    """Returns a number of 63 bits that differs where ``text`` differs, on every worker the same."""
    import hashlib

    # Not hash(): Python salts the hash of a text in each process.
    return int(struct.unpack("<q", hashlib.sha256(text.encode()).digest()[:8])[0]) >> 1


@dataclass(frozen=True)
class StageLink:
    """One direction between this worker and another one; streams do not cross, see ``StreamGroups``."""

    group: dist.ProcessGroup
    peer: int  # the global rank
    tag: int
    device: torch.device
    described: str  # "stage 1 (worker 2)"

    def send(self, tensor: Tensor) -> Any:
        """Begins to send ``tensor``; returns the work to wait for, ``None`` for an empty tensor."""
        with named_exchange("pipeline", tensor, f"send to worker {self.peer}"):
            return begin_sending(_bytes(tensor), self.peer, self.group, self.tag) if tensor.numel() else None

    def receive(self, tensor: Tensor) -> Any:
        """Begins to receive into ``tensor``; returns the work to wait for, ``None`` for an empty tensor."""
        with named_exchange("pipeline", tensor, f"receive from worker {self.peer}"):
            return begin_receiving(_bytes(tensor), self.peer, self.group, self.tag) if tensor.numel() else None

    def integers(self, values: Sequence[int]) -> Tensor:
        """Returns ``values`` as this link sends them."""
        return torch.tensor(values, dtype=torch.int64, device=self.device)


def _bytes(tensor: Tensor) -> Tensor:
    # Every backend sends bytes, and some lack types: NCCL has no int16.
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


@contextmanager
def waiting_for(what: str) -> Iterator[None]:
    """Adds to a broken exchange which message of which stage it was."""
    try:
        yield
    except RuntimeError as error:
        add_note(error, what)
        raise


@dataclass
class Known:
    """The headers of the messages of one stream, by the signature of the step."""

    headers: dict[int, list[Header]] = field(default_factory=dict)

    def of(self, signature: int) -> list[Header] | None:
        """Returns the headers of a step with ``signature``, ``None`` where they are not known yet."""
        return self.headers.get(signature)

    def keep(self, signature: int, headers: list[Header]) -> None:
        """Remembers the headers of a step; both ends forget the same ones."""
        self.headers[signature] = headers
        if len(self.headers) > _MAX_SIGNATURES:
            del self.headers[next(iter(self.headers))]


class Outgoing:
    """The messages of one stream in one step, at the sender.

    Args:
        link: where they go.
        in_flight: how many may be on their way before this worker waits.
        known: headers that the receiver knows, ``None`` to send them; unused for gradients.
    """

    def __init__(self, link: StageLink, in_flight: int, known: list[Header] | None = None) -> None:
        self.link = link
        self.known = known
        self.sent: list[Header] = []
        self._in_flight = in_flight
        self._works: deque[tuple[str, list[Any]]] = deque()

    def send_value(self, value: Any, what: str) -> list[Tensor]:
        """Begins to send ``value``; returns its tensors. Raises ConfigError for shapes the receiver does not expect."""
        header, tensors = encode(value, what)
        first: list[Tensor] = []
        if self.known is None:
            is_new = not self.sent or self.sent[-1] != header
            first = [self.link.integers([len(header) if is_new else 0])]
            first += [self.link.integers(header)] if is_new else []
        elif self.known[len(self.sent)] != header:
            raise ConfigError(
                f"{what} returned {_shown(header)}, and in an earlier step with data of the same shapes it was "
                f"{_shown(self.known[len(self.sent)])}. Where shapes depend on values, set "
                "hybrid_configs['pp_configs']['enable_dynamic_shape'] to True."
            )
        self.sent.append(header)
        self.send([*first, *(tensor.to(self.link.device) for tensor in tensors)], what)
        return tensors

    def send(self, tensors: Sequence[Tensor], what: str) -> None:
        """Begins to send ``tensors`` as one message; waits for earlier ones where too many are on their way."""
        while len(self._works) >= self._in_flight:
            self._wait()
        with waiting_for(f"{what}, for {self.link.described}"):
            # The tensors stay until they have left: the backend reads their memory meanwhile.
            self._works.append((what, [(self.link.send(tensor), tensor) for tensor in tensors]))

    def finish(self) -> None:
        """Returns when every message has left."""
        while self._works:
            self._wait()

    def _wait(self) -> None:
        what, works = self._works.popleft()
        with waiting_for(f"{what}, for {self.link.described}"):
            for work, _ in works:
                if work is not None:
                    wait_for(work)


class Incoming:
    """The messages of one stream in one step, at the receiver; one is asked for ahead.

    Args:
        link: where they come from.
        known: headers that were received before, ``None`` to receive them; unused for gradients.
    """

    def __init__(self, link: StageLink, known: list[Header] | None = None) -> None:
        self.link = link
        self.known = known
        self.received: list[Header] = []
        self._posted: deque[tuple[list[Tensor], list[Any]]] = deque()

    @property
    def has_posted(self) -> bool:
        """Whether a message was asked for and has not been read yet."""
        return bool(self._posted)

    def post_value(self) -> None:
        """Asks for the next value: for its tensors where the header is known, else for the length of its header."""
        if self.known is None:
            self._post([self.link.integers([0])])
        else:
            self._post(self._buffers(specs_of(self.known[len(self.received) + len(self._posted)])))

    def take_value(self, what: str) -> Any:
        """Returns the next value; its tensors require gradients where the sender's do."""
        if not self._posted:
            self.post_value()
        tensors = self.take(what)
        if self.known is None:
            length = int(tensors[0])
            header = self.received[-1] if not length else self._header(length, what)
            self._post(self._buffers(specs_of(header)), now=True)
            tensors = self.take(what)
        else:
            header = self.known[len(self.received)]
        self.received.append(header)
        for tensor, spec in zip(tensors, specs_of(header), strict=True):
            tensor.requires_grad_(spec.requires_grad and torch.is_grad_enabled())
        return decode(header, tensors)

    def post(self, specs: Sequence[Spec]) -> None:
        """Asks for the next message, tensors of the given shapes."""
        self._post(self._buffers(specs))

    def take(self, what: str) -> list[Tensor]:
        """Returns the tensors of the message that was asked for first."""
        tensors, works = self._posted.popleft()
        with waiting_for(f"{what}, from {self.link.described}"):
            for work in works:
                if work is not None:
                    wait_for(work)
        return tensors

    def _header(self, length: int, what: str) -> Header:
        buffer = self.link.integers([0] * length)
        self._post([buffer], now=True)
        return tuple(self.take(what)[0].tolist())

    def _buffers(self, specs: Sequence[Spec]) -> list[Tensor]:
        return [torch.empty(spec.shape, dtype=spec.dtype, device=self.link.device) for spec in specs]

    def _post(self, tensors: list[Tensor], now: bool = False) -> None:
        entry = tensors, [self.link.receive(tensor) for tensor in tensors]
        if now:
            self._posted.appendleft(entry)
        else:
            self._posted.append(entry)


def _shown(header: Header) -> str:
    return ", ".join(
        f"{spec.dtype} {list(spec.shape)}{' with' if spec.requires_grad else ' without'} gradient"
        for spec in specs_of(header)
    )
