"""Scripts of one process: loaders, totals, files, models, devices."""

from __future__ import annotations

import pytest

from fleet.migrate.divided_data import divide_data
from fleet.migrate.from_single import OTHER_PROGRAMS
from fleet.migrate.migrate_command import migrate
from fleet.migrate.script_edits import ScriptEdits
from fleet.migrate.script_port import ScriptPort
from fleet.migrate.script_source import ScriptSource
from fleet.migrate.training_parts import TrainingParts, root
from fleet.migrate.worker_totals import divide_totals
from tests.fleet.migrate.cases import hand, single

LOADER = "loader = DataLoader(data, shuffle=True)"


@pytest.mark.parametrize(
    ("loader", "sampler"),
    [
        ("DataLoader(data, shuffle=True)", "DistributedSampler(data, fleet.worker_num(), fleet.worker_index())"),
        ("DataLoader(data, 4)", "DistributedSampler(data, fleet.worker_num(), fleet.worker_index(), shuffle=False)"),
        (
            "DataLoader(data, shuffle=s)",
            "DistributedSampler(data, fleet.worker_num(), fleet.worker_index(), shuffle=s)",
        ),
        (
            "DataLoader(make())",
            "DistributedSampler(train_data, fleet.worker_num(), fleet.worker_index(), shuffle=False)",
        ),
    ],
)
def test_a_loader_gets_a_sampler(loader: str, sampler: str) -> None:
    made = single(f"loader = {loader}")
    assert made.by_hand == []
    assert sampler in made.text
    assert ("set_epoch(epoch)" in made.text) == ("shuffle=False" not in sampler)


@pytest.mark.parametrize(
    "data",
    [
        "loader = DataLoader(data, sampler=WeightedRandomSampler(w, 3))",
        "loader = DataLoader(data, batch_sampler=b)",
        "loader = DataLoader(*given)",
        "loader = elsewhere()",
        "a = {'shuffle': True}\nloader, test = DataLoader(data, **a), DataLoader(data, **a)",
        "class D(torch.utils.data.IterableDataset):\n    pass\nloader = DataLoader(D())",
    ],
)
def test_data_that_is_not_divided_is_named(data: str) -> None:
    made = single(data)
    assert len(made.by_hand) == 1, hand(made)
    assert "fleet.worker_num()" in hand(made)


@pytest.mark.parametrize(
    ("data", "before", "after", "part"),
    [
        (LOADER, "fast = torch.compile(model)", "", "without the exchange"),
        (LOADER, "w = torch.utils.tensorboard.SummaryWriter()", "", "every worker would open it"),
        (LOADER, "", "ok = torch.save(model.state_dict(), 'x')", "every worker would write it"),
        (LOADER, "", "torch.save(model, 'x')", "Save model.module.state_dict()"),
        (LOADER, "", "torch.save(model.state_dict(), 'x')\nmodel.load_state_dict(torch.load('x'))", "barrier_worker()"),
        (LOADER, "device = 'cuda:1'", "", "a fixed GPU"),
        (LOADER, "log = open('log.txt', 'a')", "", "every worker would write this file"),
    ],
)
def test_what_goes_wrong_on_many_workers_is_named(data: str, before: str, after: str, part: str) -> None:
    made = single(data, before, after)
    assert len(made.by_hand) == 1, hand(made)
    assert part in hand(made)


def test_worker_0_writes() -> None:
    text = single(after="torch.save(model, 'x')\nif last:\n    torch.save(model.state_dict(), 'y')").text
    assert "if fleet.is_first_worker():\n    torch.save(model.module, 'x')\n" in text
    assert "if last and fleet.is_first_worker():\n    torch.save(model.state_dict(), 'y')\n" in text


def test_splits_without_a_seed_are_made_alike() -> None:
    script = single("a, b = torch.utils.data.random_split(d, [3, 4])\nloader = DataLoader(a)").text
    assert "random_split(d, [3, 4])" in script  # a seed is set
    text = script.replace("torch.manual_seed(0)\n", "").replace("from fleet import fleet\n", "")
    plain = "\n".join(line for line in text.splitlines() if "fleet" not in line)
    assert "generator=torch.Generator().manual_seed(0)" in migrate(plain + "\n").text


def test_a_compiled_model_is_wrapped_after_it_is_compiled() -> None:
    text = single(before="if fast:\n    model = torch.compile(model)").text
    assert "    model = torch.compile(model)\nmodel = fleet.distributed_model(model)\n" in text
    assert text.count("distributed_model") == 1


def test_a_model_is_wrapped_in_each_branch_that_makes_its_optimizer() -> None:
    made_by = "    optimizer = torch.optim.{}(model.parameters())".format
    branches = f"if a:\n{made_by('SGD')}\nelse:\n{made_by('Adam')}"
    script = single().text.replace("from fleet import fleet\n", "")
    plain = "\n".join(line for line in script.splitlines() if "fleet" not in line)
    made = migrate(
        plain.replace("optimizer = torch.optim.SGD(model.parameters(), lr=0.1)", branches).replace(
            "loader:", "DataLoader(d):"
        )
    )
    assert made.text.count("    model = fleet.distributed_model(model)\n") == 2
    assert made.text.count("    optimizer = fleet.distributed_optimizer(optimizer)\n") == 2


