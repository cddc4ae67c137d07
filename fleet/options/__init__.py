"""DistributedStrategy: the object whose switches become wrappers around torch modules and optimizers.

Nothing here is written per option: names, types, defaults, bounds and meanings come from the registry of
``fleet.strategies``. A wrong type, an unknown key or a value out of range raises before anything changes.
"""

from __future__ import annotations

import copy
import functools
import os
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import yaml

from fleet.errors import ConfigError, OptionWarning, UnknownOptionError, did_you_mean
from fleet.options.views import ConfigView, view_of
from fleet.strategies import GROUPS, REGISTRY, Strategy  # importing the package fills the registry
from fleet.strategies._declare.fields import Config, FieldRule, Replacement, converted, plain, type_name, value_types
from fleet.strategies._declare.strategy import JobKind, switch_rule

if TYPE_CHECKING:
    from fleet.job.job import Job

if TYPE_CHECKING:  # a stub: every option with its type, made from the registry
    from fleet.options.typed import BuildStrategyConfigView, ExecutionStrategyConfigView, TypedOptions
else:
    BuildStrategyConfigView = ExecutionStrategyConfigView = TypedOptions = object

__all__ = ["BuildStrategy", "DistributedStrategy", "ExecutionStrategy"]

# Names from older releases -> their replacements (requirements 003-12 to 003-15).
RENAMED = {
    "exec_strategy": "execution_strategy",
    "forward_recompute": "recompute",
    "recompute_checkpoints": "recompute_configs (key 'checkpoints')",
    "use_local_sgd": "localsgd",
    "use_dgc": "dgc",
    "use_amp": "amp",
    "mode_type": "mode",
    "sync_mode": "a_sync = False",
    "async_mode": "a_sync = True",
    "runtime_split_send_recv": "a_sync = True",
    "half_async": "strategy = fleet.StrategyFactory.create_half_async_strategy()",
    "half_async_mode": "strategy = fleet.StrategyFactory.create_half_async_strategy()",
    "geo_sgd_mode": "a_sync = True and a_sync_configs = {'k_steps': 100}",
    "geo_sgd_need_push_nums": "a_sync_configs (key 'k_steps')",
    "collective_mode": "localsgd = True for 'local_sgd', and nothing for 'grad_allreduce'",
    "local_sgd_frequency": "localsgd_configs (key 'k_steps')",
    "amp_loss_scaling": "amp_configs (key 'init_loss_scaling')",
    "use_recompute": "recompute",
}
# Fleet's own code spells these with an underscore too.
ALIASES = {
    "_fuse_grad_size_in_TFLOPS": "fuse_grad_size_in_TFLOPS",
    "_calc_comm_same_stream": "calc_comm_same_stream",
    "is_with_coordinator": "with_coordinator",
}


@dataclass(frozen=True)
class Option:
    """One top-level option: its name, type, default and rule, the strategy that reads it, and the group it is in."""

    name: str
    kind: Any
    default: Any
    rule: FieldRule
    owner: str
    group: type[Config] | None = None


def schema() -> Mapping[str, Option]:
    """Returns every option by name: the switches, their ``_configs``, and the groups of further settings."""
    return _schema(tuple(REGISTRY.values()), tuple(GROUPS))


@functools.lru_cache(maxsize=4)  # reading one attribute must not describe all of them again
def _schema(strategies: tuple[type[Strategy], ...], groups: tuple[type[Config], ...]) -> Mapping[str, Option]:
    found: dict[str, Option] = {}
    for strategy in strategies:
        name = strategy.name
        if strategy.default is not None:
            found[name] = Option(name, bool, strategy.default, switch_rule(strategy), name)
        if strategy.Config is not None:
            key = f"{name}_configs"
            rule = FieldRule(meaning=f"Settings of '{name}'.")
            found[key] = Option(key, strategy.Config, strategy.Config(), rule, name)
    for group in groups:
        default = group()
        for key, kind in value_types(group).items():
            found[key] = Option(key, kind, getattr(default, key), group.rule(key), group.owner or group.__name__, group)
    return found


