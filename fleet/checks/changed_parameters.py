"""ChangedParameters: parameters that are added, removed, frozen or unfrozen change on all workers alike."""

from __future__ import annotations

from fleet.checks.comparison import first_difference, listed_ranks
from fleet.checks.watched import ModelWatch, Watched
from fleet.errors import ConfigError
from fleet.job.listener import Listener
from fleet.job.wrapped_model import WrappedModel
from fleet.strategies._shared.experts import is_expert
from fleet.strategies._shared.parts import is_part


class ChangedParameters(Listener):
    """Looks before each forward at the structure of the models in ``watched``."""

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._job = watched.job

    def before_forward(self, model: WrappedModel) -> None:
        """Follows a changed structure; raises ConfigError where it has changed on some workers only."""
        watch = self._watched.recording(model)
        if watch is None:
            return
        watch.check_kinds()
        if watch.has_changed(self._watched.registered):
            self._follow(watch)

    def _follow(self, watch: ModelWatch) -> None:
        before = watch.named
        trained = watch.trained_names
        watch.note_parameters(self._watched.registered)
        now = watch.trained_names
        added = [name for name, p in watch.named.items() if before.get(name) is not p]
        if any(is_part(p) for p in before.values()):  # its object may change, but it remains a shard
            added = [name for name in added if name not in before or not is_part(watch.named[name])]
        if not added and now == trained and before.keys() == watch.named.keys():
            return
        # Frozen and unfrozen again is no change: the workers compare with the parameters that they last agreed on.
        if self._watched.compares and now and (added or now != watch.exchanged):
            self._agree_on(watch, now)
            watch.exchanged = now
        came = {name: watch.named[name] for name in added}
        for listener in self._job.listeners.hearing["structure_changed"]:
            listener.structure_changed(watch.model, came)

    def _agree_on(self, watch: ModelWatch, names: set[str]) -> None:
        """Raises ConfigError unless the same parameters train on every worker from this forward on."""
        common = {name: p for name, p in watch.named.items() if name in names and not is_expert(p)}
        shapes = {name: list(p.shape) for name, p in common.items()}
        found = self._watched.gather(
            f"training with changed parameters of model {self._watched.number(watch)}", shapes, perhaps_alone=True
        )
        absent = [rank for rank, said in enumerate(found) if said is None]
        changed = sorted(names ^ watch.exchanged)[:4]
        if absent:
            raise ConfigError(
                f"Worker {self._job.global_rank} froze, unfroze or added parameters after distributed_model() "
                f"({', '.join(changed)}), and {listed_ranks(absent)} did not. Do it on every worker, before the same "
                "forward."
            ) from self._watched.absence
        rows = [{name: tuple(shape) for name, shape in said.items()} for said in found]
        if name := first_difference(rows):
            trains = [rank for rank, row in enumerate(rows) if name in row]
            raise ConfigError(
                f"{name!r} trains on {listed_ranks(trains)} with shape {list(rows[trains[0]][name])}, and differs on "
                "the others. Freeze, unfreeze and add the same parameters on every worker, before the same forward."
            )
