"""Options in the loops of Lightning: the weights of Fleet's own loop, and what is refused."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric import Fabric
from lightning.pytorch import callbacks
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from lightning.pytorch.plugins.precision import MixedPrecision

import fleet
from fleet.integrations.fabric import FleetStrategy as FabricStrategy
from fleet.integrations.lightning import FleetStrategy as TrainerStrategy
from fleet.meta_parallel import ColumnParallelLinear, RowParallelLinear
from tests.helpers import lightning_training as training
from tests.helpers.lightning_cases import Adversarial, Manual, sharding
from tests.helpers.lightning_training import Classifier, Scored


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Returns SGD with momentum."""
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def adam(parameters: Any) -> torch.optim.Optimizer:
    """Returns Adam."""
    return torch.optim.Adam(parameters, 0.01)


HALF = {"amp": True, "amp_configs": {"dtype": "float16"}}
MERGE = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 3}}
# Name: options, optimizer, settings of the network.
ROWS: dict[str, tuple[dict[str, Any], Callable[[Any], Any], dict[str, Any]]] = {
    "plain": ({}, sgd, {}),
    "dropout": ({}, sgd, {"dropout": 0.3}),
    "amp bfloat16": ({"amp": True, "amp_configs": {"dtype": "bfloat16"}}, sgd, {}),
    "amp float16": (HALF, sgd, {}),
    "gradient_merge": (MERGE, sgd, {}),
    "localsgd": ({"localsgd": True, "localsgd_configs": {"k_steps": 3}}, sgd, {}),
    "adaptive_localsgd": ({"adaptive_localsgd": True}, sgd, {}),
    "sharding 1": (sharding(1), adam, {}),
    "sharding 2": (sharding(2), adam, {}),
    "sharding 3": (sharding(3), adam, {}),
    "recompute": ({"recompute": True, "recompute_configs": {"checkpoints": ["net.0"]}}, sgd, {}),
    "sync_batch_norm": ({"sync_batch_norm": True}, sgd, {"norm": True}),
    "lamb": ({"lamb": True}, adam, {}),
    "lars": ({"lars": True}, sgd, {}),
    "fp16_allreduce": ({"fp16_allreduce": True}, sgd, {}),
    "dgc": ({"dgc": True, "dgc_configs": {"rampup_begin_step": 0, "sparsity": [0.5]}}, sgd, {}),
    "check_nan_inf": ({"check_nan_inf": True}, sgd, {}),
}
SUM = {"gradient_scale_configs": {"scale_strategy": "sum"}}


def weights(rank: int, world_size: int) -> dict[str, Any]:
    """Returns, for each row with and without clipping, the weights of Fleet's loop, Lightning's two and plain torch."""
    found: dict[str, Any] = {}
    for name, (options, optimizer, network) in ROWS.items():
        for clip in (None, 0.2):
            if clip and name == "dgc":
                continue  # it keeps a part of what is clipped for later steps
            module = Classifier(optimizer, **network)
            training.by_trainer(options, module, gradient_clip_val=clip)
            row = {"Trainer": training.weights_of(module)}
            norm = None if clip is None else {"max_norm": clip}
            row["Fabric"] = training.by_fabric(options, optimizer, clip=norm, **network)
            row["Fleet"] = training.by_fleet(options, optimizer, clip=clip, **network)
            row["torch"] = training.by_torch(optimizer, clip=clip, **network)
            found[f"{name}, clip {clip}"] = row
    training.forget_session()
    return found


class Small(Manual):
    """A loss so small that float16 gradients vanish unless they are scaled."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Updates at every batch."""
        optimizer: Any = self.optimizers()
        loss = torch.nn.functional.cross_entropy(self(batch[0]), batch[1]) * 1e-7
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class SmallAutomatic(Classifier):
    """The same loss, which Lightning differentiates itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Returns the loss."""
        return super().training_step(batch, batch_idx) * 1e-7


def small_losses(rank: int, world_size: int) -> dict[str, Any]:
    """Returns the weights that automatic and manual optimization leave, after float16 steps on tiny gradients."""
    found = {}
    for kind in (Small, SmallAutomatic):
        module = kind(lambda parameters: torch.optim.SGD(parameters, 1e6))
        training.by_trainer(HALF, module)
        found[kind.__name__] = training.weights_of(module)
    training.forget_session()
    return found


def _fit(options: Mapping[str, Any] | None, module: Classifier | None = None, **trainer_options: Any) -> pl.Trainer:
    return training.by_trainer(options, module or Classifier(), **trainer_options)


def _fabric(options: Mapping[str, Any] | None, **fabric_options: Any) -> Fabric:
    training.forget_session()
    fabric = Fabric(accelerator="cpu", strategy=FabricStrategy(options), **fabric_options)
    fabric.launch()
    return fabric


