"""ServedWeight: the weight of an embedding whose rows are on servers, where a script uses it outside the lookup.

For ``nn.Embedding(sparse=True)`` each use reads the servers' rows first, and its gradient goes to them: an L2 penalty
on ``emb.weight`` means the same as in plain torch. For ``fleet.SparseEmbedding``, whose weight is empty, it is refused.
So is a change of the weight's values, also through what shares its memory: ``weight.data``, its views, its array.
"""

from __future__ import annotations

import inspect
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from fleet.errors import ConfigError, OptionWarning

if TYPE_CHECKING:
    from fleet.ps.embeddings.lookup import RowLookup

MANY_ROWS = 1 << 16
as_plain = torch._C.DisableTorchFunctionSubclass  # a context in which the weight is an ordinary tensor

# Functions that describe a tensor and read no value of it.
_DESCRIBES = frozenset((
    "size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "storage_offset", "get_device",
    "data_ptr", "untyped_storage", "requires_grad_", "retain_grad", "__len__",
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like",
    "randn_like", "new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "_has_compatible_shallow_copy_type",
))  # fmt: skip
_GRADIENT: Any = Tensor.grad
_READS_GRADIENT, _SETS_GRADIENT, _DELETES_GRADIENT = _GRADIENT.__get__, _GRADIENT.__set__, _GRADIENT.__delete__
_ZERO_GRADS = frozenset((inspect.unwrap(nn.Module.zero_grad).__code__, inspect.unwrap(Optimizer.zero_grad).__code__))
_HOOKS = frozenset(("register_hook", "register_post_accumulate_grad_hook"))
_VALUES = frozenset(("data", "T", "mT", "H", "mH", "real", "imag"))  # attributes with values; the others describe
# Functions that show that a weight is empty.
_SHOWS = frozenset(("data", "detach", "clone", "to", "cpu", "cuda", "contiguous", "__repr__", "__format__"))
_BATCH = (
    "To penalise the rows of the batch, write rows = embedding(ids); loss = loss + l2 * rows.square().sum(), or set "
    "weight_decay in the optimizer's group, which acts on each row in the steps in which it occurs."
)


_INSTEAD = "Set weights before fleet.init_worker(), or load a save of the servers with fleet.load_model(dirname)."


