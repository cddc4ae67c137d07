"""Which device each worker of this node gets, how many workers there are, and the process-group backend.

``--gpus`` and ``--devices`` name cards of the machine (absolute numbers). ``FLAGS_selected_gpus`` is the index among
the cards that CUDA_VISIBLE_DEVICES leaves visible, because that is how torch counts.
"""

from __future__ import annotations

from collections.abc import Sequence

from fleet.errors import ConfigError, UnsupportedOptionError, did_you_mean
from fleet.launch.cli.settings import Settings
from fleet.launch.plan.local_machine import Card, Machine
from fleet.launch.plan.records import Processes

_BACKENDS = ("auto", "gloo", "nccl")
_OTHER_BACKENDS = ("bkcl", "heter", "xccl", "flagcx", "hccl", "mpi", "ucc")


def choose_devices(settings: Settings, machine: Machine) -> Processes:
    """Returns the number of workers and their devices; raises ConfigError for a card that is absent or hidden."""
    for name in ("npus", "xpus"):
        if settings.has(name):
            raise UnsupportedOptionError(
                f"--{name}={settings.text(name)} cannot be honoured: this project runs on GPUs"
                " and CPUs and has no such backend. Use --gpus, or omit it."
            )
    visible = settings.visible_devices
    usable = [] if machine.driver_problem else machine.visible_cards(visible)
    requested = _requested(settings)
    asked = _asked_workers(settings, machine, len(usable))
    if settings.text("nproc_per_node") == "cpu":
        if requested is not None:
            raise ConfigError(
                f"{settings.named('nproc_per_node')}=cpu and {_device_flag(settings)} exclude each other."
                " Omit one of them."
            )
        return _on_cpu(settings, asked or 1)
    if requested is None:
        return _without_request(settings, machine, usable, asked)
    if machine.num_gpus == 0:
        other = asked is not None and asked != len(requested)
        named = f" {settings.named('nproc_per_node')} gives their number, {asked}." if other else ""
        settings.warn(
            f"{_device_flag(settings)}: this machine has no GPU; the workers run on the CPU, with gloo."
            f"{named}{_not_a_count(settings, requested)}"
        )
        return _on_cpu(settings, asked or len(requested), requested)
    cards = _find(settings, machine, requested, usable, visible)
    if hint := _not_a_count(settings, requested):
        settings.warn(f"{_device_flag(settings)} starts one worker, on card {requested[0]}.{hint}")
    return _on_gpus(settings, cards, asked, joined=True)


def _without_request(settings: Settings, machine: Machine, usable: list[Card], asked: int | None) -> Processes:
    if usable:
        return _on_gpus(settings, usable, asked, joined=False)
    if machine.driver_problem:
        settings.warn(f"The job runs on the CPU: {machine.driver_problem}.")
    return _on_cpu(settings, asked or 1)


def _device_flag(settings: Settings) -> str:
    name = "gpus" if settings.has("gpus") else "devices"
    return f"{settings.named(name)}={settings.text(name)}"


def _not_a_count(settings: Settings, requested: Sequence[int]) -> str:
    """Returns a hint when the one number that was given may be meant as a number of cards; else an empty text."""
    count = requested[0]
    if len(requested) > 1 or count < 2 or settings.has("nproc_per_node"):
        return ""
    name = "gpus" if settings.has("gpus") else "devices"
    return f" --{name} takes card numbers, not how many: for {count} workers write --nproc_per_node={count}" + (
        f", or --{name}={','.join(map(str, range(count)))}." if count <= 16 else "."
    )


def _requested(settings: Settings) -> list[int] | None:
    lists = [_numbers(settings, name) for name in ("gpus", "devices") if settings.has(name)]
    if not lists:
        return None
    if any(other != lists[0] for other in lists):
        if "gpus" in settings.on_command_line and "devices" not in settings.on_command_line:
            settings.drop("devices", "--gpus on the command line wins")
            return lists[0]
        raise ConfigError(
            f"--gpus={settings.text('gpus')} and --devices={settings.text('devices')} name different "
            "cards. Use one of them."
        )
    return lists[0]


def _numbers(settings: Settings, name: str) -> list[int]:
    text = settings.text(name) or ""
    parts = [part.strip() for part in text.split(",")]
    rule = f"{settings.named(name)} is {text!r}; it takes card numbers separated by commas, as in 0,1."
    if not all(part.isdecimal() for part in parts):
        raise ConfigError(rule)
    numbers = [int(part) for part in parts]
    if len(set(numbers)) != len(numbers):
        raise ConfigError(f"{rule} A card stands there twice; to share cards raise --nproc_per_node instead.")
    return numbers