def _resets() -> dict[str, Mapping[str, Mapping[str, Any]]]:
    """Returns the keys of other options that assigning an option resets, and their values."""
    return {s.name: s.also_sets for s in REGISTRY.values() if issubclass(s, JobKind) and s.also_sets}


class DistributedStrategy(TypedOptions):
    """Holds every option of a job; assign some, and the rest keep their defaults.

    Assigning a ``*_configs`` option merges the given keys into the current values. Reading it returns a live
    dictionary, whose keys are also attributes: a value written into it is checked and kept like an assignment.
    Assigning an option that has no meaning on torch warns once with the reason. ``fleet.init`` and
    ``fleet.distributed_*`` refuse an option that cannot be honoured, with the reason. They copy the strategy, so a
    later change warns.

    Raises:
        UnknownOptionError: the option or key does not exist; the message names the nearest one.
        ConfigError: the value has the wrong type or is out of range.

    Example:
        >>> strategy = DistributedStrategy()
        >>> strategy.fuse_grad_size_in_MB = 16
        >>> strategy.gradient_scale_configs = {"scale_strategy": "sum"}
        >>> strategy.recompute_configs["checkpoints"].append("layer1")
    """

    _values: dict[str, Any]
    _assigned: dict[str, None]
    _views: dict[str, Any]
    _copy: tuple[str, weakref.ref[Job]] | None = None  # the call that copied this object last, and its job
    _told: set[str]  # the options that were changed since

    def __init__(self) -> None:
        self.__setstate__(({}, {}))

    def _assign(self, name: str, value: Any) -> None:
        option = _option(name)
        if isinstance(value, ConfigView):
            value = value.config  # already warned about
        current = self._values[option.name]
        without_effect: list[tuple[str, str]] = []
        if isinstance(current, Config) and not isinstance(value, Config):
            new: Any = current.updated(value)
            without_effect += _without_effect(option.name, type(current)(), value)
        else:
            label = f"DistributedStrategy.{option.name}"
            new = converted(label, option.kind, value)
            if option.group is not None:
                option.group(**{option.name: new})  # raises where the group's rules are broken
            if isinstance(new, dict) and not isinstance(value, Replacement):
                new = {**current, **new}
            if option.rule.no_meaning:
                without_effect.append((label, option.rule.no_meaning))
        self._store(option.name, new)
        _warn(without_effect)

    def _store(self, name: str, new: Any) -> None:
        for other, changes in _resets().get(name, {}).items():
            self._values[other] = self._values[other].updated(changes)
        self._values[name] = new
        # A dictionary keeps the order of assignments, in which a file is written.
        self._assigned[name] = None
        self._show_views()
        self._warn_of_copy([name])

    def write_view(self, key: str, value: Any) -> None:
        """Applies a change that was made in the view of the option ``key``."""
        setattr(self, key, value)

    def _show_views(self) -> None:
        for name, view in self._views.items():
            view.show(self._shown(_option(name)))

    def _shown(self, option: Option) -> Any:
        """Returns the value as the user reads it: the value of the key with the same meaning, where that is set."""
        if option.rule.shows is None:
            return self._values[option.name]
        group, *keys = option.rule.shows.split(".")
        return functools.reduce(getattr, keys, self._values[group]) or self._values[option.name]

    def _warn_of_copy(self, names: list[str]) -> None:
        call, job = (self._copy[0], self._copy[1]()) if self._copy is not None else ("", None)
        if job is None or job.closed:
            return
        for name in names:
            if name in self._told:
                continue
            self._told.add(name)
            other = ", or pass the strategy to fleet.distributed_optimizer(optimizer, strategy)"
            _warn_user(
                f"DistributedStrategy.{name} was set after {call} had copied the strategy, and no longer "
                f"has an effect. Set it before that call{other if 'init' in call else ''}."
            )

    def _read(self, name: str) -> Any:
        # copy and pickle look methods up on an object without attributes; a lookup of _values there would recurse.
        if name.startswith("__") or "_values" not in self.__dict__:
            raise AttributeError(name)
        option = _option(name)
        value = self._shown(option)
        if not isinstance(value, Config | tuple | dict):
            return value
        if option.name not in self._views:
            kind = SettingsObject.kinds.get(option.name, ConfigView)
            self._views[option.name] = view_of(None, value, self, option.name, kind)
        return self._views[option.name]

    if not TYPE_CHECKING:  # type checkers then refuse every name that is no option
        __getattr__ = _read
        __setattr__ = _assign

    def __getitem__(self, name: str) -> Any:
        """Returns the stored value of an option: a scalar, a tuple, or a frozen Config."""
        return self._values[_option(name).name]

    def is_set(self, name: str) -> bool:
        """Returns whether the option was assigned, even to its default."""
        return _option(name).name in self._assigned

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *self._values})

    def __iter__(self) -> Iterator[str]:
        """Iterates over the names of all options."""
        return iter(self._values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DistributedStrategy) and self._values == other._values

    __hash__ = None  # type: ignore[assignment]

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedStrategy:
        # Views and the mark of mark_copied() stay behind: they belong to this object.
        twin = type(self)()
        twin.__setstate__(copy.deepcopy((self._values, self._assigned), memo))
        return twin

    def __copy__(self) -> DistributedStrategy:
        return copy.deepcopy(self)

    def __getstate__(self) -> tuple[dict[str, Any], dict[str, None]]:
        return dict(self._values), dict(self._assigned)

    def __setstate__(self, state: tuple[dict[str, Any], dict[str, None]]) -> None:
        # A strategy that was pickled before an option existed gets its default.
        defaults = {name: option.default for name, option in schema().items()}
        self.__dict__.setdefault("_views", {})
        self.__dict__.update(_values={**defaults, **state[0]}, _assigned=dict(state[1]))
        self._show_views()

    def __repr__(self) -> str:
        return strategy_table(self)

    def to_dict(self, *, all_options: bool = False) -> dict[str, Any]:
        """Returns the assigned options (or all of them) as plain dictionaries, lists and scalars."""
        names = self._values if all_options else self._assigned
        return {name: plain(self._values[name]) for name in names}

    def _to_save(self) -> dict[str, Any]:
        """Returns the assigned options, with the keys whose values differ from a new strategy's."""
        reset = {option: keys for changes in _resets().values() for option, keys in changes.items()}
        saved = {}
        for name in self._assigned:
            value = self._values[name]
            if isinstance(value, Config):
                kept = {key: plain(getattr(value, key)) for key in reset.get(name, ())}
                saved[name] = {**kept, **value.changes()}
            else:
                saved[name] = plain(value)
        return saved

    def update(self, changes: Mapping[str, Any]) -> None:
        """Assigns every option in ``changes``, or none of them when one is wrong.

        The order of ``changes`` does not matter: a switch whose assignment resets keys (``a_sync``) comes first.
        """
        self._update([(name, value, "") for name, value in changes.items()])

    def _update(self, entries: list[tuple[str, Any, str]]) -> None:
        """Assigns entries of name, value and place in a file, or none of them when one is wrong."""
        # All entries go into a copy first, so that a wrong one leaves this object as it was.
        trial = copy.deepcopy(self)
        for name, value, place in sorted(entries, key=lambda entry: entry[0] not in _resets()):
            try:
                setattr(trial, name, value)
            except ConfigError as error:
                if not place:
                    raise
                raise type(error)(f"{place}: {error}") from error
        # Views that the script holds stay the same objects, and show the new values.
        self.__setstate__(trial.__getstate__())
        self._warn_of_copy([_option(name).name for name, _, _ in entries])

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> DistributedStrategy:
        """Returns the strategy that a YAML file describes.

        Raises:
            ConfigError: the file cannot be read, is not YAML, or an entry is wrong; names the line.
        """
        from fleet.options.files import read_yaml

        strategy = cls()
        strategy._update(read_yaml(path))
        return strategy

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the assigned options as YAML; replaces the file atomically."""
        from fleet.options.files import write_yaml

        write_yaml(path, self._to_save())

    def save_to_prototxt(self, path: str | os.PathLike[str]) -> None:
        """Writes the assigned options in protobuf text format; replaces the file atomically."""
        from fleet.options.files import write_prototxt

        write_prototxt(path, self._to_save(), schema())

    def load_from_prototxt(self, path: str | os.PathLike[str]) -> None:
        """Merges the options of a protobuf text file into this object.

        Raises:
            ConfigError: the file cannot be read or an entry is wrong; names the line. Nothing is changed.
        """
        from fleet.options.files import read_prototxt

        known = schema()
        aliases = {alias: known[name] for alias, name in ALIASES.items()}
        self._update(read_prototxt(path, {**known, **aliases}))


class SettingsObject(ConfigView):
    """The settings that Fleet models as an object (``build_strategy``); independent until it is assigned."""

    kinds: ClassVar[dict[str, type[SettingsObject]]] = {}
    option: ClassVar[str] = ""

    def __init_subclass__(cls, option: str, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.option = option
        SettingsObject.kinds[option] = cls

    def __init__(self, config: Config | None = None, owner: DistributedStrategy | None = None, key: str = "") -> None:
        owner = owner if owner is not None else DistributedStrategy()
        owner._views[self.option] = self
        super().__init__(config if config is not None else owner[self.option], owner, self.option)

    def copy(self) -> SettingsObject:
        """Returns an independent object."""
        return copy.copy(self)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _settings_object, (type(self), self.config)

    def __repr__(self) -> str:
        changes = ", ".join(f"{key}={value!r}" for key, value in self.config.changes().items())
        return f"{type(self).__name__}({changes})"


def _settings_object(kind: type[SettingsObject], config: Config) -> SettingsObject:
    made = kind()
    setattr(made._owner, kind.option, config)
    return made


class BuildStrategy(SettingsObject, BuildStrategyConfigView, option="build_strategy"):
    """The graph-pass switches of ``strategy.build_strategy``."""

    class ReduceStrategy(IntEnum):
        """The way of summing gradients, for ``reduce_strategy``."""

        AllReduce = 0
        Reduce = 1

    class GradientScaleStrategy(IntEnum):
        """The divisor of gradients, for ``gradient_scale_strategy``."""

        CoeffNumDevice = 0
        One = 1
        Customized = 2


class ExecutionStrategy(SettingsObject, ExecutionStrategyConfigView, option="execution_strategy"):
    """The executor settings of ``strategy.execution_strategy``."""


def _option(name: str) -> Option:
    known = schema()
    name = ALIASES.get(name, name)
    if name in known:
        return known[name]
    if name in RENAMED:
        raise UnknownOptionError(f"DistributedStrategy.{name} is the old name; write {RENAMED[name]} instead.")
    raise UnknownOptionError(f"DistributedStrategy has no option {name!r}.{did_you_mean(name, known)}")


def _without_effect(label: str, default: Config, changes: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns label and reason of every changed key that has no meaning; keys with their default are omitted."""
    found: list[tuple[str, str]] = []
    for key, value in changes.items():
        inner = getattr(default, key)
        place = f"{label}[{key!r}]"
        if isinstance(inner, Config):
            found += _without_effect(place, inner, value.as_dict() if isinstance(value, Config) else value)
            continue
        reason = default.rule(key).no_meaning
        if reason and plain(inner) != plain(value):
            found.append((place, reason))
    return found


