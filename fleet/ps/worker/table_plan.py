"""TablePlan: the tables of a job, derived from model and optimizer in the same way on every worker and server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fleet.errors import ConfigError
from fleet.ps.client.merge import merge_gradients
from fleet.ps.client.shards import Gradient, Rows
from fleet.ps.embeddings.embedding import SparseEmbedding
from fleet.ps.embeddings.served_embedding import ServedEmbedding
from fleet.ps.embeddings.served_weight import as_plain
from fleet.ps.table.dense_table import DenseTableConfig
from fleet.ps.table.layout import SparseTableConfig
from fleet.ps.table.rules import LEARNING_RATE, Rule
from fleet.ps.worker.dense_part import DensePart, DenseWatch, GroupPlace, MaskOf
from fleet.ps.worker.optimizer_rules import rule_of_group
from fleet.ps.worker.untrained import Untrained

Configure = Callable[[SparseTableConfig], SparseTableConfig]
FLAT = "dense"


@dataclass
class SparsePart:
    """One sparse table and the modules that read it.

    ``place`` is the optimizer group that trains it, if any; ``follows`` says, for the embed column and for the others,
    whether their learning rate is the optimizer's.
    """

    table_id: int
    config: SparseTableConfig
    modules: list[SparseEmbedding | ServedEmbedding]
    place: GroupPlace | None
    follows: tuple[bool, bool] = (True, True)

    @property
    def group(self) -> dict[str, Any] | None:
        """The optimizer group as it is now."""
        return None if self.place is None else self.place.read()

    def rate(self) -> float | None:
        """Returns the learning rate that the table must have now; ``None`` where it keeps its initial one.

        Raises:
            ConfigError: the optimizer's rate has changed, but only some columns follow it.
        """
        if self.place is None or not any(self.follows):
            return None
        rate = float(self.place.read()["lr"])
        if all(self.follows):
            return rate
        if rate != float(self.place.read().get("initial_lr", rate)):
            raise ConfigError(
                f"table {self.config.name!r}: the learning rate of the optimizer has become {rate!r}, but "
                "sparse_table_configs gives one of embed and embedx its own rate. Give both a rate, or neither."
            )
        return None


@dataclass
class TablePlan:
    """Every table of a job; ids count sparse tables first, both in the order of model and groups.

    ``mask_of`` returns which elements of a parameter this worker keeps at zero, as asp does; ``None`` for none.
    ``gathered`` counts the rows whose gradients were gathered.
    """

    sparse: list[SparsePart] = field(default_factory=list)
    dense: list[DensePart] = field(default_factory=list)
    optimizer: Optimizer | None = None
    planned: dict[int, dict[str, Any]] = field(default_factory=dict)  # of the groups whose rules servers have
    mask_of: MaskOf | None = None
    models: Sequence[nn.Module] = ()
    gathered: int = field(default=0, init=False, compare=False)
    _watched_key: list[int] | None = field(default=None, init=False, repr=False, compare=False)
    _watched_found: Any = field(default=None, init=False, repr=False, compare=False)

    @property
    def dense_ids(self) -> dict[int, None]:
        """What a pull of all dense tables asks for."""
        return dict.fromkeys(part.table_id for part in self.dense)

    @cached_property
    def untrained(self) -> Untrained:
        """The buffers of the models, and their parameters that are in no table."""
        trained, rows = self._trained
        return Untrained(self.models, rows.union(trained))

    @cached_property
    def watch(self) -> DenseWatch:
        """Notices writes of a script into the dense parameters."""
        return DenseWatch(self.dense, self.mask_of)

    def check_trained(self) -> None:
        """Checks that every gradient has a table, and that the tables' rules are still those of the groups.

        Raises:
            ConfigError: a parameter has a gradient that no table takes, or is frozen while its table would still
                move it by momentum or decay; or a hyper-parameter of a group has changed since the start.
        """
        self._check_groups()
        others, moved = self._watched()
        for parameter in others:
            if parameter.grad is not None and parameter.numel():
                raise ConfigError(
                    f"a parameter of shape {tuple(parameter.shape)} has a gradient and no table: it was frozen, or "
                    "not in the optimizer, when the tables were made. Unfreeze and add parameters before "
                    "fleet.init_worker(); one that is to train later begins in a group with the learning rate 0."
                )
        for parameter, part in moved:
            if not parameter.requires_grad:
                number = next(i for i, own in enumerate(part.parameters) if own is parameter)
                raise ConfigError(
                    f"{part.name_of(number)} was frozen after the tables were made, but the rule "
                    f"{part.config.rule.name!r} would keep moving it. Freeze it before fleet.init_worker(), or give it "
                    "a group of its own there, leave requires_grad True, and set the group's learning rate to 0."
                )

    def _watched(self) -> tuple[list[nn.Parameter], list[tuple[nn.Parameter, DensePart]]]:
        """Returns the optimizer's parameters without a table, and those that a table moves without a gradient."""
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        held = [parameter for group in groups for parameter in group["params"]]
        key = list(map(id, held))
        if key != self._watched_key:
            known, rows = self._trained
            others = [p for p in held if id(p) not in known and id(p) not in rows]
            parts = [(p, known[id(p)]) for p in held if id(p) in known]
            moved = [(p, part) for p, part in parts if not part.config.adds_up and part.follows]
            self._watched_key = key
            self._watched_found = (others, moved)
        found: tuple[list[nn.Parameter], list[tuple[nn.Parameter, DensePart]]] = self._watched_found
        return found

    @property
    def parts(self) -> list[SparsePart | DensePart]:
        """All tables."""
        return [*self.sparse, *self.dense]

    def gather_gradients(self, dense: Sequence[DensePart] = ()) -> dict[int, Gradient | Rows]:
        """Returns the gradients that backward left for rows and for ``dense``, by table id.

        The modules of one table give one gradient. Lookups start anew, so that no gradient is gathered twice.

        Raises:
            ConfigError: see :meth:`check_trained`.
        """
        with as_plain():
            self.check_trained()
        gradients: dict[int, Gradient | Rows] = {}
        for table in self.sparse:
            each = [module.lookup.take() for module in table.modules]
            each += [m.take_other_gradient() for m in table.modules if isinstance(m, ServedEmbedding)]
            some = [gradient for gradient in each if gradient is not None]
            if some and table.place is not None:
                self.gathered += sum(len(gradient.ids) for gradient in some)
                keeps_shows = table.config.accessor is not None
                gradients[table.table_id] = some[0] if len(some) == 1 else merge_gradients(some, keeps_shows)
        for part in dense:
            values = part.gradients()
            if values is not None:
                gradients[part.table_id] = values
        return gradients

    @cached_property
    def modules(self) -> list[SparseEmbedding | ServedEmbedding]:
        """All modules that read sparse tables."""
        return [module for part in self.sparse for module in part.modules]

    def forget_gradients(self) -> None:
        """Drops the gradients of rows and dense parameters that no step has gathered."""
        for module in self.modules:
            module.forget_gradients()
        for part in self.dense:
            for parameter in part.parameters:
                parameter.grad = None

    def refresh_weights(self) -> None:
        """Copies the servers' rows into the weights of ``nn.Embedding`` modules."""
        for module in self.modules:
            if isinstance(module, ServedEmbedding):
                module.refresh()

    def not_finite(self, gradients: Mapping[int, Gradient | Rows]) -> str:
        """Returns a sentence that names the first NaN or Inf of ``gradients``, by table id; "" where all are finite."""
        names = {part.table_id: part.config.name for part in self.parts}
        for table_id, value in gradients.items():
            if isinstance(value, Gradient):
                bad = np.flatnonzero(~np.isfinite(value.rows).all(axis=1))
                what = f"key {value.ids[bad[0]]}" if len(bad) else ""
            else:
                bad = np.flatnonzero(~np.isfinite(value))
                what = f"element {bad[0]}" if len(bad) else ""
            if what:
                return f"the gradient of {what} of table {names[table_id]!r} is not finite ({len(bad)} in all)."
        return ""

    def shrinking(self, threshold: float | None) -> list[SparsePart]:
        """Returns the tables that a shrink acts on: those with a criterion, whose rows can be made again.

        Without an accessor the criterion is the number of pushes, if a threshold is given. Rows of ``nn.Embedding``
        stay: their initial weights could not be made again.

        Raises:
            ConfigError: there is no such table.
        """
        found = [
            part
            for part in self.sparse
            if part.config.accessor is not None
            or (threshold is not None and not any(isinstance(m, ServedEmbedding) for m in part.modules))
        ]
        if found:
            return found
        names = [part.config.name for part in self.sparse]
        rule = (
            "None takes what the accessors of the tables say, and no table has one. Give the least number of pushes "
            "of a row that stays, or use fleet.SparseEmbedding(accessor=fleet.ps.Accessor())."
            if threshold is None
            else "It deletes rows of fleet.SparseEmbedding, and of tables with an accessor; there is none."
        )
        raise ConfigError(f"fleet.shrink(threshold={threshold!r}): the sparse tables are {names}. {rule}")

    @cached_property
    def _trained(self) -> tuple[dict[int, DensePart], set[int]]:
        """The parts by id of their parameters, and the ids of the weights that stand for rows."""
        known = {id(p): part for part in self.dense for p in part.parameters}
        return known, {id(module.weight) for module in self.modules}

    def _check_groups(self) -> None:
        optimizer = self.optimizer
        if optimizer is None:
            return
        for number, planned in self.planned.items():
            group = optimizer.param_groups[number]
            if {name: group.get(name) for name in planned} == planned:
                continue
            now = _hyper_parameters(GroupPlace(optimizer, number))
            for name in planned:
                if now[name] != planned[name]:
                    raise ConfigError(
                        f"{name!r} of parameter group {number} has become {now[name]!r}, but the servers update with "
                        f"{planned[name]!r}, as it was at fleet.init_worker(). Only the learning rate may change while "
                        "training runs; schedulers that cycle the momentum take cycle_momentum=False."
                    )

    @property
    def configs(self) -> dict[int, SparseTableConfig | DenseTableConfig]:
        """The configuration of each table, by id."""
        sparse: dict[int, SparseTableConfig | DenseTableConfig] = {part.table_id: part.config for part in self.sparse}
        return sparse | {part.table_id: part.config for part in self.dense}

    def ids_of(self, names: Sequence[str], given: str = "var_names") -> list[int]:
        """Returns the ids of the sparse tables called ``names``; raises ConfigError for another name in ``given``."""
        known = {part.config.name: part.table_id for part in self.sparse}
        for name in names:
            if name not in known:
                raise ConfigError(f"{given}: {name!r} is not a sparse table of this model; those are {sorted(known)}.")
        return [known[name] for name in names]