def _second_strategy() -> None:
    training.forget_session()
    fleet.init(is_collective=True, strategy=fleet.DistributedStrategy())
    pl.Trainer(**training.QUIET, strategy=TrainerStrategy({"amp": True})).fit(Classifier())


def _late_norms() -> None:
    training.forget_session()
    fleet.init(is_collective=True)
    pl.Trainer(**training.QUIET, strategy=TrainerStrategy(), sync_batchnorm=True).fit(Classifier(norm=True))


class OtherSync(TorchSyncBatchNorm.__mro__[1]):  # type: ignore[misc]
    """A plugin of a user that shares layers in its own way."""

    def apply(self, model: Any) -> Any:
        """Returns ``model``."""
        return model

    revert = apply


def _saved_in_a_window(folder: str) -> None:
    trainer = _fit({**MERGE, "gradient_merge_configs": {"k_steps": 5}}, max_epochs=1)
    trainer.save_checkpoint(os.path.join(folder, "open.ckpt"))


def _unsafe_file(folder: str) -> None:
    path = os.path.join(folder, "any.ckpt")
    _fit({}, max_epochs=1).save_checkpoint(path)
    Fabric(accelerator="cpu", strategy=FabricStrategy()).load(path, weights_only=False)


def _resumed_from_code(folder: str) -> None:
    path = os.path.join(folder, f"code{os.environ['PADDLE_TRAINER_ID']}.ckpt")
    torch.save({"state_dict": Scored()}, path)
    training.forget_session()
    pl.Trainer(**training.QUIET, strategy=TrainerStrategy()).fit(Classifier(), ckpt_path=path)


def _compiled() -> None:
    _fabric({}).setup(torch.compile(Scored(), backend="eager"))


def _scaler(options: Mapping[str, Any]) -> None:
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    _fit(options, plugins=[plugin])


REFUSED: dict[str, tuple[str, Callable[[str], Any]]] = {
    "devices": ("asks for 3 processes.*started 2", lambda _: _fit({}, devices=3)),
    "devices of one": ("asks for 1 processes.*started 2", lambda _: _fabric({}, devices=1)),
    "devices listed": ("asks for 4 processes", lambda _: _fit({}, devices="4")),
    "num_nodes": ("runs on 1 node", lambda _: _fabric({}, num_nodes=2)),
    "float16 on a CPU": ("Write precision='bf16-mixed'", lambda _: _fit({}, precision="16-mixed")),
    "two precisions": ("both choose", lambda _: _fit(HALF, precision="bf16-mixed")),
    "two precisions of Fabric": ("both choose", lambda _: _fabric(HALF, precision="bf16-true")),
    "scaler and merging": ("strategy.gradient_merge counts", lambda _: _scaler(MERGE)),
    "pipeline": ("pp_degree", lambda _: _fit({"hybrid_configs": {"pp_degree": 2}})),
    "pipeline of Fabric": ("pp_degree", lambda _: _fabric({"hybrid_configs": {"pp_degree": 2}})),
    "servers": ("parameter servers", lambda _: _fit({"a_sync": True})),
    "plan": (
        "ColumnParallelLinear",
        lambda _: _fit({"hybrid_configs": {"mp_degree": 2}, "tensor_parallel_configs": {"plan": {"net.0": "column"}}}),
    ),
    "experts": ("ep_degree", lambda _: _fabric({"hybrid_configs": {"ep_degree": 2}})),
    "sequences": ("sep_degree", lambda _: _fit({"hybrid_configs": {"sep_degree": 2}})),
    "reproducible": ("each logical worker whole batches", lambda _: _fit({"reproducible": True})),
    "reproducible in Fabric": ("each logical worker whole batches", lambda _: _fabric({"reproducible": True})),
    "to_static": ("configure_model", lambda _: _fit({"to_static": True})),
    "second strategy": ("A job has one strategy", lambda _: _second_strategy()),
    "late sync_batchnorm": ("Set it there", lambda _: _late_norms()),
    "layer sync": ("OtherSync changes layers", lambda _: _fit({}, plugins=[OtherSync()])),
    "averages of parts": (
        "copies whole parameters",
        lambda _: _fit(sharding(3), callbacks=[callbacks.EMAWeightAveraging()]),
    ),
    "manual on parts": ("automatic_optimization = False", lambda _: _fit(sharding(3), Manual())),
    "two optimizers": ("find_unused_parameters = True", lambda _: _fit({}, Adversarial())),
    "open window": ("multiple of k_steps", _saved_in_a_window),
    "unsafe file": ("would run code", _unsafe_file),
    "code in a file": ("eights.only", _resumed_from_code),
    "compiled module": ("strategy.to_static = True", lambda _: _compiled()),
    "object": ("passed a", lambda _: _fabric({}).broadcast(Scored())),
    "unknown option": ("'amp'", lambda _: _fabric({"ampz": True})),
    "no strategy": ("takes a fleet.DistributedStrategy", lambda _: _fabric(3)),  # type: ignore[arg-type]
    "LBFGS": ("mean of all workers", lambda _: _fit({}, Classifier(lambda p: torch.optim.LBFGS(p, 0.1)))),
}