def without_effect(strategy: DistributedStrategy) -> list[str]:
    """Returns a sentence for every assigned setting that has no meaning, as the warnings said."""
    found: list[tuple[str, str]] = []
    for name, option in schema().items():
        if not strategy.is_set(name):
            continue
        if isinstance(option.default, Config):
            found += _without_effect(name, option.default, strategy[name].changes())
        elif option.rule.no_meaning:
            found.append((name, option.rule.no_meaning))
    return [f"{label}: {reason}." for label, reason in found]


def _warn(settings: list[tuple[str, str]]) -> None:
    """Warns once, at the user's line, about all settings of one assignment that change nothing."""
    if not settings:
        return
    if len(settings) == 1:
        text = f"{settings[0][0]} is accepted and changes nothing: {settings[0][1]}."
    else:
        listed = "; ".join(f"{label} ({reason})" for label, reason in settings)
        text = f"{len(settings)} settings are accepted and change nothing: {listed}."
    _warn_user(text)


def _warn_user(text: str) -> None:
    """Warns at the user's line that led here."""
    level = 1
    frame = sys._getframe()
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith("fleet."):
        level += 1
        frame = frame.f_back
    warnings.warn(text, OptionWarning, stacklevel=level)


def check_strategy(label: str, strategy: object) -> None:
    """Raises ConfigError unless ``strategy`` is a DistributedStrategy or ``None``."""
    if strategy is not None and not isinstance(strategy, DistributedStrategy):
        raise ConfigError(
            f"{label} takes a fleet.DistributedStrategy, got {strategy!r}. Strategy classes from older releases are "
            "not compatible; set the same options on fleet.DistributedStrategy()."
        )