class WatchesWeight(nn.Module):
    """Base of modules whose ``weight`` is a :class:`ServedWeight`.

    While the servers have the rows, what would part the weight from them is refused, before it changes anything here.
    """

    weight: Tensor
    own_weight: nn.Parameter  # stands for the rows, whatever torch.func.functional_call puts in its place
    lookup: RowLookup
    served_table: str | None = None  # the name of the table, once the module is attached to one
    holds_rows = False  # the weight has room for the rows
    fixed: frozenset[str] = frozenset()  # attributes that the table was made from

    def refresh(self) -> None:
        """Copies the servers' rows into the weight."""

    def forget_gradients(self) -> None:
        """Forgets the gradients of rows that were not sent yet."""
        self.lookup.drop()
        with as_plain():
            self.weight.grad = None

    def watch_weight(self) -> None:
        """Makes the weight a ServedWeight of this module; the object stays the same, so optimizers keep it."""
        self.weight.__class__ = ServedWeight
        self.weight.__dict__["module"] = weakref.ref(self)
        self.__dict__["own_weight"] = self.weight  # no second parameter

    def takes_other_weight(self) -> bool:
        """Returns whether this forward was given another weight, as by ``torch.func.functional_call``.

        Raises:
            ConfigError: the weight itself was given other contents.
        """
        own = self.own_weight
        if type(own) is not ServedWeight and self._is_served():
            raise ConfigError(
                f"{self.lookup.label}: torch.utils.swap_tensors() has put other values into its weight, but the rows "
                f"are on the parameter servers. {_INSTEAD}"
            )
        return self._parameters.get("weight") is not own

    def __getstate__(self) -> dict[str, Any]:
        # A copy watches another weight, see __setstate__; here it would be a second parameter in the file.
        return {name: value for name, value in self.__dict__.items() if name != "own_weight"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.watch_weight()  # of a copy

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.fixed:
            self._refuse_while_served(f"{name} = ...", name)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.fixed:
            self._refuse_while_served(f"del {name}", name)
        super().__delattr__(name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Adds a parameter; a replacement of the weight is refused while the servers have the rows."""
        if name.startswith("weight"):  # pruning makes weight_orig
            self._refuse_while_served(f"register_parameter({name!r})", "weight")
        super().register_parameter(name, param)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        with as_plain():
            if self._is_served():
                # An empty slice shows the new dtype and converts no rows.
                self._check_dtype(fn(self.weight.detach()[:0]).dtype)
            return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: Mapping[str, Any], *args: Any
    ) -> None:
        if self._is_served() and f"{prefix}weight" in state_dict:
            if local_metadata.get("assign_to_params_buffers", False):
                self._refuse_while_served("load_state_dict(assign=True)", "weight")
            warnings.warn(
                f"load_state_dict() does not change what is trained of {self.lookup.label}: its rows are on the "
                f"parameter servers. {_INSTEAD}",
                OptionWarning,
                stacklevel=2,
            )
        with as_plain():
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    def _is_served(self) -> bool:
        lookup: RowLookup | None = self.__dict__.get("lookup")  # not there yet while the module is made
        return lookup is not None and lookup.trains()

    def _check_dtype(self, dtype: torch.dtype) -> None:
        if dtype is not torch.float32:
            raise ConfigError(
                f"{self.lookup.label}: its weight would become {dtype}, but the rows are on the parameter servers, "
                "whose tables hold float32. Convert other modules only, or compute in bfloat16: strategy.amp = True."
            )

    def _refuse_while_served(self, what: str, name: str) -> None:
        if not self._is_served():
            return
        if name == "weight":
            raise ConfigError(
                f"{self.lookup.label}: {what} would replace its weight here, but the rows are on the parameter "
                f"servers. {_INSTEAD}"
            )
        raise ConfigError(
            f"{self.lookup.label}: {what} would not change its table, which the parameter servers made when training "
            f"began. Set {name} when the module is made."
        )


def _changes(name: str) -> Callable[[Any, Any], Any]:
    def change(self: Any, other: Any) -> Any:
        self._prepare(name, True)
        return getattr(Tensor, name)(self, other)

    return change


def _reads(name: str) -> Callable[[Any, Any], Any]:
    def read(self: Any, other: Any) -> Any:
        found = getattr(Tensor, name)(self, other)
        # The operator has swallowed the ConfigError of the weight, which is a TypeError: raise it here.
        if found is NotImplemented:
            self._prepare(name, False)
        return found

    return read


class _Operators:
    """``w + 1``, ``w += 1`` and their siblings: torch takes a TypeError, such as ConfigError, for an unknown type."""

    __slots__ = ()
    __iadd__, __isub__, __imul__ = _changes("__iadd__"), _changes("__isub__"), _changes("__imul__")
    __itruediv__, __ifloordiv__, __imod__ = _changes("__itruediv__"), _changes("__ifloordiv__"), _changes("__imod__")
    __ipow__ = _changes("__ipow__")
    __add__, __sub__, __mul__, __truediv__ = map(_reads, ("__add__", "__sub__", "__mul__", "__truediv__"))
    __radd__, __rsub__, __rmul__, __rtruediv__ = map(_reads, ("__radd__", "__rsub__", "__rmul__", "__rtruediv__"))
    __floordiv__, __mod__, __pow__, __matmul__ = map(_reads, ("__floordiv__", "__mod__", "__pow__", "__matmul__"))
    __lt__, __le__, __gt__, __ge__ = map(_reads, ("__lt__", "__le__", "__gt__", "__ge__"))


class ServedWeight(_Operators, nn.Parameter):
    """A parameter that stands for rows; :meth:`WatchesWeight.watch_weight` makes one of a module's weight."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs ``func``, on the servers' rows where it reads values.

        Raises:
            ConfigError: it would change values on the servers, or the weight has no rows to read.
        """
        if _clears(func, args):
            args[0]._forget_gradients()
        return _run(func, args, kwargs or {})

    def _forget_gradients(self) -> None:
        module = _module_of(self)
        if module is not None:
            module.forget_gradients()

    def _prepare(self, name: str, is_changed: bool, averages: bool = False) -> None:
        module = _served_module(self)
        if module is None or (is_changed and _is_empty_copy(module)):
            return
        label = module.lookup.label
        if "weight" not in module._parameters:  # weight_norm takes it away without a word, and then reads it
            module._parameters["weight"] = self
            raise ConfigError(
                f"{label}: {name} would put another weight in the place of its own, but the rows are on the parameter "
                f"servers. {_INSTEAD}"
            )
        if name in _HOOKS:
            raise ConfigError(no_hook(label))
        if is_changed:
            _refuse_change(module, name)
        if name == "autograd.grad":
            raise ConfigError(
                f"{label}: torch.autograd.grad() with respect to its weight would see no lookup: the rows are on the "
                "parameter servers. Differentiate with respect to the rows that the lookup returns."
            )
        if module.holds_rows:
            is_trained = torch.is_grad_enabled() and self.requires_grad and name != "detach"  # which state_dict calls
            if is_trained and len(self) > MANY_ROWS:
                _warn_of_size(module, name, len(self))
            module.refresh()
        elif name not in _SHOWS and not averages:
            raise ConfigError(
                f"{label}: {name} uses its weight, which is empty: it stands for rows on the parameter servers, and "
                f"this would skip them all. {_BATCH} A loop over model.parameters() should skip p.numel() == 0."
            )

    def __reduce_ex__(self, protocol: Any) -> Any:
        return torch._utils._rebuild_parameter, (
            self.data,
            self.requires_grad,
            {},
        )  # the module serves it again


class ServedRows(_Operators, Tensor):
    """What shares the memory of a :class:`ServedWeight`, such as ``weight.data`` and its views: to be read.

    A change would reach this worker's copy of the rows only, or would be lost with the next read.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs ``func``; raises ConfigError where it would change rows that are on the servers."""
        return _run(func, args, kwargs or {})

    def _prepare(self, name: str, is_changed: bool, averages: bool = False) -> None:
        module = _served_module(self) if is_changed else None
        if module is not None and not _is_empty_copy(module):
            _refuse_change(module, name)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self._plain())

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied: Tensor = self._plain().__deepcopy__(memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)  # a file holds a tensor that every torch can read

    def _plain(self) -> Tensor:
        with as_plain():
            return self.as_subclass(Tensor)


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = _name(func)
    with as_plain():
        if name is None:
            return func(*args, **kwargs)
        changed = _changed(name, args, kwargs)
        watched = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, ServedWeight | ServedRows)]
        # An average of models takes one empty weight into another.
        averages = any(_is_empty_copy(_module_of(one)) for one in watched if any(one is other for other in changed))
        for leaf in watched:
            leaf._prepare(name, any(leaf is one for one in changed), averages)
        found = func(*args, **kwargs)
        served = {_memory(leaf): leaf.__dict__["module"] for leaf in watched if _served_module(leaf) is not None}
        if not served:
            return found
        if isinstance(found, Iterator):
            return iter([_guarded(one, served) for one in found])
        return tree_map(lambda one: _guarded(one, served), found)