def test_data_parallel_goes() -> None:
    text = single(before="model = torch.nn.DataParallel(model)").text
    assert "DataParallel" not in text


@pytest.mark.parametrize("module", sorted(OTHER_PROGRAMS))
def test_programs_that_run_the_loop_are_named(module: str) -> None:
    package, _, name = module.partition(".")
    line = f"from {package} import {name}" if name else f"import {package}"
    made = migrate(f"import torch\n{line}\n")
    assert len(made.by_hand) == 1
    assert f"{module} runs the loop itself" in hand(made)


_TOTALS = """\
import torch
from torch.utils.data import DataLoader
model = torch.nn.Linear(1, 1)
loader = DataLoader(data)
def train():
    total = 0
    for x in loader:
        loss = model(x).mean()
        loss.backward()
        total += loss.item()
    print({shown})
train()
"""


@pytest.mark.parametrize(
    ("shown", "kind"),
    [
        ("total / len(loader.dataset)", "summed"),
        ("total / len(loader)", "noted"),
        ("total", "named"),
        ("total / 7", "named"),
    ],
)
def test_totals_of_one_workers_batches(shown: str, kind: str) -> None:
    source = ScriptSource(_TOTALS.format(shown=shown))
    port = ScriptPort(source)
    divide_totals(port)
    text = port.edits.text()
    assert ("    total = fleet.all_reduce(total)\n    print(" in text) == (kind == "summed")
    assert [found.by_hand for found in port.edits.findings] == {"summed": [], "noted": [False], "named": [True]}[kind]


def test_a_loss_that_is_a_sum_is_named() -> None:
    script = single().text.replace("from fleet import fleet\n", "").replace(".mean()", ".sum()")
    plain = "\n".join(line for line in script.splitlines() if "fleet" not in line)
    made = migrate(
        plain.replace("(model(x) - y).square().sum()", "torch.nn.functional.mse_loss(model(x), y, reduction='sum')")
    )
    assert "gradient_scale_configs" in hand(made)


def test_where_values_come_from() -> None:
    source = ScriptSource(_TOTALS.format(shown="1"))
    parts = TrainingParts(source)
    (loop,) = parts.batch_loops()
    assert [source.code(call) for call in parts.loaders_of(parts.items_of(loop))[0]] == ["DataLoader(data)"]  # type: ignore[arg-type]
    assert (root("model.body[0].head"), root("self.model.body"), root("net[0]")) == ("model", "self.model", "net")
    divide_data(ScriptPort(source))


def test_edits_that_overlap_are_an_error() -> None:
    edits = ScriptEdits(ScriptSource("x = 1\n"))
    edits.replace_span(0, 3, "a")
    edits.replace_span(2, 4, "b")
    with pytest.raises(AssertionError, match="two edits"):
        edits.text()


@pytest.mark.parametrize(
    ("seed", "noted"),
    [
        ("torch.manual_seed(args.seed)", "torch.manual_seed(args.seed + fleet.worker_index()) after the model is made"),
        ("torch.manual_seed(args.seed + rank)", ""),
    ],
)
def test_equal_masks_of_dropout_are_noted(seed: str, noted: str) -> None:
    made = single(f"{LOADER}\n{seed}\nmask = torch.nn.Dropout(0.1)")
    assert made.by_hand == []
    said = [found.todo for found in made.findings if "dropout" in found.why]
    assert [noted in todo for todo in said] == [True] * bool(noted), said
    assert not any("dropout" in found.why for found in single(f"{LOADER}\n{seed}").findings)


@pytest.mark.parametrize(
    ("seed", "draw", "noted"),
    [
        ("torch.manual_seed(0)", "torch.randn_like(x)", "torch.manual_seed(0 + fleet.worker_index()) after the model"),
        ("", "torch.randint(0, 9, (8,))", "torch.manual_seed(seed + fleet.worker_index()) after the model"),
        ("torch.manual_seed(rank)", "torch.randn_like(x)", ""),
        ("torch.manual_seed(0)", "torch.randn(8, generator=own)", ""),
        ("torch.manual_seed(0)", "x", ""),
    ],
)
def test_equal_draws_of_a_loop_are_noted(seed: str, draw: str, noted: str) -> None:
    text = (
        f"import torch\n\n{seed}\nnet = torch.nn.Linear(2, 1)\noptimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n"
    )
    text += f"for x in torch.utils.data.DataLoader([1]):\n    net({draw}).sum().backward()\n    optimizer.step()\n"
    said = [found.todo for found in migrate(text).findings if "draws" in found.why]
    assert [noted in todo for todo in said] == [True] * bool(noted), said