def _asked_workers(settings: Settings, machine: Machine, num_usable: int) -> int | None:
    """Returns the number of workers ``--nproc_per_node`` asks for, or None for one per device."""
    text = settings.text("nproc_per_node")
    source = settings.named("nproc_per_node")
    if text is None:
        return None
    if text.isdecimal() and int(text) > 0:
        return int(text)
    if text == "cpu":
        return machine.num_cpus
    if text == "auto":
        return None if num_usable or _requested(settings) is not None else machine.num_cpus
    if text == "gpu":
        if not num_usable:
            reason = machine.driver_problem or (
                "CUDA_VISIBLE_DEVICES hides every GPU" if machine.num_gpus else "this machine has no GPU"
            )
            raise ConfigError(f"{source} is 'gpu', but {reason}. Use --nproc_per_node auto or a number.")
        return None
    raise ConfigError(
        f"{source} is {text!r}; it takes a number from 1, auto, gpu or cpu.{did_you_mean(text, ('auto', 'gpu', 'cpu'))}"
    )


def _find(
    settings: Settings, machine: Machine, requested: list[int], usable: list[Card], visible: str | None
) -> list[Card]:
    flag = _device_flag(settings)
    if machine.driver_problem:
        raise ConfigError(
            f"{flag} cannot be honoured: {machine.driver_problem}. Repair that, or omit the flag to run on the CPU."
        )
    by_name = {card.name: card for card in usable}
    if any(not card.name.isdecimal() for card in usable):
        raise ConfigError(
            f"{flag} counts the cards of the machine, but CUDA_VISIBLE_DEVICES is {visible!r}, which "
            "names them by identifier. Omit the flag to use exactly these cards."
        )
    for number in requested:
        if number >= machine.num_gpus:
            raise ConfigError(
                f"{flag}: card {number} does not exist; this machine has {machine.num_gpus}, numbered "
                f"from 0 to {machine.num_gpus - 1}.{_not_a_count(settings, requested)}"
            )
        if f"{number}" not in by_name:
            raise ConfigError(
                f"{flag}: card {number} is hidden by CUDA_VISIBLE_DEVICES={visible!r}. Name visible "
                "cards, or change that variable; the numbers are those of the machine."
            )
    return [by_name[f"{number}"] for number in requested]


def _on_gpus(settings: Settings, cards: list[Card], asked: int | None, *, joined: bool) -> Processes:
    count = asked or len(cards)
    shared = count > len(cards)
    backend = _backend(settings)
    if shared and backend == "nccl":
        raise ConfigError(
            f"--backend=nccl needs a GPU for each process, and {count} processes share {len(cards)}. "
            "Use --backend=gloo, or lower --nproc_per_node."
        )
    if shared:
        settings.warn(
            f"{settings.named('nproc_per_node')}={count} is more than the {len(cards)} GPUs in use; the "
            "processes share them in turn, with gloo because nccl needs a GPU for each process."
        )
    if joined and len(cards) > count > 1:
        settings.warn(
            f"{_device_flag(settings)} names {len(cards)} cards for {count} processes; only the first {count} are used."
        )
    if joined and count == 1:
        selected: tuple[str, ...] = (",".join(f"{card.index}" for card in cards),)
    else:
        selected = tuple(f"{cards[i % len(cards)].index}" for i in range(count))
    return Processes(
        device_type="gpu",
        num_workers=count,
        device_names=tuple(card.name for card in cards),
        worker_devices=selected,
        process_group_backend="gloo" if shared or backend == "gloo" else "nccl",
    )


def _on_cpu(settings: Settings, count: int, numbers: Sequence[int] = ()) -> Processes:
    """Returns CPU workers; ``numbers`` are the cards asked for on a machine without any, still handed on by number."""
    if _backend(settings) == "nccl":
        raise ConfigError(
            f"{settings.named('backend')}=nccl needs GPUs, and this job runs on the CPU. Use --backend=gloo or omit it."
        )
    selected = tuple(f"{numbers[i % len(numbers)]}" for i in range(count)) if numbers else ()
    return Processes(device_type="cpu", num_workers=count, worker_devices=selected)


def _backend(settings: Settings) -> str:
    name = settings.text("backend") or "auto"
    if name in _OTHER_BACKENDS:
        raise UnsupportedOptionError(
            f"{settings.named('backend')}={name} cannot be honoured: processes talk over nccl "
            "(GPU) or gloo (CPU) here. Use auto, gloo or nccl."
        )
    if name not in _BACKENDS:
        raise ConfigError(
            f"{settings.named('backend')} is {name!r}; it takes auto, gloo or nccl.{did_you_mean(name, _BACKENDS)}"
        )
    return name