def _clears(func: Any, args: Any) -> bool:
    """Returns whether this use of ``.grad`` clears the gradient, as torch's ``zero_grad`` does, or ``p.grad = None``.

    A lookup leaves nothing in ``.grad``, so ``zero_grad`` reads it and goes on: only the caller tells it from others.
    """
    if func == _READS_GRADIENT:
        return sys._getframe(2).f_code in _ZERO_GRADS
    return func == _DELETES_GRADIENT or (func == _SETS_GRADIENT and args[1] is None)


def _module_of(tensor: ServedWeight | ServedRows) -> WatchesWeight | None:
    found: Callable[[], WatchesWeight | None] = tensor.__dict__.get("module", lambda: None)
    return found()


def _served_module(tensor: ServedWeight | ServedRows) -> WatchesWeight | None:
    """Returns the module whose rows, on servers now, ``tensor`` stands for."""
    module = _module_of(tensor)
    return module if module is not None and module.lookup.trains() else None


def _is_empty_copy(module: WatchesWeight | None) -> bool:
    """Returns whether ``module`` is a copy, as in an average of models, whose weight has no room for rows."""
    if module is None or module.holds_rows:
        return False
    return module.lookup.is_copy or not module.lookup.trains()


def _guarded(found: Any, served: Mapping[int, Any]) -> Any:
    """Returns ``found``, and what shares memory with a weight of ``served`` as values that cannot be changed."""
    if isinstance(found, np.ndarray):
        found.flags.writeable = False
    if not isinstance(found, Tensor) or isinstance(found, ServedWeight | ServedRows) or _memory(found) not in served:
        return found
    rows = found.as_subclass(ServedRows)
    rows.__dict__["module"] = served[_memory(found)]
    return rows


