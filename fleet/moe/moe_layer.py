"""MoELayer: experts that the workers of the ep axis share out, and the way of the tokens to them and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from fleet.errors import ConfigError, UnsupportedOptionError
from fleet.moe.expert_mesh import ExpertMesh
from fleet.moe.gates import BaseGate, GShardGate, NaiveGate, SwitchGate
from fleet.moe.token_exchange import exchange_rows, expert_order
from fleet.strategies._shared.experts import mark_experts
from fleet.strategies.tensor_parallel import regions


class ExpertList(nn.Module):
    """The experts of this worker under their numbers in the whole layer, so that names are unique over the job.

    Args:
        experts: those of this worker.
        first: the number of the first.
    """

    def __init__(self, experts: Iterable[nn.Module], first: int = 0) -> None:
        super().__init__()
        for number, expert in enumerate(experts, first):
            self.add_module(str(number), expert)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._modules.values())  # type: ignore[arg-type]  # none is None

    def __len__(self) -> int:
        return len(self._modules)

    def __getitem__(self, place: int) -> nn.Module:
        """Returns the expert at ``place`` among those of this worker."""
        return list(self)[place]


class MoELayer(nn.Module):
    """Sends each token to the experts that its gate chooses, and adds up their results.

    A single process with all experts and all the data computes the same; in particular the gradients of experts are
    complete and scaled as all others, whatever the degrees are. The parameters of expert ``i`` of the whole layer are
    named ``experts.i.*``.

    Args:
        d_model: the size of a token.
        experts: the modules of **this** worker, as many on each; expert ``i`` of worker ``r`` along ep is number
            ``r * len(experts) + i``. Each takes and returns ``[n, d_model]``.
        gate: ``{"type": "gshard", "top_k": 2}`` and the like, with the types gshard, switch and naive; or a gate that
            derives from :class:`NaiveGate`. ``None`` is gshard.
        moe_group: the workers that share the experts: the ep axis of the job, also when it is ``None``.
        mp_group: the mp axis where all its workers have the same tokens: each takes a slice. ``False`` where they have
            different ones already. To be given with ep and mp above 1.
        recompute_interval: above 0, backward runs the experts again in place of keeping their activations.
        recompute_ctx: not used; ``None`` or a dictionary whose ``offload`` and ``partition`` are off.

    Raises:
        ConfigError: an argument does not fit the job.
        TypeError: ``gate`` is neither of these.

    Example:
        >>> layer = MoELayer(16, [nn.Linear(16, 16) for _ in range(4)], gate={"type": "naive", "top_k": 2})
        >>> layer(torch.zeros(2, 3, 16)).shape
        torch.Size([2, 3, 16])
    """

    def __init__(
        self,
        d_model: int,
        experts: Iterable[nn.Module],
        gate: Mapping[str, Any] | BaseGate | None = None,
        moe_group: Any = None,
        mp_group: Any = None,
        recompute_interval: int = 0,
        recompute_ctx: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        own = list(experts)
        if not own or not all(isinstance(expert, nn.Module) for expert in own):
            raise ConfigError(f"MoELayer(experts=...) takes at least one torch.nn.Module, got {own!r}.")
        wanted = [key for key in ("offload", "partition") if (recompute_ctx or {}).get(key)]
        if wanted:
            raise UnsupportedOptionError(
                f"MoELayer(recompute_ctx={{{wanted[0]!r}: True}}) is not supported: the inputs of experts stay whole "
                "on the device. Leave it out."
            )
        self._mesh = ExpertMesh(moe_group, mp_group)
        self.d_model = d_model
        self.num_expert = len(own)
        self.world_size = self._mesh.size
        self.recompute_interval = recompute_interval
        self.experts = ExpertList(own, self._mesh.rank * len(own))
        if self._mesh.size > 1:
            mark_experts(self.experts)
        self.gate = self._gate_of(gate)
        self.gate.mesh = self._mesh

    def forward(self, inp: Tensor) -> Tensor:
        """Returns the result for every token of ``inp``, ``[..., d_model]``."""
        tokens = inp.reshape(-1, self.d_model)
        if self._mesh.slices:
            group = self._mesh.mp
            if group is not None and len(tokens) % group.size():
                raise ConfigError(
                    f"MoELayer(mp_group=...): {len(tokens)} tokens do not divide among {group.size()} mp workers. "
                    "Choose batches that do."
                )
            tokens = regions.scatter_to(tokens, group, 0)
        value, chosen = self._gated(tokens)
        flat = chosen.flatten()
        order, sent = self._by_expert(flat)
        answers = self._answers(tokens[order // chosen.shape[1]], sent)
        # The slot of a choice that was dropped stays zero, so it adds nothing to its token.
        slots = answers.new_zeros((len(flat), self.d_model)).index_copy(0, order, answers)
        result = (slots.view(*chosen.shape, self.d_model) * value.unsqueeze(-1)).sum(1).to(inp.dtype)
        if self._mesh.slices:
            result = regions.gather_from(result, self._mesh.mp, 0)
        return result.view_as(inp)

    def _gated(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Returns weights and experts of each token; a gate that sees a slice of them gets its whole gradient."""
        names, parameters = zip(*self.gate.named_parameters(), strict=True) if self._mesh.divided else ((), ())
        if not names or self._mesh.mp is None:
            found = self.gate(tokens)
        else:
            # The gradient of a gate that saw a slice is a part: backward adds the parts up over mp.
            summed = [regions.copy_to(p, self._mesh.mp) for p in parameters]
            found = functional_call(self.gate, dict(zip(names, summed, strict=True)), (tokens,))
        return found[0], found[1]

    def _by_expert(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the places of ``flat`` in the order of its experts, and the counts of each worker's experts."""
        order = flat.argsort(stable=True)[int((flat < 0).sum()) :]  # without those that no expert takes
        sent = torch.bincount(flat[order], minlength=self.num_expert * self.world_size)
        return order, sent.view(self.world_size, -1)

    def _answers(self, rows: Tensor, sent: Tensor) -> Tensor:
        """Returns the experts' results for ``rows``, which stand by expert; ``sent`` counts them by worker too."""
        group = self._mesh.group
        if group is None:
            return self._through_experts(rows, sent[0].tolist())
        # The counts first: a worker makes room for the rows before they come.
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        away = sent.sum(1).tolist()
        here = received.sum(1).tolist()
        order = expert_order(received)
        arrived = exchange_rows(rows, away, here, group)[order]
        answers = self._through_experts(arrived, received.sum(0).tolist())
        # The inverse permutation: rows return in the order of their arrival, the one that their sender knows.
        return exchange_rows(answers[order.argsort()], here, away, group)

    def _through_experts(self, rows: Tensor, counts: list[int]) -> Tensor:
        names = [[name for name, _ in expert.named_parameters()] for expert in self.experts]
        shared = self._mesh.shared([p for expert in self.experts for _, p in expert.named_parameters()])

        def run(rows: Tensor, *parameters: Tensor) -> Tensor:
            found = []
            left = iter(parameters)
            for expert, own, part in zip(self.experts, names, rows.split(counts), strict=True):
                given = {name: next(left) for name in own}
                if len(part):
                    found.append(functional_call(expert, given, (part,)))
            made = torch.cat(found) if found else rows
            # Joins the graph where no expert has a token, so that backward exchanges on every worker.
            return made + parameters[0].flatten()[:0].sum().to(made.dtype) if parameters else made

        if self.recompute_interval > 0 and torch.is_grad_enabled():
            again: Tensor = checkpoint(run, rows, *shared, use_reentrant=False)
            return again
        return run(rows, *shared)

    def _gate_of(self, gate: Mapping[str, Any] | BaseGate | None) -> BaseGate:
        if isinstance(gate, NaiveGate):
            if gate.tot_expert != self.num_expert * self.world_size:
                raise ConfigError(
                    f"MoELayer: the gate chooses among {gate.tot_expert} experts, and there are {self.num_expert} on "
                    f"each of {self.world_size} workers. Make it with num_expert={self.num_expert}, "
                    f"world_size={self.world_size}."
                )
            return gate
        if gate is not None and not isinstance(gate, Mapping):
            raise TypeError(f"MoELayer(gate={gate!r}) takes a dictionary, or a gate that derives from NaiveGate.")
        asked = dict(gate or {})
        kinds: dict[Any, type[NaiveGate]] = {"gshard": GShardGate, "switch": SwitchGate, "naive": NaiveGate}
        kinds[None] = NaiveGate
        kind = asked.pop("type", "gshard")
        top_k = asked.pop("top_k", 1 if kind == "switch" else 2)
        if kind not in kinds or asked:
            raise ConfigError(
                f"MoELayer(gate={dict(gate or {})!r}) takes the keys 'type' ('gshard', 'switch' or 'naive') and "
                "'top_k'."
            )
        return kinds[kind](self.d_model, self.num_expert, self.world_size, topk=top_k)