def mark_copied(strategy: DistributedStrategy, call: str, job: Job) -> None:
    """Makes ``strategy`` warn once for each option changed after ``call`` has copied it, while ``job`` runs."""
    # Past __setattr__, which would take these names for options. The job is held weakly: a strategy that outlives it
    # must not keep its models alive.
    strategy.__dict__.update(_copy=(call, weakref.ref(job)), _told=set())


# What happens to an option, and the head of the table. Other languages are in docs/reference/options.LANGUAGE.yaml.
ENGLISH: Mapping[str, Any] = {
    "option": "Option",
    "type": "Type",
    "default": "Default",
    "happens": "What happens",
    "no meaning": "Accepted with one warning: {reason}.",
    "refused": "Refused: {reason}.",
    "settings of": "Settings of '{name}'.",
    "shared": "Keys of {names}.",
    "end": ". ",
    "comma": ", ",
    "meanings": {},
    "reasons": {},
    "keys": {},
}


# Where the words of another language are, in a checkout.
DOCS = Path(__file__).resolve().parents[2] / "docs" / "reference"


@functools.cache
def words_of(language: str, folder: Path = DOCS) -> Mapping[str, Any]:
    """Returns the words of ``language``; ``folder`` holds ``options.LANGUAGE.yaml``, English needs no file."""
    if language == "en":
        return ENGLISH
    text = (folder / f"options.{language}.yaml").read_text(encoding="utf-8")
    return {**ENGLISH, **yaml.safe_load(text)}


