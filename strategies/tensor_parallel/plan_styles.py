"""The words of a tensor-parallel plan: ``"column"``, ``"row"``, ``"column:3"``, ``"divide:n_heads"`` and others."""

from __future__ import annotations

from dataclasses import dataclass

from fleet.errors import ConfigError, did_you_mean

# Each style of a module, with its meaning.
STYLES = {
    "column": "the outputs of a linear layer are divided and stay so",
    "column_gather": "the outputs are divided, and gathered at once",
    "row": "the inputs of a linear layer are divided, and arrive so; the output is whole",
    "row_split": "the inputs are divided; they arrive whole and each worker takes its part",
    "vocab": "the rows of an embedding are divided; the result is whole",
    "sum": "the parameters are whole and used on a divided activation: their gradients are added up",
    "divide": "whole numbers that the module holds, as its count of heads, are divided",
    "own_random": "the module draws its random numbers, as of dropout, from 'model_parallel_rng'",
    "whole": "nothing is done",
}
# The words of Hugging Face's plans.
SYNONYMS = {
    "colwise": "column",
    "colwise_gather_output": "column_gather",
    "colwise_rep": "column_gather",
    "rowwise": "row",
    "rowwise_split_input": "row_split",
    "rowwise_rep": "row_split",
    "packed_colwise": "column:2",
    "packed_rowwise": "row:2",
    "embedding_rowwise": "vocab",
    "embedding_colwise": "column_gather",
    "replicated_with_grad_allreduce": "sum",
    "replicate": "whole",
}
_EXPERTS = "experts and their routers are divided by expert parallelism (ep_degree, fleet.moe), not by a plan"
_NOT_OFFERED = {
    "grouped_gemm": _EXPERTS,
    "ep_dispatch_experts": _EXPERTS,
    "ep_router": _EXPERTS,
    "moe_tp_experts": _EXPERTS,
    "moe_identity_expert": _EXPERTS,
    "gather": _EXPERTS,
    "local_params": "only layers whose shape is known to the plan are divided",
    "all_reduce": "it adds up what a module of unknown form returns",
    "mla_kv_a_proj": "a weight of which a part stays whole cannot be told from its shape",
    "sequence_parallel": "a plan divides weights; write fleet.utils.sequence_parallel_utils's layers for sequences",
}
LINEAR = ("column", "column_gather", "row", "row_split")


@dataclass(frozen=True)
class PlanStyle:
    """The style of a module in a plan.

    Attributes:
        kind: a key of :data:`STYLES`.
        pieces: the number of equal pieces, each divided by itself, of the divided dimension.
        sections: the sizes of those pieces where they differ; ``()`` otherwise.
        attributes: the whole numbers to divide.
    """

    kind: str
    pieces: int = 1
    sections: tuple[int, ...] = ()
    attributes: tuple[str, ...] = ()

    @property
    def divides(self) -> bool:
        """Whether the parameters of the module are divided."""
        return self.kind in LINEAR or self.kind == "vocab"

    @property
    def is_column(self) -> bool:
        """Whether the outputs of a layer are divided."""
        return self.kind in ("column", "column_gather")

    def sections_of(self, size: int) -> tuple[int, ...]:
        """Returns the sizes, along a dimension of ``size``, that are each divided by themselves."""
        return self.sections or ((size // self.pieces,) * self.pieces if self.pieces > 1 else ())


def read_style(pattern: str, value: object) -> PlanStyle:
    """Returns the meaning of ``plan[pattern] = value``.

    Raises:
        ConfigError: ``value`` is no style, or a style that is not offered.

    Example:
        >>> read_style("h.*.attn.c_attn", "column:3").pieces
        3
    """
    entry = f"tensor_parallel_configs['plan'][{pattern!r}] = {value!r}"
    if not isinstance(value, str):
        raise ConfigError(f"{entry}: a plan maps a pattern of module names to text: {', '.join(map(repr, STYLES))}.")
    word, _, detail = SYNONYMS.get(value.strip(), value).partition(":")
    kind = SYNONYMS.get(word.strip(), word.strip())
    if kind in _NOT_OFFERED:
        raise ConfigError(f"{entry}: it is not offered, because {_NOT_OFFERED[kind]}. Write 'whole' to leave it as is.")
    if kind not in STYLES:
        near = did_you_mean(kind, [*STYLES, *SYNONYMS])
        raise ConfigError(f"{entry}: there is no such style.{near} Styles: {', '.join(map(repr, STYLES))}.")
    parts = [part.strip() for part in detail.split(",") if part.strip()]
    if kind == "divide":
        if not parts:
            raise ConfigError(f"{entry}: name the attributes that hold whole numbers: 'divide:n_heads,width'.")
        return PlanStyle(kind, attributes=tuple(parts))
    if not parts:
        return PlanStyle(kind)
    if kind not in LINEAR or not all(part.isdecimal() and int(part) for part in parts):
        raise ConfigError(
            f"{entry}: behind the colon of {', '.join(map(repr, LINEAR))} stands a number of equal pieces ('column:3') "
            "or the size of each ('column:512,128,128')."
        )
    sizes = tuple(map(int, parts))
    return PlanStyle(kind, pieces=sizes[0]) if len(sizes) == 1 else PlanStyle(kind, len(sizes), sizes)