def _memory(tensor: Tensor) -> int:
    found: int = tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0
    return found


def _refuse_change(module: WatchesWeight, name: str) -> None:
    raise ConfigError(
        f"{module.lookup.label}: {name} would change its weight here, but the rows are on the parameter servers. "
        f"{_INSTEAD}"
    )


def no_hook(label: str) -> str:
    """Returns the message for a hook on the gradient of a weight that stands for rows."""
    return (
        f"{label}: a hook on its weight would see no gradient of a lookup: the gradients of rows go to the parameter "
        "servers. Hook the rows that the lookup returns (rows = embedding(ids); rows.register_hook(...)), or use "
        "nn.Embedding(sparse=False)."
    )


_NAMES: dict[Any, str | None] = {}  # a step reads .grad, .device and .requires_grad several times


def _name(func: Any) -> str | None:
    """Returns the name of ``func`` for messages; ``None`` if it reads and changes no value."""
    if func not in _NAMES:
        _NAMES[func] = _new_name(func)
    return _NAMES[func]


def _new_name(func: Any) -> str | None:
    if func is torch.autograd.grad:
        return "autograd.grad"
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__", "__delete__"):
        attribute: str = func.__self__.__name__
        if attribute not in _VALUES:
            return None
        return attribute if name == "__get__" else f"{attribute} = ..."
    return None if name in _DESCRIBES or name.startswith(("is_", "_is_")) else name


def _changed(name: str, args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """Returns the tensors that a function changes in place."""
    if kwargs.get("max_norm") is not None and name.startswith("embedding"):
        return tree_leaves(args[1])  # F.embedding and F.embedding_bag renormalize rows
    first = [*args, *kwargs.values()][:1]
    in_place = name.endswith(("_", "...")) and not name.startswith("__")
    if (
        in_place
        or name == "__setitem__"
        or (name.startswith("__i") and name not in ("__index__", "__int__", "__invert__"))
    ):
        return tree_leaves(first)
    return tree_leaves(kwargs.get("out"))


def _warn_of_size(module: WatchesWeight, name: str, count: int) -> None:
    if "_warned_of_size" in module.__dict__:
        return
    module.__dict__["_warned_of_size"] = True
    warnings.warn(
        f"{module.lookup.label}: {name} uses its whole weight, so each such step reads all {count} rows and sends "
        f"as many gradients to the servers. {_BATCH}",
        OptionWarning,
        stacklevel=4,
    )