def strategy_table(strategy: DistributedStrategy) -> str:
    """Returns a table of the options that were assigned or are on, with the keys that matter.

    Example:
        >>> from fleet.options import DistributedStrategy
        >>> strategy = DistributedStrategy()
        >>> strategy.fuse_grad_size_in_MB = 16
        >>> print(strategy_table(strategy))
        DistributedStrategy (every other option holds its default)
          fuse_grad_size_in_MB  16
    """
    rows = list(_changed_rows(strategy))
    if not rows:
        return "DistributedStrategy: every option holds its default."
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:{width}}  {value}" for name, value in rows]
    return "\n".join(["DistributedStrategy (every other option holds its default)", *lines])


def _changed_rows(strategy: DistributedStrategy) -> Iterator[tuple[str, str]]:
    for name, option in schema().items():
        value = strategy[name]
        switch = name.removesuffix("_configs")
        is_on = name.endswith("_configs") and switch in REGISTRY and strategy[switch] and strategy.is_set(switch)
        if value == option.default and not strategy.is_set(name) and not is_on:
            continue
        if not isinstance(value, Config):
            yield f"  {name}", repr(plain(value))
            continue
        keys = value.as_dict() if is_on else value.changes()
        yield f"  {name}", "" if keys else "(defaults)"
        for key, item in _flat(keys):
            yield f"    {key}", repr(item)


