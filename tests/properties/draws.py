"""Compositions of model, loop, strategies and workers: how they are drawn, and when a result is right."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import Any

from torch import Tensor

from fleet.strategies import REGISTRY
from tests.properties.loops import LOOPS
from tests.properties.models import MODELS
from tests.properties.oracle import Oracle, merged_batches, states

RULES = ("sgd", "momentum", "adam", "adamw")
SHARDED = {"sharding_degree": "workers"}

# Values of each switch, one of which is drawn; "workers" and "block" stand for what the composition has.
VALUES: dict[str, list[dict[str, Any]]] = {
    "gradient_merge": [
        {"gradient_merge_configs": {"k_steps": 2}},
        {"gradient_merge_configs": {"k_steps": 3, "avg": False}},
        {"gradient_merge_configs": {"k_steps": 1}},
    ],
    "sharding": [
        {"sharding_configs": {**SHARDED, "stage": 1}},
        {"sharding_configs": {**SHARDED, "stage": 2}},
        {"sharding_configs": {**SHARDED, "stage": 3}},
        {"sharding_configs": {**SHARDED, "stage": 1, "gradient_merge_acc_step": 2}},
        {"sharding_configs": {**SHARDED, "stage": 2, "gradient_merge_acc_step": 2}},
        {"sharding_configs": {**SHARDED, "stage": 3, "segment_broadcast_MB": 0.00002}},
        {"sharding_configs": {"sharding_degree": "two", "dp_degree": "half", "stage": 1}},
        {"sharding_configs": {"sharding_degree": "two", "dp_degree": "half", "stage": 3}},
        {"sharding_configs": {**SHARDED, "stage": 2, "sharding_segment_strategy": "segment_anchors",
                              "segment_anchors": ["block"]}},
    ],
    "amp": [
        {"amp_configs": {"dtype": "bfloat16"}},
        {"amp_configs": {"dtype": "float16", "init_loss_scaling": 1024.0}},
        {"amp_configs": {"dtype": "float16", "init_loss_scaling": 256.0, "use_dynamic_loss_scaling": False}},
        {"amp_configs": {"use_pure_bf16": True}},
        {"amp_configs": {"use_pure_fp16": True, "init_loss_scaling": 1024.0}},
    ],
    "recompute": [{"recompute_configs": {"checkpoints": ["block"]}}],
    "localsgd": [
        {"localsgd_configs": {"k_steps": 1}},
        {"localsgd_configs": {"k_steps": 2, "begin_step": 0}},
        {"localsgd_configs": {"k_steps": 3, "begin_step": 2}},
    ],
    "adaptive_localsgd": [
        {"adaptive_localsgd_configs": {"init_k_steps": 1}},
        {"adaptive_localsgd_configs": {"init_k_steps": 2, "begin_step": 0}},
    ],
    "dgc": [
        {"dgc_configs": {"sparsity": [0.0]}},
        {"dgc_configs": {"sparsity": [0.75]}},
        {"dgc_configs": {"rampup_begin_step": 1, "sparsity": [0.99]}},
    ],
    "fp16_allreduce": [{}, {"fp16_allreduce_configs": {"dtype": "bfloat16"}}],
    "lars": [{"lars_configs": {"lars_coeff": 0.01}}, {"lars_configs": {"lars_weight_decay": 0.0}}],
    "lamb": [{}, {"lamb_configs": {"lamb_weight_decay": 0.1}}],
    "use_hierarchical_allreduce": [{"hierarchical_allreduce_inter_nranks": "two"}],
}  # fmt: skip
# Settings of the exchange and of the update that are no switches.
SETTINGS: dict[str, dict[str, Any]] = {
    "summed": {"gradient_scale_configs": {"scale_strategy": "sum"}},
    "unfused": {"fuse_all_reduce_ops": False},
    "unused": {"find_unused_parameters": True},
    "one_kernel": {"build_strategy": {"fuse_all_optimizer_ops": True}},
}
COMPILED, COMPILED_EVERY = "to_static", 1000  # the compiler takes half a minute
COMPILED_WITH = [("recompute", "sharding"), ("amp",), ("gradient_merge",), ("sync_batch_norm",), ("recompute",)]
# They divide a model over a mesh: planned() and mesh_draws.py draw those.
DIVIDING = ("pipeline", "tensor_parallel")
# How a plan divides each model; the others have several nets, which one plan does not fit, or use parts of weights.
PLANS: dict[str, dict[str, str]] = {
    "Mlp": {"0": "column", "2": "row"},
    "ConvNorm": {"1.4": "column_gather"},
    "Attention": {"1": "column_gather", "2.linear1": "column", "2.linear2": "row", "4": "row_split"},
    "Listed": {"first": "column_gather"},
    "Outside": {"first": "column_gather"},
    "Frozen": {"0": "column", "2": "row"},
    "Thawed": {"0": "column", "2": "row"},
    "Wide": {"0": "column", "2": "row", "4": "row_split"},
}
# A measure of a gradient by hand sees the part that the worker holds.
WHOLE_GRADIENTS = ("measured", "clip_by_hand")
# Loops over logical workers have draws of their own, in tests/strategies/reproducible.
APART = (COMPILED, *DIVIDING, "reproducible")
SWITCHES = sorted(n for n, s in REGISTRY.items() if s.default is False and n not in APART)
NAMES = [*SWITCHES, *SETTINGS]
REFUSED_WITH = {"localsgd", "adaptive_localsgd", "dgc", "asp", "qat"}  # beside a plan; each has a test of its own
OFFERED = [name for name in NAMES if name in SETTINGS or REGISTRY[name].refused is None]
PLANNED_WITH = [name for name in OFFERED if name not in REFUSED_WITH]


PLAIN_MODELS = [name for name, model in MODELS.items() if not model.tries_invariants]
TRYING_MODELS = [name for name in MODELS if name not in PLAIN_MODELS] + ["Impure", "Outer"]
PLAIN_LOOPS = [name for name, loop in LOOPS.items() if not loop.tries_invariants]
TRYING_LOOPS = [name for name in LOOPS if name not in PLAIN_LOOPS]
AT_STAKE = ["unused", "sharding", "recompute"]


@dataclass(frozen=True)
class Composition:
    """One draw."""

    number: int
    model: str
    loop: str
    rule: str
    names: tuple[str, ...]
    options: dict[str, Any]
    workers: int
    steps: int
    optimizer_first: bool = False

    def __str__(self) -> str:
        """Returns one line that says what it is."""
        return (
            f"draw {self.number}: {self.model} x {self.loop} x {self.rule} x {' + '.join(self.names) or 'plain'} x "
            f"{self.workers} workers, {self.steps} batches {self.options}"
        )

    @property
    def parts(self) -> int:
        """Returns how many workers share the layers that a plan divides; they are neighbours and see one batch."""
        degree: int = self.options.get("tensor_parallel_configs", {}).get("tensor_parallel_degree", 1)
        return degree

    @property
    def copies(self) -> int:
        """Returns how many copies of the model train on batches of their own."""
        return self.workers // self.parts

    def sent(self) -> dict[str, Any]:
        """Returns the composition as JSON takes it."""
        return asdict(self)


# ---- drawing --------------------------------------------------------------------------------------------------------


def chosen_names(number: int, draws: random.Random) -> tuple[str, ...]:
    """Returns the strategies of a draw: nothing, then each, then each pair, then one to three by chance."""
    listed: list[tuple[str, ...]] = [(), *((name,) for name in NAMES), *combinations(OFFERED, 2)]
    if number < len(listed):
        return listed[number]
    if number % COMPILED_EVERY == 0:
        return (*COMPILED_WITH[number // COMPILED_EVERY % len(COMPILED_WITH)], COMPILED)
    return tuple(sorted(draws.sample(OFFERED, draws.choice((0, 1, 2, 3, 3)))))


def options_of(names: tuple[str, ...], draws: random.Random, block: str, workers: int) -> dict[str, Any]:
    """Returns the options that turn ``names`` on, each with one of its values."""
    words = {"workers": workers, "two": min(2, workers), "half": max(1, workers // 2), "block": block}

    def filled(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: filled(item) for key, item in value.items()}
        if isinstance(value, list):
            return [filled(item) for item in value]
        return words.get(value, value) if isinstance(value, str) else value

    options: dict[str, Any] = {}
    for name in names:
        if name in SETTINGS:
            options.update(SETTINGS[name])
        else:
            guide = REGISTRY[name].guide
            options.update(guide.example if guide is not None and name not in VALUES else {name: True})
            options.update(filled(draws.choice(VALUES.get(name, [{}]))))
    return options


def draw(number: int, seed: int) -> Composition:
    """Returns composition ``number`` of ``seed``, a pure function of both."""
    draws = random.Random(f"{seed}/{number}")
    names = chosen_names(number, draws)
    model = draws.choice(["Wide", *PLAIN_MODELS] if "dgc" in names else PLAIN_MODELS)
    if COMPILED in names:
        model = "ConvNorm"
    loop = draws.choice([name for name in PLAIN_LOOPS if fits(model, name)])
    workers = draws.choices((1, 2, 4), (30, 50, 20))[0]
    rule = rule_of(names, draws)
    options = options_of(names, draws, MODELS[model].block, workers)
    if COMPILED in names and "sharding" in names:  # units inside the block that is computed twice
        workers, small = 2, {"stage": 2, "segment_broadcast_MB": 0.00002}
        options["sharding_configs"] = {"sharding_degree": 2, **small}
    return Composition(number, model, loop, rule, names, options, workers, draws.randint(3, 6), draws.random() < 0.5)


def rule_of(names: tuple[str, ...], draws: random.Random) -> str:
    """Returns the rule of the optimizer, most often one that the strategies take."""
    rule = draws.choice(RULES)
    if draws.random() < 0.9:  # what a strategy refuses at once teaches little
        if {"lars", "dgc"} & {*names}:
            rule = "momentum"
        elif {"localsgd", "adaptive_localsgd"} & {*names}:
            rule = draws.choice(RULES[:2])
        elif "lamb" in names:
            rule = "adam"
    return rule


def invariant(number: int, seed: int) -> Composition:
    """Returns composition ``number`` of a series of its own, in which an invariant is at stake."""
    draws = random.Random(f"invariant {seed}/{number}")
    model = draws.choice([*TRYING_MODELS, draws.choice(PLAIN_MODELS)])
    loops = [name for name in (PLAIN_LOOPS if model in TRYING_MODELS else TRYING_LOOPS) if fits(model, name)]
    loop = draws.choice([*loops, draws.choice([name for name in TRYING_LOOPS if fits(model, name)])])
    offered = [*OFFERED, *AT_STAKE * 4]
    names = tuple(sorted({*draws.sample(offered, draws.choice((0, 1, 2, 2)))}))
    workers = draws.choices((1, 2, 4), (10, 65, 25))[0]
    options = options_of(names, draws, MODELS[model].block, workers)
    rule = rule_of(names, draws)
    return Composition(number, model, loop, rule, names, options, workers, draws.randint(3, 6), draws.random() < 0.5)


def planned(number: int, seed: int) -> Composition:
    """Returns composition ``number`` of a series of its own, whose model a plan divides between two neighbours."""
    draws = random.Random(f"planned {seed}/{number}")
    names = tuple(sorted(draws.sample(PLANNED_WITH, draws.choice((0, 1, 1, 2)))))
    model = draws.choice([*PLANS])
    loop = draws.choice([name for name in PLAIN_LOOPS if fits(model, name) and name not in WHOLE_GRADIENTS])
    workers = draws.choice((2, 4))
    rule = draws.choice(RULES)
    rule = "momentum" if "lars" in names else "adam" if "lamb" in names else rule
    options = options_of(names, draws, MODELS[model].block, workers // 2)
    degree = {"tensor_parallel_degree": 2, "plan": PLANS[model]}
    options |= {"tensor_parallel": True, "tensor_parallel_configs": degree}
    return Composition(number, model, loop, rule, names, options, workers, draws.randint(3, 6), draws.random() < 0.5)


def fits(model: str, loop: str) -> bool:
    """Returns whether people write such a loop for such a model."""
    example = MODELS[model]
    if example.shares and (not LOOPS[loop].clears_first or loop == "skipped_batch"):
        return False
    if example.may_stop_late and loop == "measured":
        return False  # torch.autograd.grad takes no parameter that a batch left out
    if model == "Thawed" and LOOPS[loop].parameter_hook is not None:
        return False
    several = max(len(places) for _, places in example.turns) > 1
    return not (several and loop in ("closure", "raw_optimizer", "fleet_static", "two_losses"))


# ---- judging --------------------------------------------------------------------------------------------------------


@dataclass
class Judgement:
    """What became of a composition; ``fault`` is empty when all is right."""

    outcome: str
    fault: str = ""
    reason: str = ""


def local_steps(made: Composition) -> bool:
    """Returns whether workers train by themselves."""
    return bool({"localsgd", "adaptive_localsgd"} & {*made.names})


def weak(made: Composition) -> bool:
    """Returns whether only equal and finite workers are asked for: no short formula exists."""
    unknown = {name for name in made.names if name in SWITCHES and name not in KNOWN}
    # What a hook on a gradient sees while others wait for it is a matter of definition.
    hooked = LOOPS[made.loop].parameter_hook is not None and merged_batches(made.options)[0] > 1
    return bool(
        unknown or hooked or (local_steps(made) and "sync_batch_norm" in made.names and MODELS[made.model].has_norm)
    )


KNOWN = {*VALUES, "asp", "sync_batch_norm", "check_nan_inf", "cudnn_exhaustive_search", COMPILED}


def torch_refuses(made: Composition) -> bool:
    """Returns whether the script itself mixes divided parameters with whole tensors, which torch refuses."""
    stage = made.options.get("sharding_configs", {}).get("stage", 1) if made.workers > 1 else 1
    return stage > 1 and (made.model == "Penalty" or made.loop == "measured")


def may_stop_late(made: Composition) -> bool:
    """Returns whether steps before the one at stake are right."""
    return MODELS[made.model].may_stop_late or made.loop in ("converted", "weights_assigned")


def tolerance(made: Composition) -> float:
    """Returns how far a parameter may be off, as a share of the largest update of it."""
    options = made.options
    found = 2e-4
    if options.get("fp16_allreduce") and made.workers > 1:
        found = 0.02 if options.get("fp16_allreduce_configs", {}).get("dtype") == "bfloat16" else 0.005
    if options.get("amp"):
        config = options["amp_configs"]
        found = 0.35 if config.get("dtype") == "bfloat16" or config.get("use_pure_bf16") else 0.1
    return found


def judge(made: Composition, results: list[dict[str, Any]], expected: list[dict[str, Tensor]]) -> Judgement:
    """Compares what the workers report with what plain torch gives."""
    outcomes = [str(result["outcome"]) for result in results]
    kinds = {outcome.partition(":")[0] for outcome in outcomes}
    if kinds == {"refused"}:
        if any(result["moved"] for result in results) and not may_stop_late(made):
            return Judgement("refused", f"refused after a step was taken: {outcomes[0]}")
        return Judgement("refused", reason=outcomes[0].partition(": ")[2])
    if kinds == {"hangs", "refused"} and MODELS[made.model].may_stop_late:  # a launcher would end the others
        return Judgement("refused", reason=next(o for o in outcomes if o.startswith("refused")).partition(": ")[2])
    if kinds == {"error"} and torch_refuses(made) and not any(result["moved"] for result in results):
        return Judgement("refused", reason=f"torch: {outcomes[0]}")
    if kinds != {"trained"}:
        worst = next(outcome for outcome in outcomes if not outcome.startswith("trained"))
        return Judgement(worst.partition(":")[0], f"{sorted(kinds)}: {worst}")
    if weak(made):
        finite = all(bool(v.isfinite().all()) for result in results for v in result["values"].values())
        return Judgement("trained", "" if finite else "not finite")
    return Judgement("trained", difference(made, [result["values"] for result in results], expected))


def difference(made: Composition, got: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> str:
    """Returns the parameter that is furthest off, or nothing."""
    start = initial(made)
    allowed, worst, text = tolerance(made), 0.0, ""
    moves = {
        name: max(float((e[name] - start[name]).abs().max()) for e in expected)
        for name, value in start.items()
        if value.is_floating_point()
    }
    floor = 0.05 * max(moves.values())
    orders = order_bounds(made)
    for name in start.keys() - moves.keys():  # how often batch norm has seen a batch
        if int(got[0][name]) != int(expected[0][name]):
            return f"{name} is {int(got[0][name])}, with plain torch {int(expected[0][name])}"
    for rank, (mine, right) in enumerate(zip(got, expected, strict=True)):
        for name, move in moves.items():
            if rank and "running" in name and not local_steps(made):
                continue  # data parallel copies rank 0's statistics before each forward
            if name not in mine or mine[name].shape != right[name].shape:
                return f"rank {rank}: {name} is missing or has another shape; there are {sorted(mine)[:9]}"
            apart = (mine[name].float() - right[name]).abs()
            if name in orders:
                apart = apart.where(~(apart <= orders[name]), 0.0)  # also nan stays
            off = float(apart.max())
            share = off / max(move, floor, 1e-6)
            if not share <= max(allowed, worst):
                worst = share
                text = (
                    f"rank {rank}: {name} is off by {share:.3g} of its update (got {few(mine[name])}, "
                    f"plain torch {few(right[name])}, start {few(start[name])})"
                )
    return text


def few(value: Tensor) -> list[float]:
    return [round(float(v), 6) for v in value.flatten()[:3]]


def initial(made: Composition) -> dict[str, Tensor]:
    """Returns parameters and buffers of rank 0 before the first step, with asp's zeros in place."""
    oracle = Oracle(made.model, made.loop, made.rule, made.options, 1, 0)
    oracle.choose_masks()
    return states(oracle.workers[0].nets)


