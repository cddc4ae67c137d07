"""Options that ask for something this package does not do: refused with the reason when they are turned on."""

from __future__ import annotations

from dataclasses import dataclass

from fleet.strategies._declare.fields import Config, setting
from fleet.strategies._declare.strategy import top_level

_PLANNER = "there is no planner of parallelism here; name the degrees in hybrid_configs, or use DTensor"
_FEDERATED = "federated training with a coordinator process is not offered"


@top_level
@dataclass(frozen=True, kw_only=True)
class SettingsNotOffered(Config):
    """Each can be read and set to its default; any other value is refused."""

    semi_auto: bool = setting(False, "Plan parallelism from annotations.", refused=_PLANNER)
    auto_search: bool = setting(False, "Search for the best parallelism.", refused=_PLANNER)
    heter_ccl_mode: bool = setting(
        False,
        "Train on accelerators of different vendors together.",
        refused="torch has no bridge between the communication libraries of different vendors",
    )
    is_fl_ps_mode: bool = setting(False, "Federated training on parameter servers.", refused=_FEDERATED)
    with_coordinator: bool = setting(False, "Start a coordinator process for federated training.", refused=_FEDERATED)