def plan_tables(
    models: Iterable[nn.Module],
    optimizer: Optimizer,
    *,
    geo: bool = False,
    adam_d2sum: bool = False,
    dense_here: bool = False,
    mask_of: MaskOf | None = None,
    configure: Configure = lambda config: config,
) -> TablePlan:
    """Returns the tables for the modules and parameters that ``optimizer`` trains.

    Args:
        models: the users' modules, after :func:`fleet.ps.embeddings.served_embedding.serve_embeddings`.
        optimizer: the user's optimizer.
        geo: servers add differences, whatever the optimizer.
        adam_d2sum: dense tables use the rule of that name instead of Adam.
        dense_here: workers train the dense parameters, by any optimizer, and the servers have copies (hybrid).
        mask_of: see :class:`TablePlan`.
        configure: final changes to a sparse table, for ``sparse_table_configs``.

    Raises:
        ConfigError: two modules describe a table differently, or a parameter cannot be served.
    """
    places = {
        id(p): GroupPlace(optimizer, number)
        for number, group in enumerate(optimizer.param_groups)
        for p in group["params"]
    }
    models = list(models)
    plan = TablePlan(optimizer=optimizer, mask_of=mask_of, models=models)
    names = {id(p): name for model in models for name, p in model.named_parameters()}
    stands_for_rows = set()
    for name, module in _embeddings(models):
        stands_for_rows.add(id(module.weight))
        _add_sparse(plan, name, module, places.get(id(module.weight)), optimizer, geo, configure)
    for part in plan.sparse:
        for module in part.modules:
            module.use_table(part.config)
    for number, group in enumerate(optimizer.param_groups):
        parameters = [p for p in group["params"] if p.requires_grad and id(p) not in stands_for_rows and p.numel()]
        if any(id(p) in stands_for_rows for p in group["params"]) or (parameters and not dense_here):
            plan.planned[number] = _hyper_parameters(GroupPlace(optimizer, number))
        if not parameters:
            continue
        _check_parameters(parameters)
        rule = Rule("sum") if dense_here else _dense_rule(optimizer, group, geo, adam_d2sum)
        table_id = len(plan.sparse) + len(plan.dense)
        place = GroupPlace(optimizer, number)
        known = [names.get(id(p), "") for p in parameters]
        plan.dense.append(_dense_part(table_id, parameters, known, rule, place, not (dense_here or geo)))
    return plan