def expectation(made: Composition) -> list[dict[str, Tensor]]:
    """Returns what plain torch gives for each worker."""
    found = Oracle(made.model, made.loop, made.rule, made.options, made.copies, made.steps).train()
    return [of_copy for of_copy in found for _ in range(made.parts)]


def order_bounds(made: Composition) -> dict[str, Tensor]:
    """Returns how far the order in which workers are added up in a narrow type may move each parameter."""
    if not made.options.get("fp16_allreduce") or made.copies < 3:
        return {}
    oracle = Oracle(made.model, made.loop, made.rule, made.options, made.copies, made.steps)
    oracle.train()
    return oracle.order_bounds()


def smaller(made: Composition) -> Iterator[Composition]:
    """Yields compositions with one thing less."""
    for name in made.names:
        names = tuple(other for other in made.names if other != name)
        kept = {key: value for key, value in made.options.items() if not key.startswith(name)}
        for key in SETTINGS.get(name, {}):
            kept.pop(key, None)
        yield replace(made, names=names, options=kept)
    if made.workers > 2 and "half" not in str(made.options):
        yield replace(made, workers=2, options=with_degree(made.options, 2))
    if made.workers > 1:
        yield replace(made, workers=1, options=with_degree(made.options, 1))
    if made.steps > 3:
        yield replace(made, steps=3)
    if made.rule != "sgd" and not {"lars", "lamb", "dgc"} & {*made.names}:
        yield replace(made, rule="sgd")
    if made.model != "Mlp" and not {"checkpoints", "segment_anchors"} & {*str(made.options).split("'")}:
        yield replace(made, model="Mlp")
    if made.loop not in ("zero_first", "zero_last"):
        yield replace(made, loop="zero_first")


def with_degree(options: dict[str, Any], workers: int) -> dict[str, Any]:
    config = options.get("sharding_configs")
    if config is None:
        return options
    config = {key: value for key, value in config.items() if key != "dp_degree"}
    return {**options, "sharding_configs": {**config, "sharding_degree": workers}}
