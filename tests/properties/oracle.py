"""What a composition must give: all workers in one process, in plain torch, each strategy as its formula."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tests.properties.loops import LOOPS
from tests.properties.models import MODELS, optimizer_of

Gradients = dict[int, Tensor]  # place of the parameter in its optimizer -> gradient
# Relative error of one rounding: half the gap between 1 and the next number.
ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8}


class Worker:
    """The networks and optimizers of one worker."""

    def __init__(self, model: str, rule: str) -> None:
        torch.manual_seed(0)  # every worker starts from rank 0's parameters
        self.example = MODELS[model]()
        self.nets = self.example.nets()
        self.optimizers = [optimizer_of(rule, net.parameters()) for net in self.nets]
        self.example.after_wrap(self.nets)
        self.u: dict[Tensor, Tensor] = {}
        self.v: dict[Tensor, Tensor] = {}

    def parameters(self, place: int) -> list[Tensor]:
        return [p for group in self.optimizers[place].param_groups for p in group["params"]]


class Oracle:
    """Trains all workers of a composition together."""

    def __init__(self, model: str, loop: str, rule: str, options: dict[str, Any], workers: int, steps: int) -> None:
        self.options, self.loop, self.steps = options, LOOPS[loop], steps
        self.workers = [Worker(model, rule) for _ in range(workers)]
        self.example = self.workers[0].example
        places = range(len(self.workers[0].nets))
        self.sums: list[list[Gradients]] = [[{} for _ in self.workers] for _ in places]
        self.batches, self.updates = [0 for _ in places], [0 for _ in places]
        self.local = LocalSteps(options) if self.on("localsgd") or self.on("adaptive_localsgd") else None
        self.masks: dict[Tensor, Tensor] = {}
        self.sizes: list[Gradients] = [{} for _ in places]
        self.order_errors: dict[Tensor, tuple[Tensor, Tensor]] = {}

    def on(self, name: str) -> bool:
        return bool(self.options.get(name))

    def config(self, name: str, key: str, default: Any) -> Any:
        return self.options.get(f"{name}_configs", {}).get(key, default)

    def train(self) -> list[dict[str, Tensor]]:
        """Runs the loop; returns parameters and buffers of each worker."""
        for number in range(self.steps):
            for name, places in self.example.turns:
                gradients, losses = self.local_gradients(name, places, number)
                if number in self.loop.skipped:
                    continue
                if self.local is not None:
                    self.local.loss = sum(losses) / len(losses)
                for place in places:
                    rate = 0.5 ** (number // self.loop.halved_every) if self.loop.halved_every else 1.0
                    self.step(place, [of_worker[place] for of_worker in gradients], rate)
        return [states(worker.nets) for worker in self.workers]

    # ---- gradients ----------------------------------------------------------------------------------------------

    def local_gradients(
        self, name: str, places: tuple[int, ...], number: int
    ) -> tuple[list[dict[int, Gradients]], list[float]]:
        """Returns, for each worker, the gradients of the parameters of ``places`` in a step, and the last loss."""
        parts = self.loop.parts
        found: list[dict[int, Gradients]] = [{place: {} for place in places} for _ in self.workers]
        losses = [0.0 for _ in self.workers]
        for part in range(parts):
            self.choose_masks()
            data = [self.example.data(parts * number + part, rank) for rank in range(len(self.workers))]
            together = self.on("sync_batch_norm") and self.example.has_norm
            if together:
                data = [tuple(torch.cat(column) for column in zip(*data, strict=True))] * len(data)  # type: ignore[misc]
            for rank, worker in enumerate(self.workers):
                loss = getattr(self.example, name)(worker.nets, *data[rank])
                trained = [(place, i, p) for place in places for i, p in enumerate(worker.parameters(place))]
                trained = [entry for entry in trained if entry[2].requires_grad]
                weight = 1 / parts
                if self.loop.weight is not None:
                    weight *= self.loop.weight(loss, [p for _, _, p in trained])
                gradients = torch.autograd.grad(loss * weight, [p for _, _, p in trained], allow_unused=True)
                run = self.loop.run.__name__
                before = losses[rank] if run == "one_loss_of_two" else 0.0
                losses[rank] = before + float(loss.detach()) * weight * LAST_BACKWARD.get(run, 1.0)
                for (place, i, _), gradient in zip(trained, gradients, strict=True):
                    if gradient is not None:
                        add(found[rank][place], i, gradient)
        return found, losses

    def step(self, place: int, gradients: list[Gradients], rate: float) -> None:
        """Takes the gradients of one call of ``step()``; updates when a window is complete."""
        batches, average = merged_batches(self.options)
        for total, of_worker in zip(self.sums[place], gradients, strict=True):
            for i, gradient in of_worker.items():
                add(total, i, gradient / batches if average else gradient)
        self.batches[place] += 1
        if self.batches[place] < batches:
            return
        self.batches[place] = 0
        windows, self.sums[place] = self.sums[place], [{} for _ in self.workers]
        sparse = self.exchange(place, windows)
        self.follow_order(place, rate)
        for worker, window in zip(self.workers, windows, strict=True):
            self.update(worker, place, window, sparse, rate)
        self.updates[place] += 1
        self.apply_masks()
        if self.local is not None and self.local.averages(self.workers[0].optimizers[place], rate):
            self.average(place)

    def exchange(self, place: int, windows: list[Gradients]) -> set[int]:
        """Makes the gradients of all workers equal, unless they stay local; returns the places of sparse ones."""
        num, sparse = len(self.workers), set()
        if self.local is not None or num == 1:
            return sparse
        summed = self.options.get("gradient_scale_configs", {}).get("scale_strategy", "avg") != "avg"
        used = {i: window[i] for window in windows for i in window}
        for window in windows:  # a worker whose rows left a parameter out adds nothing
            window.update({i: torch.zeros_like(gradient) for i, gradient in used.items() if i not in window})
        for i in sorted(used):
            if self.is_sparse(place, i):
                sparse.add(i)
                parts = [self.sent(w, place, i, window[i]) for w, window in zip(self.workers, windows, strict=True)]
                total = torch.stack(parts).sum(0) / (1 if summed else num)
            else:
                total = self.total([window[i] for window in windows], summed)
                self.sizes[place][i] = sum(window[i].abs() for window in windows) / (1 if summed else num)
            for window in windows:
                window[i] = total.clone()
        return sparse

    def total(self, parts: list[Tensor], summed: bool) -> Tensor:
        """Returns the average, or the sum, of one gradient over the workers, rounded as it is on the wire."""
        shares = 1 if summed else len(parts)
        if not self.on("fp16_allreduce"):
            return torch.stack(parts).sum(0) / shares
        wire = getattr(torch, self.config("fp16_allreduce", "dtype", "float16"))
        rounded = [part.to(wire).div_(shares) for part in parts]
        return sum(rounded[1:], rounded[0]).to(parts[0].dtype)

    def follow_order(self, place: int, rate: float) -> None:
        """Adds to ``order_errors`` how far a parameter may be from here because of the order of the sum on the wire.

        A sum of N numbers g_i in a type with roundoff u rounds N - 1 times, each time by at most u of a partial sum,
        which is at most S = |g_1| + ... + |g_N|. Two orders are thus at most c = 2 (N - 1) u S apart, to first order
        in u; two numbers have one order. Ring algorithms begin at another worker in each segment, so every order of
        the ring occurs. S is not small where the sum is: workers, and steps, may cancel. SGD, with velocity
        e = m e + c, moves the parameter by rate * e in each step. Other rules have no such short bound: none is added.
        """
        num, group = len(self.workers), self.workers[0].optimizers[place].param_groups[0]
        scaled = self.loop.clip is not None or self.on("lars") or self.on("lamb") or "betas" in group
        if not self.on("fp16_allreduce") or num < 3 or scaled:
            return
        c = 2 * (num - 1) * ROUNDOFF[self.config("fp16_allreduce", "dtype", "float16")]
        for i, size in self.sizes[place].items():
            p = self.workers[0].parameters(place)[i]
            zeros = torch.zeros_like(size)
            e, off = self.order_errors.get(p, (zeros, zeros))
            e = group["momentum"] * e + c * size
            self.order_errors[p] = e, off + group.get("plain_rate", group["lr"]) * rate * e

    def order_bounds(self) -> dict[str, Tensor]:
        """Returns the errors of :meth:`follow_order` after training, by the names of :func:`states`."""
        named = {p: f"{i}.{n}" for i, net in enumerate(self.workers[0].nets) for n, p in net.named_parameters()}
        return {named[p]: off for p, (_, off) in self.order_errors.items()}

    # ---- updates ------------------------------------------------------------------------------------------------

    def update(self, worker: Worker, place: int, window: Gradients, sparse: set[int], rate: float) -> None:
        optimizer, parameters = worker.optimizers[place], worker.parameters(place)
        for i, p in enumerate(parameters):
            left = torch.zeros_like(p) if self.loop.leaves_zeros and p.grad is not None else None
            p.grad = window.get(i, left)
        if self.loop.clip is not None:
            nn.utils.clip_grad_norm_(parameters, self.loop.clip)
        group = optimizer.param_groups[0]
        plain = group.setdefault("plain_rate", group["lr"])
        group["lr"] = plain * rate
        for i in sparse:
            parameters[i].data.sub_(parameters[i].grad, alpha=group["lr"])  # type: ignore[arg-type]
            parameters[i].grad = None
        if self.on("lars") or self.on("lamb"):
            with torch.no_grad():
                for p in (p for p in parameters if p.grad is not None):
                    (self.lars if self.on("lars") else self.lamb)(p, group, optimizer.state[p])
        else:
            optimizer.step()

    def lars(self, p: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        """You, Gitman and Ginsburg, algorithm 1, the rate inside the velocity."""
        assert p.grad is not None
        g = p.grad + group["weight_decay"] * p
        coeff, decay = self.config("lars", "lars_coeff", 0.001), self.config("lars", "lars_weight_decay", 0.0005)
        weight, gradient = p.norm(), g.norm()
        rate = group["lr"]
        if decay > 0 and weight > 0 and gradient > 0:
            rate = rate * coeff * weight / (gradient + decay * weight + self.config("lars", "epsilon", 0.0))
        state["v"] = group["momentum"] * state.get("v", torch.zeros_like(p)) + rate * (g + decay * p)
        p.sub_(state["v"])

    def lamb(self, p: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        """You et al., algorithm 2."""
        (b1, b2), g = group["betas"], p.grad
        assert g is not None
        state["t"] = state.get("t", 0) + 1
        state["m"] = b1 * state.get("m", torch.zeros_like(p)) + (1 - b1) * g
        state["s"] = b2 * state.get("s", torch.zeros_like(p)) + (1 - b2) * g * g
        mean, square = state["m"] / (1 - b1 ** state["t"]), state["s"] / (1 - b2 ** state["t"])
        r = mean / (square.sqrt() + group["eps"]) + self.config("lamb", "lamb_weight_decay", 0.01) * p
        trusted = p.norm() > 0 and r.norm() > 0
        p.sub_(group["lr"] * (p.norm() / r.norm() if trusted else 1.0) * r)

    # ---- dgc ----------------------------------------------------------------------------------------------------

    def is_sparse(self, place: int, i: int) -> bool:
        large = self.workers[0].parameters(place)[i].numel() >= 16384
        return self.on("dgc") and large and self.updates[place] >= self.config("dgc", "rampup_begin_step", 0)

    def sent(self, worker: Worker, place: int, i: int, gradient: Tensor) -> Tensor:
        """Returns what one worker sends of a gradient: Lin et al., algorithm 2."""
        p, group = worker.parameters(place)[i], worker.optimizers[place].param_groups[0]
        g = (gradient + group["weight_decay"] * p.detach()).flatten()
        worker.u[p] = group["momentum"] * worker.u.get(p, torch.zeros_like(g)) + g
        worker.v[p] = worker.v.get(p, torch.zeros_like(g)) + worker.u[p]
        sparsity = (self.config("dgc", "sparsity", []) or [0.999])[-1]
        top = worker.v[p].abs().topk(max(1, int(g.numel() * (1 - sparsity)))).indices
        out = torch.zeros_like(g)
        out[top] = worker.v[p][top]
        worker.u[p][top] = worker.v[p][top] = 0.0
        return out.view_as(p)

    # ---- what acts on parameters --------------------------------------------------------------------------------

    @torch.no_grad()
    def average(self, place: int) -> None:
        for same in zip(*(worker.parameters(place) for worker in self.workers), strict=True):
            mean = torch.stack([p.detach() for p in same]).mean(0)
            for p in same:
                if p.requires_grad:
                    p.copy_(mean)

    def choose_masks(self) -> None:
        """Chooses masks for the weights that have none: of four neighbours along the input the two smaller are 0."""
        if not self.on("asp"):
            return
        excluded = self.config("asp", "excluded_layers", [])
        for weights in zip(*(list(eligible(worker.nets, excluded)) for worker in self.workers), strict=True):
            if weights[0].requires_grad and weights[0] not in self.masks:
                runs = weights[0].detach().movedim(1, -1).abs()
                fours = runs.reshape(-1, 4)
                smaller = fours.argsort(dim=1, descending=True, stable=True)[:, 2:]
                mask = torch.ones_like(fours).scatter_(1, smaller, 0.0).view(runs.shape).movedim(-1, 1)
                self.masks.update({weight: mask for weight in weights})
        self.apply_masks()

    @torch.no_grad()
    def apply_masks(self) -> None:
        for weight, mask in self.masks.items():
            weight.mul_(mask)


class LocalSteps:
    """When the parameters of workers that train alone are averaged."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.adaptive = bool(options.get("adaptive_localsgd"))
        config = options.get("adaptive_localsgd_configs" if self.adaptive else "localsgd_configs", {})
        self.begin, self.loss = config.get("begin_step", 1), 0.0
        self.first_k = self.k = config.get("init_k_steps" if self.adaptive else "k_steps", 1)
        self.steps: dict[Any, tuple[int, int]] = {}
        self.first: dict[Any, tuple[float, float]] = {}
        self.intervals: dict[Any, int] = {}

    def averages(self, optimizer: Any, rate: float) -> bool:
        steps, last = self.steps.get(optimizer, (0, 0))
        steps += 1
        due = steps <= self.begin or steps - last >= self.intervals.get(optimizer, self.k)
        self.steps[optimizer] = steps, steps if due else last
        if due and self.adaptive:
            first_loss, first_rate = self.first.setdefault(optimizer, (self.loss, rate))
            share = first_rate * self.loss / (rate * first_loss) if first_loss > 0 else 0.0
            self.intervals[optimizer] = max(1, min(16, math.ceil(math.sqrt(max(share * self.first_k, 0.0)))))
        return due