def test_a_block_is_indented_as_the_script_is() -> None:
    text = "import torch\n\ndef save(net):\n\ttorch.save(\n\t\tnet, 'a.pt')\n"
    loop = "net = torch.nn.Linear(2, 1)\noptimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n"
    loop += "for x in torch.utils.data.DataLoader([1]):\n\tnet(x).sum().backward()\n\toptimizer.step()\nsave(net)\n"
    made = migrate(text + loop).text
    assert "\tif fleet.is_first_worker():\n\t\ttorch.save(\n\t\t\tnet.module, 'a.pt')" in made
    assert "    " not in made


_MAKERS = {
    "method": "class Net(torch.nn.Module):\n    def configure_optimizers(self, lr):\n"
    "        return torch.optim.AdamW(self.parameters(), lr=lr)\n",
    "name": "def make(lr, net):\n    made = torch.optim.SGD(net.parameters(), lr=lr)\n    return made\n",
    "two": "def inner(net):\n    return torch.optim.SGD(net.parameters(), lr=0.1)\n\n"
    "def outer(lr, net):\n    return inner(net)\n",
    "none": "",
}


@pytest.mark.parametrize(
    ("maker", "call"),
    [
        ("method", "model.configure_optimizers(0.1)"),
        ("name", "make(0.1, model)"),
        ("two", "outer(0.1, net=model)"),
        ("none", "torch.optim.SGD(model.parameters(), lr=0.1)"),
    ],
)
def test_an_optimizer_is_wrapped_once_where_its_function_is_called(maker: str, call: str) -> None:
    head = f"import torch\nfrom torch.utils.data import DataLoader\n\n{_MAKERS[maker]}"
    loop = "for x in loader:\n    model(x).backward()\n    optimizer.step()\n"
    make = f"model = Net()\noptimizer = {call}\n"
    made = migrate(f"{head}loader = DataLoader(data)\n{make}{loop}")
    assert hand(made) == ""
    wraps = "optimizer = fleet.distributed_optimizer(optimizer)\nmodel = fleet.distributed_model(model)\n"
    assert make + wraps in made.text
    assert (made.text.count("distributed_optimizer("), made.text.count("distributed_model(")) == (1, 1)


def test_an_optimizer_of_a_function_that_nobody_calls_is_wrapped_in_it() -> None:
    loop = "for x in loader:\n    model(x).backward()\n"
    made = migrate(f"import torch\n{_MAKERS['method']}model, optimizer = build(0.1)\n{loop}")
    assert "return fleet.distributed_optimizer(torch.optim.AdamW" in made.text


@pytest.mark.parametrize(
    ("condition", "named"),
    [
        ("if args.adam:\n    optimizer = torch.optim.Adam(model.parameters())\n", True),
        (
            "if args.adam:\n    optimizer = torch.optim.Adam(model.parameters())\n"
            "else:\n    optimizer = torch.optim.SGD(model.parameters(), 0.1)\n",
            False,
        ),
    ],
)
def test_a_model_that_is_wrapped_under_a_condition_alone_is_named(condition: str, named: bool) -> None:
    loop = "for x in loader:\n    model(x).backward()\n"
    made = migrate(f"import torch\nloader = torch.utils.data.DataLoader(data)\n{condition}{loop}")
    assert ("under this condition alone the model is wrapped" in hand(made)) == named
    assert made.text.count("model = fleet.distributed_model(model)") == (1 if named else 2)


@pytest.mark.parametrize(
    ("test", "named"), [("value < 0.1", True), ("i > 3 and value < 0.1", True), ("i > 3", False), ("total", False)]
)
def test_a_loop_that_a_worker_would_leave_alone_is_named(test: str, named: bool) -> None:
    loop = (
        "for i, x in enumerate(loader):\n    loss = model(x)\n    loss.backward()\n    value = loss.item()\n"
        f"    if {test}:\n        break\n"
    )
    make = "optimizer = torch.optim.Adam(model.parameters())\n"
    made = migrate(f"import torch\nloader = torch.utils.data.DataLoader(data)\n{make}{loop}")
    assert (f"{test} | each worker would end by a number of its own" in hand(made)) == named


def test_a_checkpoint_that_is_loaded_before_training_is_not_named() -> None:
    made = single(LOADER, "model.load_state_dict(torch.load('x'))", "torch.save(model.state_dict(), 'x')")
    assert hand(made) == ""


@pytest.mark.parametrize("seed", ["torch.manual_seed(0)\n", ""])
def test_data_that_is_drawn_without_a_seed_is_noted(seed: str) -> None:
    loop = "for x in torch.utils.data.DataLoader(rows):\n    model(x, torch.rand(1)).backward()\n"
    make = "optimizer = torch.optim.Adam(model.parameters())\n"
    made = migrate(f"import torch\n{seed}rows = torch.randn(8, 4)\n{make}{loop}")
    noted = [found.what for found in made.findings if "without a seed" in found.why]
    assert noted == ([] if seed else ["torch.randn(8, 4)"])
