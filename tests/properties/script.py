"""A composition as a script of its own, which a user of the launcher could have written."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor

from tests.properties import loops, models
from tests.properties.draws import Composition

_HEAD = '''"""{title}

{fault}

Start it with: {command}
"""

from __future__ import annotations

import contextlib
import warnings
from typing import Any, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import fleet

'''

_MAIN = """
EXPECTED = {expected}
OPTIONS: dict[str, Any] = {options}

warnings.simplefilter("ignore")
strategy = fleet.DistributedStrategy()
strategy.update(OPTIONS)
fleet.init(is_collective=True, strategy=strategy, log_level="ERROR")
rank = fleet.worker_index()
torch.manual_seed(rank)
example = {model}()
nets = example.nets()
inner = [optimizer_of({rule!r}, net.parameters()) for net in nets]
{hook}if {optimizer_first}:
    optimizers = [fleet.distributed_optimizer(one) for one in inner]
    wrapped = [fleet.distributed_model(net) for net in nets]
else:
    wrapped = [fleet.distributed_model(net) for net in nets]
    optimizers = [fleet.distributed_optimizer(one) for one in inner]
example.after_wrap(nets)
{loop}(Job(example, wrapped, optimizers, inner, fleet.data_rank(), {steps}))
for i, model in enumerate(wrapped):
    for name, value in model.full_state_dict().items():
        right = EXPECTED[rank % len(EXPECTED)][f"{{i}}.{{name}}"]
        got = [round(float(v), 6) for v in value.flatten()[:{most}]]
        off = max(abs(a - b) for a, b in zip(got, right))
        numbers = f"got {{got[:4]}}, plain torch {{right[:4]}}"
        print(f"rank {{rank}} {{i}}.{{name}}: off by {{off:.2g}}: {{numbers}}", flush=True)
"""

_MOST = 48
_HOOK = "for one in inner:\n    one.register_step_pre_hook(clip_before_step)\n"
_PARAMETER_HOOK = """for p in (p for net in nets for p in net.parameters() if p.requires_grad):
    p.register_post_accumulate_grad_hook(halve)
"""


def script_of(made: Composition, fault: str, expected: list[dict[str, Tensor]]) -> str:
    """Returns the text of a script that trains ``made`` and prints how far each parameter is from plain torch's."""
    loop = loops.LOOPS[made.loop]
    command = f"python -m fleet.launch --nproc_per_node={made.workers} SCRIPT" if made.workers > 1 else "python SCRIPT"
    parts: list[Any] = [
        models.batch,
        models.optimizer_of,
        *reversed(models.MODELS[made.model].__mro__[:-1]),
        loops.Turn,
        loops.Job,
    ]
    if loop.hook is not None:
        parts.append(loop.hook)
    if loop.parameter_hook is not None:
        parts.append(loop.parameter_hook)
    if loop.weight is not None:
        parts.append(loop.weight)
    if made.loop == "raw_model":
        parts.append(loops.LOOPS["zero_first"].run)
    numbers = [
        {name: [round(float(v), 6) for v in value.flatten()[:_MOST]] for name, value in of_worker.items()}
        for of_worker in expected
    ]
    if all(of_worker == numbers[0] for of_worker in numbers):
        numbers = numbers[:1]
    main = _MAIN.format(
        expected=numbers, options=made.options, model=made.model, rule=made.rule, loop=made.loop, steps=made.steps,
        optimizer_first=made.optimizer_first, most=_MOST,
        hook=_HOOK if loop.hook else _PARAMETER_HOOK if loop.parameter_hook else "",
    )  # fmt: skip
    head = _HEAD.format(title=str(made), fault=fault, command=command)
    clip = f"CLIP = {loops.CLIP}\n\n\n" if loop.clip is not None else ""
    return head + clip + "\n\n".join(source(part) for part in [*parts, loop.run]) + main


def source(part: Any) -> str:
    """Returns the source of a class or function without its decorator."""
    lines = inspect.getsource(part).splitlines(keepends=True)
    start = next(i for i, line in enumerate(lines) if line.startswith(("def ", "class ")))
    return "".join(lines[start:])
