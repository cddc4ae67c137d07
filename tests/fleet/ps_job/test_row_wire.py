"""a_sync_configs["wire"]: rows and dense parameters travel rounded, and training goes on as it would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fleet
from fleet.errors import ConfigError, FleetError
from fleet.facade import Fleet
from fleet.role_maker import Role, UserDefinedRoleMaker
from tests.fleet.ps_job.test_server_job import make_adagrad, make_sgd, served
from tests.helpers.served import WideAndDeep, batches, run_job, train


def strategy(wire: str, a_sync: bool = False, **configs: Any) -> fleet.DistributedStrategy:
    made = fleet.DistributedStrategy()
    made.a_sync = a_sync
    made.a_sync_configs = {"wire": wire, **configs}
    return made


def trained(made: fleet.DistributedStrategy, make: Any = make_sgd, *, different: int = 12) -> list[Any]:
    """Returns what each of two workers found: losses, weights, forms of its messages; of 12 batches some differ."""

    def work(own: Fleet, rank: int) -> Any:
        model, optimizer = served(own, made, make)
        losses = train(model, optimizer, batches(different, rank, 2) * (12 // different))
        own.barrier_worker()
        client = own.session.server_job.trainer.connection.client
        found = losses, model.out.weight.detach().clone(), client.config.wire
        own.stop_worker()
        return found

    return run_job(work, num_servers=2, num_workers=2, strategy=made)


@pytest.mark.parametrize("wire", ["bfloat16", "int8"])
@pytest.mark.parametrize("make", [make_sgd, make_adagrad])
def test_sync_training_is_near_float32_and_the_same_in_each_run(wire: str, make: Any) -> None:
    exact, first, again = (trained(strategy(form), make) for form in ("float32", wire, wire))
    for one, other, plain in zip(first, again, exact, strict=True):
        assert one[2] == wire
        assert one[0] == other[0]
        assert torch.equal(one[1], other[1])
        assert not torch.equal(one[1], plain[1]), "nothing was rounded"
        torch.testing.assert_close(torch.tensor(one[0]), torch.tensor(plain[0]), atol=0.02, rtol=0.02)


@pytest.mark.parametrize("wire", ["bfloat16", "int8"])
def test_tables_start_from_the_weights_of_the_model(wire: str, tmp_path: Path) -> None:
    """They were rounded on their way to the servers, which hold float32."""

    def work(own: Fleet, rank: int) -> torch.Tensor:
        torch.manual_seed(0)
        net = WideAndDeep()
        start = net.words.weight.detach().clone()
        own.distributed_optimizer(make_sgd(net.parameters()), made)
        own.distributed_model(net)
        own.init_worker()
        own.save_persistables(str(tmp_path))
        own.stop_worker()
        return start

    made = strategy(wire)
    (start,) = run_job(work, num_servers=2, strategy=made)
    found = fleet.ps.Reader(tmp_path).lookup("words", torch.arange(20))
    torch.testing.assert_close(torch.as_tensor(found), start, atol=0, rtol=0)


@pytest.mark.parametrize("configs", [{}, {"max_staleness": 1}, {"thread_pool_size": 2}])
def test_async_training_with_int8_learns(configs: dict[str, Any]) -> None:
    for losses, _, wire in trained(strategy("int8", a_sync=True, **configs), make_adagrad, different=1):
        assert wire == "int8"
        assert losses[-1] < losses[0]


def test_geo_refuses_rounded_rows() -> None:
    maker = UserDefinedRoleMaker(current_id=0, role=Role.WORKER, worker_num=1, server_endpoints=["127.0.0.1:1"])
    with pytest.raises(FleetError, match="'wire'.*is 'int8' and the mode is geo: a worker trains on copies of its own"):
        Fleet().init(maker, strategy=strategy("int8", a_sync=True, k_steps=4))


def test_other_forms_are_refused() -> None:
    made = fleet.DistributedStrategy()
    with pytest.raises(ConfigError, match="wire"):
        made.a_sync_configs = {"wire": "float16"}