def _dense_part(
    table_id: int, parameters: list[nn.Parameter], names: list[str], rule: Rule, place: GroupPlace, follows: bool
) -> DensePart:
    shapes = tuple(tuple(p.shape) for p in parameters)
    size = sum(p.numel() for p in parameters)
    config = DenseTableConfig(f"{FLAT}.{place.number}", size, rule, shapes, tuple(names))
    shown = [name or f"parameter {at} of group {place.number}" for at, name in enumerate(names)]
    return DensePart(table_id, config, parameters, place, follows, shown)


def _hyper_parameters(place: GroupPlace) -> dict[str, Any]:
    """Returns the hyper-parameters of a group that make its rule, without the learning rate."""
    names = place.optimizer.defaults.keys() - {"lr", "foreach", "fused", "capturable", "differentiable"}
    group = place.read()
    return {name: _plain(group.get(name)) for name in sorted(names)}


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    return float(value) if isinstance(value, Tensor) else value


def _embeddings(models: Iterable[nn.Module]) -> list[tuple[str, SparseEmbedding | ServedEmbedding]]:
    found: dict[int, tuple[str, SparseEmbedding | ServedEmbedding]] = {}
    for model in models:
        for name, module in model.named_modules():
            if isinstance(module, SparseEmbedding | ServedEmbedding):
                found.setdefault(id(module), (name or "embedding", module))
    return list(found.values())


