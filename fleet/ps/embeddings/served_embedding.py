"""ServedEmbedding: an ``nn.Embedding(sparse=True)`` whose rows are trained on the servers.

The module keeps its weight and its name. While it is connected, forward reads the rows from the servers, and so does
every other use of the weight (:mod:`fleet.ps.embeddings.served_weight`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fleet.common.outside_graphs import outside_graphs
from fleet.errors import ConfigError, UnsupportedOptionError
from fleet.ps.client.shards import Gradient
from fleet.ps.embeddings.embedding import scale_gradient
from fleet.ps.embeddings.jagged_ids import JaggedIds
from fleet.ps.embeddings.lookup import RowLookup
from fleet.ps.embeddings.row_sums import picked
from fleet.ps.embeddings.served_weight import WatchesWeight, as_plain, no_hook
from fleet.ps.table.ids import in_pieces
from fleet.ps.table.initializers import Initializer
from fleet.ps.table.layout import SparseTableConfig
from fleet.ps.table.rules import Rule


class ServedEmbedding(WatchesWeight, nn.Embedding):
    """Made of an ``nn.Embedding`` by :func:`serve_embeddings`."""

    lookup: RowLookup
    holds_rows = True
    fixed = frozenset((*nn.Embedding.__constants__, "weight"))
    scales: bool = False  # gradients count once per sample of the batch

    def table_config(self, rule: Rule, name: str) -> SparseTableConfig:
        """Returns the table of this module; rows start at 0 and worker 0 adds its initial weights."""
        return SparseTableConfig(name, self.embedding_dim, rule, initializer=Initializer("constant", 0.0, 0.0))

    def take_other_gradient(self) -> Gradient | None:
        """Returns the gradient that reached the weight outside the lookup, and forgets it; ``None`` without any."""
        with as_plain():
            found = self.weight.grad
            if found is None:
                return None
            self.weight.grad = None
        if found.layout is torch.strided:
            ids = torch.arange(self.num_embeddings)
            rows = found
        else:
            ids = found.coalesce().indices()[0]
            rows = found.coalesce().values()
        gradient = Gradient(ids.cpu().numpy(), np.ascontiguousarray(rows.to("cpu", torch.float32).numpy()))
        if self.lookup.keeps_shows:
            gradient.shows = np.zeros(len(gradient.ids), np.float32)
        return gradient

    def use_table(self, config: SparseTableConfig) -> None:
        """Attaches the module to its table, which ``sparse_table_configs`` may have changed.

        Raises:
            ConfigError: the table would give pulled rows other columns than the weight has.
        """
        own = self.table_config(config.rule, config.name)
        if config.initializer != own.initializer or (config.accessor is not None and config.accessor.pulls_counters):
            raise ConfigError(
                f"sparse_table_configs[{config.name!r}]: nn.Embedding has its own initial weights and pulls only "
                "weights. Omit initial_range and accessors that pull show and click, or use "
                "fleet.SparseEmbedding."
            )
        if config.bounds is not None and (config.bounds.has_limit or config.bounds.evict is not None):
            raise ConfigError(
                f"sparse_table_configs[{config.name!r}]: nn.Embedding has a fixed number of rows with initial weights "
                "of its own, which a row that comes back after its eviction would lack. Omit max_rows, max_bytes, "
                "evict and ttl_days, or use fleet.SparseEmbedding."
            )
        self.served_table = config.name
        self.lookup = self._new_lookup(keeps_shows=config.accessor is not None)
        self.scales = config.scale_gradient

    def _new_lookup(self, *, keeps_shows: bool = False) -> RowLookup:
        return RowLookup(self.lookup.label, keeps_shows=keeps_shows, skipped=self.padding_idx, in_weight=True)

    @outside_graphs
    def forward(self, input: Tensor) -> Tensor:
        """Returns the rows of ``input``."""
        lookup = self.lookup
        if lookup.source is None or self.takes_other_weight():
            return super().forward(input)
        with as_plain():
            weight = self.weight
            device = weight.device
        trained = weight.requires_grad
        if lookup.whole is not None and (lookup.bring is None or (trained and torch.is_grad_enabled())):
            if lookup.bring is not None:
                lookup.bring(False)
            found = self._read(lookup.whole if trained else lookup.whole.detach(), input).to(device)
            return self._scaled(found)
        ids = self.keys_of(input)
        rows, places = self.lookup.find(ids, device, trained=trained)
        places = places.view(input.shape)
        return self._scaled(picked(rows, places))

    def _scaled(self, found: Tensor) -> Tensor:
        return scale_gradient(found, len(found)) if self.scales and found.ndim > 1 else found

    def read_weight(self) -> Tensor | None:
        """Makes lookups read the weight itself, which then holds the rows that this worker trains.

        Returns ``lookup.whole``, which shares its memory; ``None`` where it cannot: the weight is not on the CPU.
        """
        with as_plain():
            values = self.weight.data
        if values.device.type != "cpu" or not values.is_contiguous():
            return None
        self.lookup.whole = values.requires_grad_()
        return self.lookup.whole

    def _read(self, rows: Tensor, input: Tensor) -> Tensor:
        padding = -1 if self.padding_idx is None else self.padding_idx
        try:
            return torch.embedding(rows, _on_host(input), padding, False, True)
        except IndexError:
            self.keys_of(input)  # says which
            raise

    def prefetch(self, input: Tensor) -> None:
        """Asks the servers for the rows of the next batch, as :meth:`fleet.SparseEmbedding.prefetch` does.

        It asks for nothing where the weight itself has the rows.
        """
        ids = self.keys_of(input)
        if self.lookup.whole is None:
            self.lookup.prefetch(ids)

    def keys_of(self, input: Tensor | JaggedIds) -> np.ndarray:
        """Returns the ids of ``input``, int64 [n]; raises IndexError for one that has no row."""
        values = input.values if isinstance(input, JaggedIds) else input
        ids: np.ndarray = np.ascontiguousarray(_on_host(values).numpy()).reshape(-1)
        # A negative id is a large one here.
        if len(ids) and int(np.maximum.reduce(ids.view(np.uint64))) >= self.num_embeddings:
            raise IndexError(
                f"embedding ids range from {ids.min()} to {ids.max()}; there are {self.num_embeddings} rows"
            )
        return ids

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        whole = self.lookup.whole
        if whole is None:
            super()._load_from_state_dict(*args, **kwargs)
            return
        with as_plain():
            kept, self.weight.data = self.weight.data, self.weight.data.clone()
            try:
                super()._load_from_state_dict(*args, **kwargs)  # which changes no row that is trained
            finally:
                self.weight.data = kept

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # A copy has the rows in its weight, and is changed and averaged as in plain torch.
        self.lookup = self._new_lookup(keeps_shows=self.lookup.keeps_shows)

    def initial_rows(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns ids and weights in pieces, to be added to the table."""
        weight = self.weight.detach().to("cpu", torch.float32).numpy()
        return [(ids, weight[ids]) for ids in in_pieces(len(weight))]

    def refresh(self) -> None:
        """Copies the servers' rows into the weight, invisibly to autograd."""
        lookup = self.lookup
        source = lookup.source
        whole = lookup.whole
        if source is None:
            return
        with as_plain():
            weight = self.weight.data
        if whole is not None:
            if lookup.bring is not None:
                lookup.bring(True)
            if weight.data_ptr() != whole.data_ptr():  # it was moved
                weight.copy_(whole.detach())
            return
        for ids in in_pieces(self.num_embeddings):
            weight[ids[0] : ids[-1] + 1] = torch.from_numpy(source.rows(ids)).to(weight)


