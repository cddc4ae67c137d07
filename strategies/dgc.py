"""dgc: deep gradient compression; workers exchange only the largest entries of each gradient."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from fleet.errors import ConfigError, OptionWarning
from fleet.strategies._declare.fields import Config, Values, setting
from fleet.strategies._declare.optimizer_kinds import check_momentum, check_settings_off
from fleet.strategies._declare.strategy import Guide, Stage, Strategy
from fleet.strategies._gradients.flat import copy_back, flattened, gather_into
from fleet.strategies._gradients.gradient_exchange import GradientExchange, data_parallel_in, exchange_of
from fleet.strategies._gradients.passes import passes_of
from fleet.strategies._shared.local_training import problem_of_sequences
from fleet.strategies._shared.optimizer_wrapper import OptimizerWrapper, loss_of, shared_by_two, users_step_hooks
from fleet.strategies._shared.waiting import wait_for

if TYPE_CHECKING:
    from fleet.job.job import Job


@dataclass(frozen=True, kw_only=True)
class DgcConfig(Config, option="dgc_configs"):
    """How fast the exchange becomes sparse, and how sparse."""

    rampup_begin_step: int = setting(0, "first step that compresses; before it, plain momentum", at_least=0)
    rampup_step: int = setting(1, "steps over which the list of sparsities is walked through", at_least=1)
    sparsity: tuple[float, ...] = setting(
        [], "shares of entries that are not sent, one after the other; [] means [0.999]", at_least=0, below=1
    )


class Dgc(Strategy):
    """Sends the largest entries of each gradient and keeps the others for later steps."""

    name = "dgc"
    meaning = "Exchange only the largest entries of each gradient (Deep Gradient Compression); the rest waits its turn."
    stage = Stage.COMM
    steps_together = True
    Config = DgcConfig
    conflicts = {
        "fp16_allreduce": "dgc sends chosen entries as index and value, and leaves no float32 sum to narrow",
        "gradient_merge": "both hold gradients back for later steps, and nothing defines what is held back twice",
        "localsgd": "dgc compresses the exchange of gradients, and localsgd exchanges none",
        "adaptive_localsgd": "dgc compresses the exchange of gradients, and adaptive_localsgd exchanges none",
        "lars": "dgc applies momentum before the exchange, and lars scales gradients before momentum",
        "lamb": "dgc needs torch.optim.SGD with momentum, and lamb works on Adam",
    }
    model_effect = "leaves large float32 gradients out of the common exchange"
    optimizer_effect = "adds up momentum and gradients locally, and exchanges only their largest entries"
    guide = Guide(
        when="The network is very slow, the model large, and the optimizer SGD with momentum.",
        cost="Two more copies of the large parameters, a top-k of each; below 1 % of the bytes at sparsity 0.999.",
        formula="u = m u + g; v = v + u; send the k largest of |v|, and set u and v to zero there",
        source="Lin et al., 2018, arXiv 1712.01887",
        example={"dgc": True, "dgc_configs": {"rampup_begin_step": 1, "sparsity": [0.99]}},
    )

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises ConfigError unless the optimizer is SGD with momentum."""
        check_momentum(self.name, optimizer)
        check_settings_off(self.name, optimizer, "dampening", "maximize")
        check_hooks(optimizer)

    @classmethod
    def problem(cls, options: Values, world_size: int) -> str | None:
        """Returns the reason when workers hold parts of one sequence."""
        return problem_of_sequences(cls.name, options)

    @classmethod
    def notes(cls, options: Values, world_size: int) -> tuple[str, ...]:
        """Returns the remark that one worker exchanges nothing."""
        return ("dgc changes nothing with one worker: nothing is exchanged.",) if world_size == 1 else ()

    def __init__(self, config: Any, job: Job) -> None:
        """Starts without optimizers; each gets a compressor that is at step 0 with nothing held back."""
        super().__init__(config, job)
        self.compressors: list[Compressor] = []

    def use_scaler(self, scaler: Any) -> None:
        """Raises ConfigError for a scaler that is on: entries held back would have an older scale."""
        if scaler.is_enabled():
            raise ConfigError(
                "A GradScaler scales the loss with dgc on: dgc keeps unsent gradients from step to step, and the "
                "scaler changes their scale. Train in bfloat16 without a scaler, or turn dgc off."
            )

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Returns ``model``, whose exchange sends the largest entries of each large gradient."""
        module = data_parallel_in(model)
        if module is not None:
            exchange = exchange_of(module)
            passes = passes_of(model)
            exchange.route = lambda bucket: exchange_bucket(bucket, exchange, self.compressors)
            exchange.use(self.name)

            def check() -> None:
                for compressor in self.compressors:
                    compressor.check_fresh(passes.parameters)

            passes.checks.append(check)
        return model

    def wrap_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Returns an optimizer that applies the sparse updates; momentum is in them already."""
        if self.job.world_size == 1:
            return optimizer
        # A parameter is compressed for one optimizer, the latest; the others stop.
        parameters = {p for group in optimizer.param_groups for p in group["params"]}
        for compressor in self.compressors:
            compressor.give(parameters)
        self.compressors.append(Compressor(self.config))
        return SparseUpdateOptimizer(optimizer, self.compressors[-1], self.job)

    def note_clear(self, parameters: Sequence[Tensor]) -> None:
        """Records that the exchanged gradients of ``parameters`` were cleared."""
        for compressor in self.compressors:
            compressor.sent.difference_update(parameters)


