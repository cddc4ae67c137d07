"""Scripts of DistributedDataParallel: what is moved, what stays, and what is named."""

from __future__ import annotations

import difflib

import pytest

from fleet.migrate.from_ddp import BY_HAND
from fleet.migrate.migrate_command import migrate
from tests.fleet.migrate.cases import ddp, hand
from tests.test_readme import example


@pytest.mark.parametrize("page", ["docs/start/from_torch.md", "docs/start/from_torch.zh-CN.md"])
def test_the_page_shows_what_the_command_prints(page: str) -> None:
    before = example(page, "train.py")
    after = migrate(before).text
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), "train.py", "train.py", lineterm="", n=1)
    assert example(page, "train.diff") == "\n".join(lines) + "\n"


def test_a_plain_script_is_moved_whole() -> None:
    made = ddp(
        "rank = dist.get_rank()", "dist.barrier()\nif rank == 0:\n    torch.save(model.module.state_dict(), 'x')"
    )
    assert made.by_hand == []
    assert "fleet.init(is_collective=True)\nmodel = fleet.distributed_model(nn.Linear(4, 1))\n" in made.text
    assert "DistributedSampler(data, fleet.worker_num(), fleet.worker_index())" in made.text
    assert "rank = fleet.worker_index()" in made.text
    assert "fleet.barrier_worker()\nif rank == 0:" in made.text
    assert "model.module.state_dict()" in made.text
    assert "DistributedDataParallel" not in made.text  # the import, too


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("group = dist.new_group([0])", "hybrid_configs"),
        ("dist.all_reduce(x, group=g)", "new_group"),
        ("dist.barrier(group=g)", "fleet.barrier_worker()"),
        ("model = nn.SyncBatchNorm.convert_sync_batchnorm(model)", "sync_batch_norm"),
        ("other = DDP(model, static_graph=True)", "find_unused_parameters"),
        ("other = DDP(model, find_unused_parameters=unused)", "before fleet.init"),
        ("other = DDP(model, process_group=g)", "hybrid_configs"),
        ("other = DDP(model, broadcast_buffers=False)", "worker 0"),
        ("model.register_comm_hook(None, hook)", "fp16_allreduce"),
        ("model.require_backward_grad_sync = False", "no_sync"),
        ("fast = torch.device('cuda:3')", "its own GPU"),
        ("dist.some_new_call(x)", "default group"),
        ("dist.all_reduce(p.grad.data)", "Remove this exchange"),
        ("class Own(DDP):\n    pass", "fleet.distributed_model"),
        ("from torch.distributed.optim import ZeroRedundancyOptimizer\nz = ZeroRedundancyOptimizer(p)", "sharding"),
        ("writer = torch.utils.tensorboard.SummaryWriter()", "is_first_worker"),
    ],
)
def test_what_has_no_rule_is_named(line: str, advice: str) -> None:
    made = ddp(line)
    assert len(made.by_hand) == 1, hand(made)
    assert advice in hand(made)


def test_what_is_named_has_advice() -> None:
    assert all(text.endswith(".") for text in BY_HAND.values())


def test_collectives_of_the_default_group_stay_and_are_noted() -> None:
    made = ddp("dist.all_reduce(torch.ones(1))")
    assert "dist.all_reduce(torch.ones(1))" in made.text
    assert made.by_hand == []
    assert [found.what for found in made.findings if "stays" in found.why] == ["dist.all_reduce(torch.ones(1))"]


def test_the_rank_of_the_launcher_reaches_local_rank() -> None:
    option = "import argparse\np = argparse.ArgumentParser()\np.add_argument('--local_rank', type=int)"
    assert "'--local_rank', type=int, default=int(os.environ.get(\"LOCAL_RANK\", 0)))" in ddp(option).text
    kept = "local_rank = int(os.environ['LOCAL_RANK'])"
    assert kept in ddp(kept).text  # the launcher sets it


@pytest.mark.parametrize(
    "device", ["torch.device('cuda', rank)", 'f"cuda:{rank}"', "'cuda:%d' % rank", "'cuda:' + str(rank)"]
)
def test_devices_of_ranks_become_the_workers_own(device: str) -> None:
    text = ddp(f"device = {device}").text
    assert '"cuda" if torch.cuda.is_available() else "cpu"' in text
    assert "cuda:" not in text
    assert "', rank)" not in text


def test_the_class_of_a_wrapped_model_is_asked_for() -> None:
    text = ddp("raw = model.module if isinstance(model, DDP) else model").text
    assert "raw = model.module if isinstance(model, fleet.FleetModel) else model" in text
    assert "DDP" not in text


def test_a_batch_sampler_around_a_distributed_one_divides() -> None:
    batches = "b = torch.utils.data.BatchSampler(DistributedSampler(data), 4, True)"
    made = ddp(f"{batches}\nloader = DataLoader(data, batch_sampler=b)")
    assert made.by_hand == []


def test_a_chosen_gpu_stays_and_others_are_set_by_fleet() -> None:
    assert "set_device" not in ddp("torch.cuda.set_device(3)").text
    chosen = "if gpu is not None:\n    torch.cuda.set_device(gpu)"
    assert chosen in ddp(chosen).text


def test_an_init_under_a_condition_wraps_under_it() -> None:
    text = ddp().text  # for its form
    assert "if " not in text.split("optimizer = ")[1].split("loader")[0]
    script = (
        "import torch\nimport torch.distributed as dist\nfrom torch import nn\n"
        "from torch.nn.parallel import DistributedDataParallel\nif args.distributed:\n    dist.init_process_group()\n"
        "model = nn.Linear(1, 1)\nopt = torch.optim.SGD(model.parameters(), 0.1)\n"
        "if args.distributed:\n    model = DistributedDataParallel(model)\nif args.distributed:\n"
        "    dist.destroy_process_group()\n"
    )
    made = migrate(script + "for x in loader:\n    model(x).sum().backward()\n    opt.step()\n")
    assert "if args.distributed:\n    opt = fleet.distributed_optimizer(opt)\n" in made.text
    assert (
        "if args.distributed:\n    model = fleet.distributed_model(model)\nif args.distributed:\n    pass\n"
        in made.text
    )


def test_spawn_in_a_branch_is_named() -> None:
    made = ddp("import torch.multiprocessing as mp\nif many:\n    mp.spawn(main, nprocs=n, args=(1,))")
    assert "get_rank() and fleet.get_world_size()" in hand(made)
    assert "mp.spawn(main, nprocs=n, args=(1,))" in made.text


def test_a_loader_without_a_sampler_is_named() -> None:
    made = migrate(
        "import torch\nimport torch.distributed as dist\nfrom torch.utils.data import DataLoader\n"
        "dist.init_process_group()\nmodel = torch.nn.Linear(1, 1)\no = torch.optim.SGD(model.parameters(), 0.1)\n"
        "loader = DataLoader(data, shuffle=True)\nfor x in loader:\n    model(x).backward()\n    o.step()\n"
    )
    assert "7 DataLoader(data, shuffle=True) | its rows are not divided" in hand(made)