def check_embeddings(model: nn.Module) -> None:
    """Raises ConfigError when a module with sparse gradients cannot be served from a table."""
    used: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in used and _is_sparse(model.get_submodule(used[id(parameter)].rpartition(".")[0])):
            raise ConfigError(
                f"{used[id(parameter)]} and {name} are the same parameter, and the first is served from a table of "
                "sparse rows. Use nn.Embedding(sparse=False) for weights that other modules use, and leave them out of "
                "a_sync_configs['sparse_modules'] and ['unbounded_modules']."
            )
        used.setdefault(id(parameter), name)
    for name, module in model.named_modules():
        if not _is_sparse(module) and not isinstance(module, WatchesWeight):
            continue
        if _has_hooks_of_the_script(module.weight):
            raise UnsupportedOptionError(no_hook(f"{type(module).__name__} {name!r}"))
        if isinstance(module, WatchesWeight) and not _is_sparse(module):
            continue
        if type(module) not in (nn.Embedding, ServedEmbedding):
            raise UnsupportedOptionError(
                f"{name}: {type(module).__name__}(sparse=True) has no table on the servers. Use "
                "nn.Embedding(sparse=True), or fleet.SparseEmbedding(dim, combiner=...)."
            )
        if module.max_norm is not None or module.scale_grad_by_freq:
            raise UnsupportedOptionError(
                f"{name}: max_norm and scale_grad_by_freq cannot be honoured for rows on the servers. Omit them."
            )
        if module.weight.dtype is not torch.float32:
            raise UnsupportedOptionError(f"{name}.weight is {module.weight.dtype}; tables hold float32.")


def serve_embeddings(model: nn.Module) -> None:
    """Makes every ``nn.Embedding(sparse=True)`` of ``model`` a :class:`ServedEmbedding`, in place."""
    for name, module in model.named_modules():
        if type(module) is nn.Embedding and module.sparse:
            module.__class__ = ServedEmbedding
            served: ServedEmbedding = module  # type: ignore[assignment]
            served.lookup = RowLookup(f"nn.Embedding {name!r}", skipped=module.padding_idx, in_weight=True)
            served.watch_weight()


def has_rows(model: nn.Module) -> bool:
    """Returns whether ``model`` has embeddings whose rows are on servers once it trains with them."""
    return any(_is_sparse(m) or isinstance(getattr(m, "lookup", None), RowLookup) for m in model.modules())


def _has_hooks_of_the_script(weight: Tensor) -> bool:
    hooks = [*(weight._backward_hooks or {}).values(), *(weight._post_accumulate_grad_hooks or {}).values()]
    return any(not (getattr(hook, "func", hook).__module__ or "").startswith("fleet.") for hook in hooks)


def _on_host(ids: Tensor) -> Tensor:
    """Returns ``ids`` as int64 on the CPU, themselves where they are so already."""
    return ids if ids.dtype is torch.int64 and ids.is_cpu else ids.detach().to("cpu", torch.int64)


def _is_sparse(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