# The last value on which backward is called, as a share of the step's loss.
LAST_BACKWARD = {"two_losses": 0.7}


def eligible(nets: list[nn.Module], excluded: list[str]) -> Iterator[Tensor]:
    for net in nets:
        for name, module in net.named_modules():
            fits = isinstance(module, nn.Linear | nn.Conv2d) and name not in excluded
            if fits and module.weight.shape[0] % 8 == 0 and module.weight.shape[1] % 16 == 0:
                yield module.weight


def merged_batches(options: dict[str, Any]) -> tuple[int, bool]:
    """Returns how many steps make an update, and whether their gradients are averaged."""
    if options.get("gradient_merge"):
        config = options.get("gradient_merge_configs", {})
        return config.get("k_steps", 1), config.get("avg", True)
    if options.get("sharding"):
        return options.get("sharding_configs", {}).get("gradient_merge_acc_step", 1), True
    return 1, True


def add(gradients: Gradients, place: int, gradient: Tensor) -> None:
    gradients[place] = gradients[place] + gradient if place in gradients else gradient


def states(nets: list[nn.Module]) -> dict[str, Tensor]:
    """Returns parameters and buffers by the number of the net and their name."""
    return {f"{i}.{n}": value.detach().clone() for i, net in enumerate(nets) for n, value in net.state_dict().items()}