def _add_sparse(
    plan: TablePlan,
    name: str,
    module: SparseEmbedding | ServedEmbedding,
    place: GroupPlace | None,
    optimizer: Optimizer,
    geo: bool,
    configure: Configure,
) -> None:
    if module.weight.dtype is not torch.float32:
        raise ConfigError(
            f"{name}.weight is {module.weight.dtype}, and the servers' tables hold float32. Leave embeddings with rows "
            "on the servers in float32, or compute in bfloat16: strategy.amp = True."
        )
    if module.weight.requires_grad and place is None:
        raise ConfigError(
            f"the optimizer does not hold {name}.weight, which stands for the rows of the table. Create the optimizer "
            "with model.parameters(), or freeze the rows with requires_grad_(False)."
        )
    rule = Rule("sum") if geo else rule_of_group(optimizer, place.read()) if place is not None else Rule("sgd")
    config = configure(module.table_config(rule, name))
    if geo:
        _check_geo(config)
    for part in plan.sparse:
        if part.config.name == config.name:
            _check_shared(part, config, module, name, place)
            part.modules.append(module)
            part.place = part.place or place
            return
    follows = (False, False) if geo else _follows(module, name, rule, configure)
    plan.sparse.append(SparsePart(len(plan.sparse), config, [module], place, follows))


def _follows(
    module: SparseEmbedding | ServedEmbedding, name: str, rule: Rule, configure: Configure
) -> tuple[bool, bool]:
    """Returns whether the rates of the embed column and of the other columns follow the optimizer's."""
    other = rule[LEARNING_RATE] + 0.123456789
    config = configure(module.table_config(rule.with_learning_rate(other), name))
    return (config.embed_rule or config.rule).get(LEARNING_RATE) == other, config.rule.get(LEARNING_RATE) == other


def _check_shared(
    part: SparsePart,
    config: SparseTableConfig,
    module: SparseEmbedding | ServedEmbedding,
    name: str,
    place: GroupPlace | None,
) -> None:
    """Raises ConfigError unless ``module``, with this name in the model, may share the table ``part``."""
    asked = isinstance(module, SparseEmbedding) and module.name is not None
    if asked and None not in (place, part.place) and place != part.place:
        raise ConfigError(
            f"the table {config.name!r} is shared by modules in two parameter groups of the optimizer, but a "
            "table has one learning rate. Put their weights into one group."
        )
    differing = [f.name for f in fields(config) if getattr(config, f.name) != getattr(part.config, f.name)]
    if not asked or differing:
        why = f"describe it differently ({', '.join(differing)})" if differing else "did not ask to share it"
        raise ConfigError(
            f"{name} and another module have a table {config.name!r} but {why}. To share, give both the same "
            "SparseEmbedding(name=...) and arguments; otherwise other names."
        )


def _check_geo(config: SparseTableConfig) -> None:
    if config.bounds is not None and (config.bounds.has_limit or config.bounds.evict is not None):
        raise ConfigError(
            f"table {config.name!r}: max_rows, max_bytes and evict delete rows of the servers, but geo workers keep "
            "theirs and send differences: a row would come back with the last of them alone. Omit them, or train in "
            "async or sync mode."
        )
    if config.entry is not None or config.accessor is not None:
        raise ConfigError(
            f"table {config.name!r}: geo training exchanges differences of rows, which carry no counts for an entry "
            "policy or an accessor. Omit entry and accessor, or set k_steps to 0."
        )
    if config.rule.name != "sum":
        raise ConfigError(f"table {config.name!r}: geo training takes no rule for a table, got {config.rule.name!r}.")


def _dense_rule(optimizer: Optimizer, group: Mapping[str, Any], geo: bool, adam_d2sum: bool) -> Rule:
    rule = rule_of_group(optimizer, group)
    if geo:
        return Rule("sum")
    if adam_d2sum:
        if rule.name != "adam":
            raise ConfigError(
                f"adam_d2sum = True replaces Adam, but the optimizer is {type(optimizer).__name__}. Use "
                "torch.optim.Adam, or leave adam_d2sum False."
            )
        return Rule("adam_d2sum", {name: rule[name] for name in (LEARNING_RATE, "weight_decay")})
    return rule


def _check_parameters(parameters: Sequence[nn.Parameter]) -> None:
    for parameter in parameters:
        if parameter.dtype is not torch.float32:
            raise ConfigError(
                f"a parameter of shape {tuple(parameter.shape)} is {parameter.dtype}; tables hold float32. Train in "
                "float32."
            )
