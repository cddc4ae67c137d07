"""Embeddings of a plain model that a strategy names: rows of ``nn.Embedding(sparse=True)``, or tables of any 64-bit id.

Module and parameter stay the same objects: the model's code, its lists of parameters and the optimizer need no
change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from fleet.errors import CheckpointError, UnsupportedOptionError
from fleet.ps.embeddings.embedding import SparseEmbedding
from fleet.ps.embeddings.served_embedding import ServedEmbedding, check_embeddings

_SPARSE = "a_sync_configs['sparse_modules']"
_UNBOUNDED = "a_sync_configs['unbounded_modules']"
Named = Mapping[str, nn.Module]


class UnboundedEmbedding(SparseEmbedding, nn.Embedding):
    """Made of an ``nn.Embedding`` by :func:`serve_named`; ``num_embeddings`` is the script's number, and no bound."""

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        given = state_dict.get(f"{prefix}weight")
        if given is not None and len(given):
            raise CheckpointError(
                f"load_state_dict(): {prefix}weight has {len(given)} rows, and {_UNBOUNDED} made its module a table, "
                f"whose rows begin with values of its own. Leave the entry out, or name the module in {_SPARSE}, which "
                "keeps its rows."
            )
        super()._load_from_state_dict(state_dict, prefix, *args)


def check_named(model: nn.Module, sparse: Named, unbounded: Named) -> None:
    """Raises ConfigError for an embedding of ``model`` that cannot be served, or not as its option says."""
    for option, named, made in ((_SPARSE, sparse, ServedEmbedding), (_UNBOUNDED, unbounded, UnboundedEmbedding)):
        for name, module in named.items():
            if type(module) is made:  # by a wrap before
                continue
            reason = _reason(model, module) or (_reason_unbounded(model, module) if named is unbounded else None)
            if name in sparse and name in unbounded:
                reason = f"so does {_UNBOUNDED}"
            if reason is not None:
                raise UnsupportedOptionError(f"{option} names {name!r}: {reason}. Write patterns that leave it out.")
    plain = [m for m in (*sparse.values(), *unbounded.values()) if type(m) is nn.Embedding and not m.sparse]
    try:
        for module in plain:
            module.sparse = True
        check_embeddings(model)
    finally:
        for module in plain:
            module.sparse = False


def _reason(model: nn.Module, module: nn.Module) -> str | None:
    if type(module) is not nn.Embedding:
        there = [name for name, one in model.named_modules() if type(one) is nn.Embedding]
        return (
            f"its class is {type(module).__name__}, and rows on servers take the place of nn.Embedding alone (here "
            f"{', '.join(there[:4]) or 'nowhere'}{', ...' if there[4:] else ''})"
        )
    if module._parameters.get("weight") is None:
        return "its weight is computed from other parameters, as by pruning or a parametrization"
    if module.max_norm is not None or module.scale_grad_by_freq:
        return "max_norm and scale_grad_by_freq cannot be honoured for rows on servers"
    return None


def _reason_unbounded(model: nn.Module, module: nn.Module) -> str | None:
    weight, padding = module.get_parameter("weight"), getattr(module, "padding_idx", None)
    names = [name for name, one in model.named_parameters(remove_duplicate=False) if one is weight]
    if len(names) > 1:
        return f"its weight is that of {' and '.join(names)}, and it would be empty"
    if not weight.requires_grad:
        return "its weight is frozen, and a table of any id begins with rows of its own"
    if padding is not None and bool(weight[padding].any()):
        return f"the row of its padding_idx {padding} is not zero, and a table of any id reads zeros there"
    return None


def serve_named(sparse: Named, unbounded: Named) -> None:
    """Makes the modules, in place, what :func:`check_named` found that they can be.

    ``serve_embeddings`` comes next.
    """
    for module in sparse.values():
        if type(module) is nn.Embedding:
            module.sparse = True
    for module in unbounded.values():
        if type(module) is nn.Embedding:
            _unbind(module)


def _unbind(module: nn.Embedding) -> None:
    made = SparseEmbedding(module.embedding_dim, padding_idx=module.padding_idx)
    weight = module.weight
    weight.data = made.weight.data.to(weight.device)
    weight.grad = None
    setattr(weight, SparseEmbedding.MARK, True)
    own = {name: value for name, value in vars(made).items() if name not in vars(nn.Module())}
    module.__class__ = UnboundedEmbedding
    unbounded: UnboundedEmbedding = module  # type: ignore[assignment]
    unbounded.__dict__.update(own, sparse=False)
    unbounded.watch_weight()
