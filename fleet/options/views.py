"""Views: the dictionaries and lists of a strategy, which users can change in place.

[Note: Views]
A view holds a copy of the option's value, so that it reads like any dict or list: ``json``, ``**``, ``==``. A change
to a view becomes an assignment to the strategy, which checks it like any other and then updates all its views. So a
view shows later assignments too, and a refused change shows nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from yaml.representer import Representer, SafeRepresenter

from fleet.errors import ConfigError, UnknownOptionError, did_you_mean
from fleet.strategies._declare.fields import Config, Replacement, plain

ViewClass = TypeVar("ViewClass", bound="type[Any]")


class Owner(Protocol):
    """The owner of a view: a strategy, or another view."""

    def write_view(self, key: Any, value: Any) -> None:
        """Replaces the value behind the view under ``key``."""


class _Detached:
    def write_view(self, key: Any, value: Any) -> None:
        raise ConfigError(
            f"The view read from {key!r} is no longer part of the strategy: its value was replaced. Read it again."
        )


class LiveView:
    """The base of the views; copies and pickles of a view are plain and independent."""

    _plain: ClassVar[type[Any]]
    _owner: Owner
    _key: Any

    def _hang(self, owner: Owner, key: Any) -> None:
        self.__dict__.update(_owner=owner, _key=key)

    def _detach(self) -> None:
        self.__dict__["_owner"] = _Detached()

    def copy(self) -> Any:
        """Returns a plain and independent copy."""
        return plain(self)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return self._plain, (plain(self),)


class ConfigView(LiveView, dict[str, Any]):
    """The settings of a ``*_configs`` option, by key and by attribute.

    The keys are fixed: ``del``, ``pop`` and ``clear`` restore their defaults.
    """

    _plain = dict
    config: Config

    def __init__(self, config: Config, owner: Owner, key: str) -> None:
        super().__init__()
        self._hang(owner, key)
        self.show(config)

    def show(self, config: Config) -> None:
        """Brings the view up to date."""
        if self.__dict__.get("config") is config:
            return
        # Through __dict__ and dict: the attributes and items of a view are assignments to the strategy.
        self.__dict__["config"] = config
        for key in config.key_names():
            dict.__setitem__(self, key, view_of(dict.get(self, key), getattr(config, key), self, key))

    def write_view(self, key: Any, value: Any) -> None:
        """Assigns ``value`` to ``key``, as ``strategy.x_configs = {key: value}`` does."""
        self._owner.write_view(self._key, {key: value})

    def __missing__(self, key: Any) -> Any:
        known = self.config.key_names()
        near = did_you_mean(str(key), known)
        raise UnknownOptionError(f"{self.config.option} has no key {key!r}.{near} Keys: {', '.join(known)}.")

    def __setitem__(self, key: str, value: Any) -> None:
        self.write_view(key, value)

    def __delitem__(self, key: str) -> None:
        self.pop(key)

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Assigns all keys, or none of them when one is wrong."""
        if changes := dict(*args, **kwargs):
            self._owner.write_view(self._key, changes)

    def __ior__(self, other: Any) -> Any:  # type: ignore[misc]
        self.update(other)
        return self

    def setdefault(self, key: str, default: Any = None) -> Any:
        """Returns the value of ``key``; every key already has one."""
        return self[key]

    def pop(self, key: str, *default: Any) -> Any:
        """Returns the value of ``key`` and restores its default."""
        found = plain(self[key])
        self.write_view(key, plain(getattr(type(self.config)(), key)))
        return found

    def popitem(self) -> Any:
        """Raises ConfigError: the keys are fixed."""
        raise ConfigError(f"{self.config.option}.popitem(): the keys are fixed. clear() restores all defaults.")

    def clear(self) -> None:
        """Restores the default of every key."""
        self.update(type(self.config)().as_dict())

    def _read(self, name: str) -> Any:
        # copy and pickle ask for dunder names before __init__ has run.
        if name.startswith("__") or "config" not in self.__dict__:
            raise AttributeError(name)
        return self[name]

    def __delattr__(self, name: str) -> None:
        self.pop(name)

    if not TYPE_CHECKING:  # type checkers then refuse every name that is no key
        __getattr__ = _read
        __setattr__ = write_view

    def __dir__(self) -> Iterable[str]:
        return sorted({*object.__dir__(self), *self})


