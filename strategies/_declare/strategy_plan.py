"""The plan: the strategies in their order, or the reason why they cannot run together. It never drops one.

``plan`` is a pure function of the options and the number of workers; every rank computes the same order because
nothing here iterates over a set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter

from fleet.errors import ConfigError, StrategyConflictError, UnsupportedOptionError
from fleet.strategies._declare.fields import Config, Values, default_of
from fleet.strategies._declare.strategy import GROUPS, REGISTRY, JobKind, Strategy

_IN_PS_JOB = "this is a parameter-server job, and the option belongs to collective training"


@dataclass(frozen=True)
class Plan:
    """The strategies in order of application, the remarks for the user, and the number of workers."""

    steps: tuple[type[Strategy], ...]
    notes: tuple[str, ...]
    world_size: int

    def __str__(self) -> str:
        """Returns ``recompute -> data_parallel -> amp``, or ``nothing to apply``."""
        return " -> ".join(step.name for step in self.steps) or "nothing to apply"


def plan(options: Values, world_size: int, *, collective: bool = True) -> Plan:
    """Orders the enabled strategies, or raises before anything is started.

    Args:
        options: the options; ``options[name]`` gives each value.
        world_size: the number of workers.
        collective: False for a parameter-server job, where no collective strategy is added by itself.

    Raises:
        StrategyConflictError: two chosen strategies exclude each other.
        ConfigError: a chosen strategy cannot run with these options or this many workers.
    """
    found = problems(options, world_size, collective=collective)
    if found:
        raise found[0]
    steps = ordered(chosen_strategies(options, world_size, collective=collective))
    return Plan(steps, tuple(remarks(options, steps, world_size, collective=collective)), world_size)


def remarks(options: Values, steps: Sequence[type[Strategy]], world_size: int, *, collective: bool = True) -> list[str]:
    """Returns remarks for the user: settings that change nothing with this plan, each with its reason."""
    names = [step.name for step in steps]
    found = [note for step in steps for note in step.notes(options, world_size)]
    if collective:
        found += [note for group in GROUPS for note in group.notes(options, world_size)]
    else:
        # Options that the strategy of this kind of job reads: its own notes speak of them.
        read = {key for step in steps if issubclass(step, JobKind) for key in step.reads}
        unread = [
            key
            for group in GROUPS
            if not group.in_ps_job
            for key in group.key_names()
            if key not in read and options.is_set(key)
        ]
        found += [f"{key} was set and changes nothing: {_IN_PS_JOB}." for key in unread]
    for name, strategy in REGISTRY.items():
        if name in names:
            continue
        unused = [key for key in settings_of(strategy) if options.is_set(key)]
        elsewhere = foreign(strategy, collective=collective)
        is_kind = issubclass(strategy, JobKind)
        standing_in = [step for step in steps if name in step.replaces(options)]
        if elsewhere is not None:
            switched = (strategy.default or not is_kind and _is_on(strategy, options)) and options.is_set(name)
            unused = [name, *unused] if switched else unused
            why = elsewhere
        elif is_kind or (standing_in and strategy.chosen(options)):
            # With one worker there is nothing to exchange, and every script that runs alone would be told so.
            honoured = [key for step in standing_in for key in step.replaces(options)[name]]
            unused = [key for key in unused if standing_in and key not in honoured]
            why = f"'{standing_in[0].name}' takes the place of {name}" if standing_in else ""
        else:
            why = f"'{name}' is off"
            unused = [] if strategy.Config is not None and strategy.Config.read_by_models else unused
        found += [f"{key} was set and changes nothing: {why}." for key in unused]
    return found


def _is_on(strategy: type[Strategy], options: Values) -> bool:
    """Returns whether the user turned ``strategy`` on by the option of its name."""
    return bool(strategy.chosen(options) if strategy.default is None else options[strategy.name])


def settings_of(strategy: type[Strategy]) -> list[str]:
    """Returns the top-level options that only ``strategy`` reads, apart from its switch and those without meaning."""
    keys = [f"{strategy.name}_configs"] if strategy.Config is not None else []
    groups = [group for group in GROUPS if group.owner == strategy.name]
    return keys + [key for group in groups for key in group.key_names() if not group.rule(key).no_meaning]


def foreign(strategy: type[Strategy], *, collective: bool) -> str | None:
    """Returns why ``strategy`` takes no part in this kind of job, or ``None`` when it does."""
    if collective and strategy.in_ps_job and issubclass(strategy, JobKind):
        return "this is a collective job, and the option belongs to the parameter server"
    if not collective and not strategy.in_ps_job:
        return _IN_PS_JOB
    return None


def chosen_strategies(options: Values, world_size: int, *, collective: bool) -> list[type[Strategy]]:
    """Returns the strategies that the options switch on, and the job kind's, by stage and name.

    A collective job of one worker exchanges with nobody and has no strategy of its kind.
    """
    able = [s for s in REGISTRY.values() if foreign(s, collective=collective) is None]
    chosen = [strategy for strategy in able if not issubclass(strategy, JobKind) and strategy.chosen(options)]
    replaced = {name for strategy in chosen for name in strategy.replaces(options)}
    chosen = [strategy for strategy in chosen if strategy.name not in replaced]
    if world_size > 1 or not collective:
        chosen += [s for s in able if issubclass(s, JobKind) and s.name not in replaced]
    return sorted(chosen, key=lambda s: (s.stage, s.name))


def problems(options: Values, world_size: int, *, collective: bool = True) -> list[ConfigError]:
    """Returns every reason why the options cannot run on ``world_size`` workers; an empty list when they can.

    Conflicts and wrong combinations, which the user can repair, come before options that cannot be honoured.
    """
    chosen = chosen_strategies(options, world_size, collective=collective)
    found: list[ConfigError] = [*conflicts_among(chosen)]
    rules: list[type[Strategy] | type[Config]] = [*chosen, *(GROUPS if collective else ())]
    for rule in rules:
        try:
            reason = rule.problem(options, world_size)
        except UnsupportedOptionError as error:
            found.append(error)
        else:
            found += [] if reason is None else [ConfigError(reason)]
    for strategy in chosen:
        if strategy.refused is not None:
            found.append(UnsupportedOptionError(f"'{strategy.name}' cannot be honoured: {strategy.refused}."))
    return found + refused_settings(options, chosen)


def conflicts_among(chosen: Sequence[type[Strategy]]) -> list[StrategyConflictError]:
    """Returns an error for every pair of ``chosen`` that excludes each other."""
    names = [strategy.name for strategy in chosen]
    return [
        StrategyConflictError(strategy.name, other, reason)
        for strategy in chosen
        for other, reason in strategy.conflicts.items()
        if other in names
    ]


def refused_settings(options: Values, chosen: Sequence[type[Strategy]]) -> list[ConfigError]:
    """Returns an error for every setting that cannot be honoured and does not hold its default."""
    found: list[ConfigError] = []
    for group in GROUPS:
        default = default_of(group)
        for key in group.key_names():
            found += _refused(group, key, options[key], getattr(default, key))
    for strategy in chosen:
        if strategy.Config is not None:
            config = options[f"{strategy.name}_configs"]
            default = default_of(strategy.Config)
            for key in config.key_names():
                found += _refused(strategy.Config, key, getattr(config, key), getattr(default, key))
    return found


def _refused(owner: type[Config], key: str, value: object, default: object) -> list[ConfigError]:
    rule = owner.rule(key)
    if isinstance(value, Config):
        return [
            error
            for inner in value.key_names()
            for error in _refused(type(value), inner, getattr(value, inner), getattr(default, inner))
        ]
    if rule.refused is None or value == default:
        return []
    return [UnsupportedOptionError(f"{owner.label(key)} = {value!r} cannot be honoured: {rule.refused}.")]


def ordered(chosen: Sequence[type[Strategy]]) -> tuple[type[Strategy], ...]:
    """Returns ``chosen`` by stage, inside a stage by ``after``, otherwise by name."""
    # Sorted input and lists, no sets: every rank must come to the same order.
    names = [strategy.name for strategy in chosen]
    before = {
        strategy.name: [
            other.name
            for other in chosen
            if other.stage < strategy.stage or (other.stage == strategy.stage and other.name in strategy.after)
        ]
        for strategy in chosen
    }
    order = list(TopologicalSorter(before).static_order()) if names else []
    return tuple(REGISTRY[name] for name in order)