def _flat(keys: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, item in keys.items():
        if isinstance(item, dict) and item:
            yield from _flat(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", item


def option_table_markdown(language: str = "en") -> str:
    """Returns the table of every top-level option: name, type, default and what happens when it is set."""
    words = words_of(language)
    rows = [_row(option.name, option.kind, option.default, option.rule, words) for option in schema().values()]
    return "\n".join([*_head(words), *rows]) + "\n"


def option_listing_markdown(language: str = "en", *, folded: bool = True) -> str:
    """Returns the table of the options, then a section with a table of keys for every option that has keys.

    A key that has no words in ``language`` is described in English. ``folded`` gives one table of its own to a group of
    keys that stands in several places of an option; otherwise each place lists them all.
    """
    words = words_of(language)
    sections = [option_table_markdown(language)]
    for option in schema().values():
        if isinstance(option.kind, type) and issubclass(option.kind, Config):
            shared = _shared_kinds(option.kind) if folded else ()
            listed = list(_keys_of(option.kind, shared))
            below = [(kind, list(_keys_of(kind, ()))) for kind in shared]
            names = [name for table in (listed, *(more for _, more in below)) for name, *_ in table]
            # Not the meanings of options: a key may have the name of one.
            keys = {
                **words,
                "meanings": _key_meanings(words["keys"].get(option.name, {}), names),
            }
            meaning = _meaning(option.name, option.rule, words)
            sections.append(f"## {option.name}\n\n{meaning}\n\n{_key_table(listed, keys)}")
            for kind, more in below:
                places = words["comma"].join(f"`{name}`" for name, inner, *_ in listed if inner is kind)
                text = words["shared"].format(names=places)
                sections.append(f"### {kind.option}\n\n{text}\n\n{_key_table(more, keys)}")
    return "\n".join(sections)


def _key_table(listed: Sequence[tuple[str, Any, Any, FieldRule]], words: Mapping[str, Any]) -> str:
    return "\n".join([*_head(words), *(_row(*one, words) for one in listed)]) + "\n"


def _key_meanings(given: Mapping[str, str], names: list[str]) -> dict[str, str]:
    """Returns the meaning of each key that has one, under its whole name or, in a group, under its last part."""
    found = {name: given.get(name) or given.get(name.rpartition(".")[2]) for name in names}
    return {name: meaning for name, meaning in found.items() if meaning}


def _head(words: Mapping[str, Any]) -> list[str]:
    names = " | ".join(words[name] for name in ("option", "type", "default", "happens"))
    return [f"| {names} |", "| --- | --- | --- | --- |"]


def _meaning(name: str, rule: FieldRule, words: Mapping[str, Any]) -> str:
    switch = name.removesuffix("_configs")
    own = words["settings of"].format(name=switch) if switch != name and switch in REGISTRY else rule.meaning
    return str(words["meanings"].get(name, own))


def _shared_kinds(kind: type[Config]) -> tuple[type[Config], ...]:
    """Returns the groups of plain keys that stand in ``kind`` more than once; a table of each is enough."""
    found = Counter(inner for inner in _groups_of(kind) if not list(_groups_of(inner)))
    return tuple(inner for inner, times in found.items() if times > 1)


def _groups_of(kind: type[Config]) -> Iterator[type[Config]]:
    for inner in value_types(kind).values():
        if isinstance(inner, type) and issubclass(inner, Config):
            yield inner
            yield from _groups_of(inner)


def _keys_of(
    kind: type[Config], shared: Collection[type[Config]], prefix: str = ""
) -> Iterator[tuple[str, Any, Any, FieldRule]]:
    default = kind()
    for key, inner in value_types(kind).items():
        value = getattr(default, key)
        if isinstance(value, Config) and inner not in shared:
            yield from _keys_of(inner, shared, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", inner, value, kind.rule(key)


def _row(name: str, kind: Any, default: Any, rule: FieldRule, words: Mapping[str, Any]) -> str:
    shown = "" if isinstance(default, Config) else f"`{plain(default)!r}`"
    cells = [f"`{name}`", type_name(kind), shown, described(name, rule, words)]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def described(name: str, rule: FieldRule, words: Mapping[str, Any] = ENGLISH) -> str:
    """Returns the meaning of the option, and whether it is refused or without effect."""
    meaning = _meaning(name, rule, words)
    outcome = _outcome(rule, words)
    if not outcome or not meaning:
        return meaning or outcome
    return f"{meaning.removesuffix(words['end'].strip())}{words['end']}{outcome}"


def _outcome(rule: FieldRule, words: Mapping[str, Any]) -> str:
    reason = rule.no_meaning or rule.refused
    if reason is None:
        return ""
    return str(words[rule.outcome].format(reason=words["reasons"].get(reason, reason)))