def _changed_as_a_whole(*names: str) -> Callable[[ViewClass], ViewClass]:
    """Makes the named methods change a plain copy, which then replaces the value of the view."""

    def through_a_copy(name: str) -> Callable[..., Any]:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            trial = plain(self)
            found = getattr(trial, name)(*args, **kwargs)
            self._owner.write_view(self._key, Replacement(trial) if isinstance(trial, dict) else trial)
            if found is trial:  # += and the like
                return self
            return self[args[0]] if name == "setdefault" else found

        method.__name__ = name
        return method

    def decorate(view: ViewClass) -> ViewClass:
        for name in names:
            setattr(view, name, through_a_copy(name))
        return view

    return decorate


@_changed_as_a_whole(
    "__setitem__", "__delitem__", "__iadd__", "__imul__",
    "append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort",
)  # fmt: skip
class ListView(LiveView, list[Any]):
    """A list inside a strategy."""

    _plain = list

    def __init__(self, items: Iterable[Any], owner: Owner, key: Any) -> None:
        super().__init__()
        self._hang(owner, key)
        self.show(items)

    def show(self, items: Iterable[Any]) -> None:
        """Updates the view; views read from its items before may have moved, and are detached."""
        if repr(self) == repr(plain(items)):
            return
        # After an assignment to one item the others keep their places, and views read from them stay valid.
        stays = self.__dict__.pop("_stays", False)
        before = list(self)
        made = [view_of(before[at] if stays else None, item, self, at) for at, item in enumerate(items)]
        for old in before:
            if isinstance(old, LiveView) and not stays:
                old._detach()
        list.__setitem__(self, slice(None), made)

    def write_view(self, key: Any, value: Any) -> None:
        """Replaces the item at index ``key`` with ``value``; the length stays the same."""
        self.__dict__["_stays"] = True
        try:
            self[key] = value
        finally:
            self.__dict__.pop("_stays", None)


@_changed_as_a_whole("__setitem__", "__delitem__", "__ior__", "clear", "pop", "popitem", "setdefault", "update")
class DictView(LiveView, dict[str, Any]):
    """A dictionary with free keys inside a strategy, such as ``sparse_table_configs``."""

    _plain = dict

    def __init__(self, items: Mapping[str, Any], owner: Owner, key: Any) -> None:
        super().__init__()
        self._hang(owner, key)
        self.show(items)

    def show(self, items: Mapping[str, Any]) -> None:
        """Brings the view up to date."""
        if repr(self) == repr(plain(items)):
            return
        made = {key: view_of(dict.get(self, key), item, self, key) for key, item in items.items()}
        for key in self.keys() - made.keys():
            if isinstance(gone := dict.get(self, key), LiveView):
                gone._detach()
        dict.clear(self)
        dict.update(self, made)

    def write_view(self, key: Any, value: Any) -> None:
        """Assigns ``value`` to ``key``."""
        self[key] = value

    def _read(self, name: str) -> Any:
        if name.startswith("__") or name not in self:
            raise AttributeError(
                f"{self.__dict__.get('_key', '')} has no key {name!r}. Keys: {', '.join(self) or 'none'}."
            )
        return self[name]

    def _write(self, name: str, value: Any) -> None:
        if hasattr(type(self), name):  # reading it would find the method
            raise ConfigError(f"{name!r} is a method of a dictionary. Write [{name!r}] = {value!r}.")
        self[name] = value

    def __delattr__(self, name: str) -> None:
        self.pop(name)

    if not TYPE_CHECKING:  # type checkers know a dictionary
        __getattr__ = _read
        __setattr__ = _write


def view_of(old: Any, value: Any, owner: Owner, key: Any, config_view: type[ConfigView] = ConfigView) -> Any:
    """Returns a view of ``value``: ``old``, updated, where it is of the same kind, or a new one; a scalar as it is."""
    kind: Any = None
    if isinstance(value, Config):
        kind = config_view
    elif isinstance(value, dict):
        kind = DictView
    elif isinstance(value, list | tuple):
        kind = ListView
    if kind is not None and isinstance(old, kind):
        old.show(value)
        return old
    if isinstance(old, LiveView):
        old._detach()
    return value if kind is None else kind(value, owner, key)


for _dumper in (SafeRepresenter, Representer):  # yaml knows dict and list, but not their subclasses
    _dumper.add_multi_representer(ConfigView, SafeRepresenter.represent_dict)
    _dumper.add_multi_representer(DictView, SafeRepresenter.represent_dict)
    _dumper.add_multi_representer(ListView, SafeRepresenter.represent_list)