def refusals(rank: int, world_size: int, folder: str) -> dict[str, str]:
    """Returns the error that each entry of ``REFUSED`` ends with, empty where none came."""
    found = {}
    for name, (_, attempt) in REFUSED.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                attempt(folder)
            found[name] = ""
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    training.forget_session()
    return found


def exchanges(rank: int, world_size: int) -> dict[str, Any]:
    """Returns what the collective calls of Fabric return."""
    fabric = _fabric({})
    mine = torch.tensor([float(rank + 1)], requires_grad=True)
    (fabric.all_gather(mine, sync_grads=True) * torch.tensor([[2.0], [3.0]])).sum().backward()
    sent = {"list": [1, None, 2.5], "text": "x", "tensor": torch.arange(3)} if rank == 0 else None
    found = {
        "broadcast": fabric.broadcast(sent),
        "from 1": fabric.broadcast(f"worker {rank}", src=1),
        "gathered": fabric.all_gather(torch.tensor([rank, 7])),
        "gradient": mine.grad,
        "mean": fabric.all_reduce({"a": torch.tensor([rank + 1.0])})["a"],  # type: ignore[call-overload]
        "sum": fabric.all_reduce(torch.tensor(rank + 1), reduce_op="sum"),
        "max": fabric.strategy.reduce(torch.tensor(rank), reduce_op=torch.distributed.ReduceOp.MAX),
        "whole mean": fabric.all_reduce(torch.tensor(rank * 4)),
        "text": fabric.strategy.reduce("text"),
        "all": fabric.strategy.reduce_boolean_decision(rank == 0),
        "any": fabric.strategy.reduce_boolean_decision(rank == 0, all=False),
        "who": [fabric.global_rank, fabric.local_rank, fabric.node_rank, fabric.world_size, str(fabric.device)],
        "zero": fabric.is_global_zero,
        "rows": fabric.strategy.distributed_sampler_kwargs,
    }
    fabric.barrier()
    with fabric.rank_zero_first():
        pass
    training.forget_session()
    return found


class Divided(Classifier):
    """The network with layers that are divided over the workers along mp, made where a session runs."""

    def __init__(self) -> None:
        super().__init__(adam)
        self.net = torch.nn.Identity()

    def configure_model(self) -> None:
        """Makes the layers, once."""
        if isinstance(self.net, torch.nn.Identity):
            self.net = divided_network()


def divided_network() -> torch.nn.Sequential:
    """Returns the network; the seed decides its weights."""
    torch.manual_seed(3)
    first = ColumnParallelLinear(6, 8, has_bias=True, gather_output=False)
    return torch.nn.Sequential(first, torch.nn.Tanh(), RowParallelLinear(8, 3, has_bias=True, input_is_parallel=True))


def divided_layers(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Returns the whole weights that Fleet's loop leaves, those of the Trainer, and of one that was resumed."""
    options = {"hybrid_configs": {"mp_degree": 2}}
    path = os.path.join(folder, "divided.ckpt")
    training.by_trainer(options, Divided(), batch=8, max_epochs=1, gradient_clip_val=0.2).save_checkpoint(path)
    training.forget_session()
    module = Divided()
    module.batch = 8
    trainer = pl.Trainer(**training.QUIET, max_epochs=2, gradient_clip_val=0.2, strategy=TrainerStrategy(options))
    trainer.fit(module, ckpt_path=path)
    found = {"resumed": trainer.strategy.lightning_module_state_dict()}
    straight = training.by_trainer(options, Divided(), batch=8, gradient_clip_val=0.2)
    found["Trainer"] = straight.strategy.lightning_module_state_dict()
    training.forget_session()
    strategy = fleet.DistributedStrategy()
    strategy.update(options)
    fleet.init(is_collective=True, strategy=strategy)
    scored = Scored()
    scored.net = divided_network()
    optimizer = fleet.distributed_optimizer(adam(scored.parameters()))
    model = fleet.distributed_model(scored)
    for _ in range(2):
        for x, y in training.loader(8, shared=True):
            optimizer.zero_grad()
            model(x, y).backward()
            torch.nn.utils.clip_grad_norm_(optimizer.parameters(), 0.2)
            optimizer.step()
    found["Fleet"] = model.full_state_dict()
    training.forget_session()
    return found


def everything(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Returns the results of all of the above, from one start of the processes."""
    return {
        "weights": weights(rank, world_size),
        "small losses": small_losses(rank, world_size),
        "refusals": refusals(rank, world_size, folder),
        "exchanges": exchanges(rank, world_size),
        "divided layers": divided_layers(rank, world_size, folder),
    }