def check_hooks(optimizer: Optimizer) -> None:
    """Raises ConfigError when hooks would look at the gradients in ``optimizer.step()``."""
    if users_step_hooks(optimizer):
        raise ConfigError(
            "dgc needs an optimizer without grad_clip and step hooks: what they would see is already summed and "
            "sparse. Clip in the script, between backward() and step(), or turn dgc off."
        )


SMALLEST = 16384  # entries; below this, index and value cost more than they save


class Compressor:
    """Momentum correction and momentum factor masking of one optimizer (Lin et al., 2018, arXiv 1712.01887, no. 2).

    For a large float32 gradient g of one worker, weight decay included, with momentum m::

        u = m * u + g          (Nesterov: u = m * (u + g), and g is added to v as well)
        v = v + u
        send the k largest entries of |v|; set u and v to zero there

    The entries of all workers are added up and divided by their number. ``steps`` counts updates from 0; compression
    starts at ``rampup_begin_step``, until then the exchange is dense and the optimizer applies momentum.
    """

    def __init__(self, config: DgcConfig) -> None:
        self._begin = config.rampup_begin_step
        self._rampup = config.rampup_step
        self._sparsity = config.sparsity or (0.999,)
        self.steps = 0
        self.u: dict[Tensor, Tensor] = {}
        self.v: dict[Tensor, Tensor] = {}
        self.groups: dict[Tensor, dict[str, Any]] = {}  # parameter -> the optimizer's group it belongs to
        self.sent: set[Tensor] = set()  # parameters with an exchanged gradient in .grad
        self.unused = False  # an exchange came since the last step
        self.lost = False  # parameters were given to a later optimizer

    def give(self, parameters: set[Tensor]) -> None:
        """Releases ``parameters``, which another optimizer has now."""
        if not parameters.isdisjoint(self.groups):
            self.lost = True
            self.unused = False
            for held in (self.groups, self.u, self.v):
                for parameter in parameters.intersection(held):
                    del held[parameter]
            self.sent -= parameters

    def compresses(self, parameter: Tensor) -> bool:
        """Returns whether the gradient of ``parameter`` is sent sparsely at this step."""
        large = parameter.numel() >= SMALLEST and parameter.dtype == torch.float32
        return large and self.steps >= self._begin and parameter in self.groups

    def check_fresh(self, parameters: Iterable[Tensor]) -> None:
        """Raises ConfigError when ``parameters`` cannot be exchanged: not twice for one step, and no gradient twice.

        The gradients of an exchange stay in u and v when ``.grad`` is cleared, and would be added again if they were
        still in ``.grad``.
        """
        self.sent = {p for p in self.sent if p.grad is not None}
        if not any(p in self.groups for p in parameters):
            return
        if self.unused:
            raise ConfigError(
                "dgc: two backward passes exchanged gradients without a step() between them. For several backward "
                "passes before one step() run all but the last under 'with model.no_sync():' (forward too). "
                "Meanwhile call requires_grad_(False) on a model that another model's loss only passes through."
            )
        if self.sent:
            raise ConfigError(
                "dgc: backward() would add to gradients that were exchanged and used already, and send them once more. "
                "Call zero_grad() after step()."
            )

    def num_sent(self, numel: int) -> int:
        """Returns the number of entries, out of ``numel``, to send at this step; at least 1."""
        place = int((self.steps - self._begin) * len(self._sparsity) / self._rampup)
        sparsity = self._sparsity[min(place, len(self._sparsity) - 1)]
        return max(1, int(numel * (1 - sparsity)))

    @torch.no_grad()
    def select(self, parameter: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Returns index (int32) and value of the entries to send; holds the others back."""
        group = self.groups[parameter]
        flat = gradient.flatten()
        if group["weight_decay"]:
            flat = flat.add(parameter.detach().flatten(), alpha=group["weight_decay"])
        u = self.u.setdefault(parameter, torch.zeros_like(flat))
        v = self.v.setdefault(parameter, torch.zeros_like(flat))
        if group["nesterov"]:
            u.add_(flat).mul_(group["momentum"])
            v.add_(u).add_(flat)
        else:
            u.mul_(group["momentum"]).add_(flat)
            v.add_(u)
        self.sent.add(parameter)
        self.unused = True
        index = v.abs().topk(self.num_sent(flat.numel()), sorted=False).indices
        value = v[index]
        u[index] = 0
        v[index] = 0
        return index.int(), value


def exchange_bucket(
    bucket: dist.GradBucket, exchange: GradientExchange, compressors: Sequence[Compressor]
) -> torch.futures.Future[Tensor]:
    """Exchanges one bucket: large gradients sparsely, the others in one dense buffer."""
    owners = {p: compressor for compressor in reversed(compressors) for p in compressor.groups}
    group = exchange.group
    num_workers = exchange.group.size()
    pairs = list(zip(bucket.parameters(), bucket.gradients(), strict=True))
    sparse = [(p, g) for p, g in pairs if p in owners and owners[p].compresses(p)]
    dense = [g for p, g in pairs if not (p in owners and owners[p].compresses(p))]
    waiting: list[Any] = []
    finish: list[Callable[[], None]] = []
    if dense:
        flat = flattened(dense)
        waiting.append(dist.all_reduce(flat, group=group, async_op=True).get_future())
        finish.append(lambda: copy_back(flat, dense))
    if sparse:
        chosen = [owners[p].select(p, g) for p, g in sparse]
        index, value = (torch.cat(parts) for parts in zip(*chosen, strict=True))
        indices = index.new_empty(num_workers * index.numel())
        values = value.new_empty(num_workers * value.numel())
        for gathered, own in ((indices, index), (values, value)):
            waiting.append(gather_into(gathered, own, group=group, async_op=True).get_future())
        counts = [len(part) for part, _ in chosen]
        finish.append(lambda: _add_up(indices, values, counts, [g for _, g in sparse], num_workers))

    def combine(done: Any) -> Tensor:
        for sent in waiting:
            wait_for(sent)  # makes the GPU's stream wait for NCCL's, which the future of all of them does not
        for part in finish:
            part()
        return bucket.buffer() if exchange.divisor == 1 else bucket.buffer().div_(num_workers)

    done: torch.futures.Future[Tensor] = torch.futures.collect_all(waiting).then(combine)
    return done


def _add_up(indices: Tensor, values: Tensor, counts: list[int], gradients: list[Tensor], num_workers: int) -> None:
    """Replaces each gradient by the sum of the entries that the workers sent for it."""
    per_worker = zip(indices.chunk(num_workers), values.chunk(num_workers), strict=True)
    for gradient in gradients:
        gradient.zero_()
    for index, value in per_worker:
        for gradient, i, x in zip(gradients, index.split(counts), value.split(counts), strict=True):
            gradient.view(-1).index_add_(0, i.long(), x)


class SparseUpdateOptimizer(OptimizerWrapper):
    """Applies sparse updates as they are (``p -= lr * update``) and leaves all other parameters to SGD inside.

    Each worker holds other entries back: ``state_dict()`` is exact for the worker that saved it, and another worker
    that loads it starts with nothing held back.
    """

    has_own_state = True

    def __init__(self, optimizer: Optimizer, compressor: Compressor, job: Job) -> None:
        super().__init__(optimizer)
        self._compressor = compressor
        self._job = job
        self.note_groups()

    def note_groups(self) -> None:
        """Compresses large gradients of new parameter groups too."""
        self._compressor.groups = {p: group for group in self.param_groups for p in group["params"]}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Updates every parameter and moves on to the next step of the rampup.

        Raises ConfigError when a later optimizer has parameters of this one.
        """
        if self._compressor.lost:
            raise ConfigError(shared_by_two("dgc"))
        loss = loss_of(closure)
        check_hooks(self.optimizer)
        # SGD inside must not see them: momentum is in these updates already.
        updates = {p: p.grad for p in self.parameters() if p.grad is not None and self._compressor.compresses(p)}
        for parameter in updates:
            parameter.grad = None
        super().step()
        for parameter, update in updates.items():
            parameter.add_(update, alpha=-float(self._compressor.groups[parameter]["lr"]))
            parameter.grad = update
        self._compressor.steps += 1
        self._compressor.unused = False
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients, exchanged ones too."""
        super().zero_grad(set_to_none=set_to_none)
        self._compressor.sent.clear()

    def saving_note(self) -> str | None:
        """Returns a note for a user who saves: the entries held back are this worker's alone."""
        if not self._compressor.v:
            return super().saving_note()
        return (
            f"dgc: the optimizer state holds what worker {self._job.global_rank} has not sent yet. To resume "
            "exactly, save one file for each worker; from a single file the others start with nothing held back."
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of SGD, the step of the rampup, and the entries that this worker holds back."""
        places: dict[Tensor, int] = {p: place for place, p in enumerate(self.parameters())}
        held = {
            name: {places[p]: t.clone() for p, t in getattr(self._compressor, name).items() if p in places}
            for name in ("u", "v")
        }
        mine = {"steps": self._compressor.steps, "rank": self._job.global_rank, **held}
        return {**super().state_dict(), "dgc": mine}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state; raises ConfigError when it holds back entries of parameters of another size."""
        saved = state_dict.get("dgc", {"steps": 0, "rank": self._job.global_rank, "u": {}, "v": {}})
        parameters = self.parameters()
        for place, held in saved["v"].items():
            if place >= len(parameters) or parameters[place].numel() != held.numel():
                raise ConfigError(f"dgc: the state holds {held.numel()} entries for parameter {place}, which differs.")
        super().load_state_dict({name: value for name, value in state_dict.items() if name != "dgc"})
        self.note_groups()
        self._compressor.steps = int(saved["steps"])
        mine = saved["rank"] == self._job.global_rank
        if not mine and saved["v"]:
            warnings.warn(
                f"dgc: this state was saved by worker {saved['rank']}; worker {self._job.global_rank} starts with "
                "nothing held back.",
                OptionWarning,
                stacklevel=2,
            )
        for name in ("u", "v"):
            held = saved[name].items() if mine else ()
            setattr(self._compressor, name, {parameters[i]: t.to(parameters[i].device, copy=True) for i, t in held})

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_job": None, "_compressor": None}
