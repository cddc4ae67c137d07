"""Scripts as users of Lightning write them, each trained by Fleet's workers and by Lightning alone in one process.

A case takes the options (``None`` is plain Lightning) and a folder, and returns what must be the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric import Fabric
from lightning.pytorch import callbacks
from torch import Tensor, nn
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from fleet.integrations.fabric import FleetStrategy as FabricStrategy
from tests.helpers import lightning_training as training
from tests.helpers.lightning_training import CLASSES, Classifier, Scored, by_trainer, weights_of

Options = Mapping[str, Any] | None
Case = Callable[[Options, str], dict[str, Any]]


def batch(options: Options) -> int:
    """Returns the rows of a batch of one worker: one process takes those of both."""
    return 8 if options is None else 4


def adam(parameters: Any) -> torch.optim.Optimizer:
    """Returns the optimizer of most cases."""
    return torch.optim.Adam(parameters, 0.01)


def trained(options: Options, module: Classifier, **trainer_options: Any) -> pl.Trainer:
    """Trains ``module``; returns the Trainer."""
    return by_trainer(options, module, batch(options), **trainer_options)


# ---- Trainer ---------------------------------------------------------------------------------------------------------


def accumulate(options: Options, folder: str) -> dict[str, Any]:
    """accumulate_grad_batches, whose last update of an epoch takes fewer batches, and a norm of gradients."""
    module = Classifier(adam)
    trained(options, module, accumulate_grad_batches=4, gradient_clip_val=0.1)
    return weights_of(module)


def clip_values(options: Options, folder: str) -> dict[str, Any]:
    """gradient_clip_algorithm="value"."""
    module = Classifier()
    trained(options, module, gradient_clip_val=0.01, gradient_clip_algorithm="value")
    return weights_of(module)


def step_schedule(options: Options, folder: str) -> dict[str, Any]:
    """configure_optimizers returns a dictionary, with a schedule over steps."""

    def configured(parameters: Any) -> Any:
        optimizer = torch.optim.AdamW(parameters, 0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=12)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    module = Classifier(configured)
    trainer = trained(options, module)
    return {**weights_of(module), "lr": trainer.optimizers[0].param_groups[0]["lr"]}


class Validated(Classifier):
    """Validates, tests and predicts; its metrics are those of all workers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.accuracy, self.mean = MulticlassAccuracy(CLASSES, average="micro"), MeanMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Logs a loss that Lightning averages, and metrics that synchronize themselves."""
        logits = self(batch[0])
        loss = nn.functional.cross_entropy(logits, batch[1])
        self.accuracy(logits, batch[1])
        self.mean(loss, weight=len(batch[1]))
        self.log("val_loss", loss, sync_dist=True)
        self.log("accuracy", self.accuracy)
        self.log("mean", self.mean)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """Returns the logits."""
        return self(batch[0])

    def val_dataloader(self) -> Any:
        """Returns the rows of this worker."""
        return self.train_dataloader()

    test_dataloader = predict_dataloader = val_dataloader


def early_stopping(options: Options, folder: str) -> dict[str, Any]:
    """EarlyStopping, ReduceLROnPlateau, the best checkpoint, then test and validate with it."""

    def configured(parameters: Any) -> Any:
        optimizer = adam(parameters)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": schedule, "monitor": "val_loss"}

    module = Validated(configured)
    best = callbacks.ModelCheckpoint(os.path.join(folder, "best"), monitor="val_loss", save_last=True)
    stop = callbacks.EarlyStopping("val_loss", min_delta=0.01, patience=1)
    trainer = trained(options, module, max_epochs=8, enable_checkpointing=True, callbacks=[best, stop])
    saved = torch.load(best.best_model_path, weights_only=True)
    tested = trainer.test(module, verbose=False)[0]
    again = trainer.validate(module, ckpt_path="best", verbose=False)[0]
    return {
        **weights_of(module),
        **{f"saved {name}": value for name, value in saved["state_dict"].items()},
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
        "epochs": trainer.current_epoch,
        "files": sorted(os.listdir(os.path.join(folder, "best"))),
        **{f"test {name}": value for name, value in tested.items()},
        **{f"validate {name}": value for name, value in again.items()},
    }


def resumed(options: Options, folder: str) -> dict[str, Any]:
    """Resumes from a checkpoint; the result is also that of a run without a break, bit for bit."""

    def configured(parameters: Any) -> Any:
        optimizer = adam(parameters)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 4), "interval": "step"}]

    path = os.path.join(folder, "half.ckpt")
    trained(options, Classifier(configured), max_epochs=1).save_checkpoint(path)
    module, straight = Classifier(configured), Classifier(configured)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    module.batch = batch(options)
    training.forget_session()
    strategy: Any = "auto" if options is None else training.TrainerStrategy(options)
    trainer = pl.Trainer(**training.QUIET, max_epochs=2, strategy=strategy)
    trainer.fit(module, ckpt_path=path)
    found = weights_of(module)
    trained(options, straight)
    for name, value in weights_of(straight).items():
        assert torch.equal(found[name], value), name
    return found


def second_fit(options: Options, folder: str) -> dict[str, Any]:
    """Another Trainer goes on with the same module, and then tests it."""
    module = Validated()
    trained(options, module, max_epochs=1)
    strategy: Any = "auto" if options is None else training.TrainerStrategy(options)
    trainer = pl.Trainer(**training.QUIET, max_epochs=1, strategy=strategy)
    trainer.fit(module)
    return {**weights_of(module), **trainer.test(module, verbose=False)[0]}


def without_fit(options: Options, folder: str) -> dict[str, Any]:
    """Tests and predicts with a module that was not trained."""
    training.forget_session()
    module = Validated()
    module.batch = batch(options)
    strategy: Any = "auto" if options is None else training.TrainerStrategy(options)
    trainer = pl.Trainer(**training.QUIET, strategy=strategy)
    predicted = torch.cat(trainer.predict(module)).sum(0)
    return {**trainer.test(module, verbose=False)[0], "sums": trainer.strategy.reduce(predicted, reduce_op="sum")}


def hooks(options: Options, folder: str) -> dict[str, Any]:
    """Hooks around the update that users override."""
    norms = []

    class Hooked(Classifier):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            gradients = [p.grad for g in optimizer.param_groups for p in g["params"]]
            norms.append([(g.full_tensor() if hasattr(g, "full_tensor") else g).norm() for g in gradients])

        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / (1 + batch_idx)
            optimizer.step(closure=closure)

        def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
            self.clip_gradients(optimizer, 0.3, "norm")

    module = Hooked()
    trained(options, module)
    return {**weights_of(module), "norms": torch.tensor(norms)}


def shared_norms(options: Options, folder: str) -> dict[str, Any]:
    """Trainer(sync_batchnorm=True), twice with the same arguments."""
    module = Classifier(norm=True)
    trainer = trained(options, module, max_epochs=1, sync_batchnorm=options is not None)
    strategy: Any = "auto" if options is None else training.TrainerStrategy(options)
    again = {"max_epochs": 1, "sync_batchnorm": options is not None}
    trainer = pl.Trainer(**training.QUIET, **again, strategy=strategy)
    trainer.fit(module)
    return weights_of(module)


def averaged(options: Options, folder: str) -> dict[str, Any]:
    """An average of the weights that a callback keeps."""
    module = Classifier()
    trained(options, module, callbacks=[callbacks.EMAWeightAveraging()])
    return weights_of(module)


def doubles(options: Options, folder: str) -> dict[str, Any]:
    """precision="64-true"."""
    module = Classifier()
    trained(options, module, precision="64-true")
    assert module.net[0].weight.dtype == torch.float64
    return weights_of(module)


def hyperparameters(options: Options, folder: str) -> dict[str, Any]:
    """A checkpoint that a process without Fleet loads as Lightning does."""

    class Described(Classifier):
        def __init__(self, width: int = 3) -> None:
            super().__init__(adam)
            self.save_hyperparameters()

        def on_save_checkpoint(self, checkpoint: Any) -> None:
            checkpoint["mine"] = 7

    path = os.path.join(folder, "described.ckpt")
    trained(options, Described(5), max_epochs=1).save_checkpoint(path)
    loaded = Described.load_from_checkpoint(path, weights_only=True)
    return {**weights_of(loaded), "width": loaded.hparams.width}


class Manual(Classifier):
    """Calls backward and step itself: two batches for each update."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Updates at every second batch."""
        optimizer: Any = self.optimizers()
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1]) / 2
        if batch_idx % 2 == 0:
            with optimizer.toggle_model(sync_grad=False):
                self.manual_backward(loss)
            return
        self.manual_backward(loss)
        self.clip_gradients(optimizer, 0.5, "norm")
        optimizer.step()
        optimizer.zero_grad()


def manual(options: Options, folder: str) -> dict[str, Any]:
    """Manual optimization, with gradients of one batch that are not exchanged."""
    module = Manual()
    trained(options, module)
    return weights_of(module)


class Adversarial(Classifier):
    """Two networks with an optimizer each, which take turns in every step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net = nn.ModuleDict({"generator": nn.Linear(6, 6), "judge": nn.Linear(6, 1)})
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Updates the generator, then the judge."""
        first, second = self.optimizers()  # type: ignore[misc]
        make, judge, (x, _) = self.net["generator"], self.net["judge"], batch
        yes, no = torch.ones(len(x), 1), torch.zeros(len(x), 1)
        loss = nn.functional.binary_cross_entropy_with_logits
        self.toggle_optimizer(first)
        self._update(first, loss(judge(make(x)), yes))
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        self._update(second, loss(judge(x + 1), yes) + loss(judge(make(x).detach()), no))
        self.untoggle_optimizer(second)
        for schedule in self.lr_schedulers():  # type: ignore[union-attr]
            schedule.step()

    def _update(self, optimizer: Any, loss: Tensor) -> None:
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def configure_optimizers(self) -> Any:
        """Returns two optimizers of different kinds, and their schedules."""
        first = torch.optim.Adam(self.net["generator"].parameters(), 0.01)
        second = torch.optim.SGD(self.net["judge"].parameters(), 0.1)
        return [first, second], [torch.optim.lr_scheduler.StepLR(optimizer, 4) for optimizer in (first, second)]


def adversarial(options: Options, folder: str) -> dict[str, Any]:
    """Two optimizers under manual optimization, toggled."""
    module = Adversarial()
    trained(options, module)
    return weights_of(module)


# ---- Fabric ----------------------------------------------------------------------------------------------------------


def _fabric(options: Options, **fabric_options: Any) -> Fabric:
    training.forget_session()
    strategy: Any = "auto" if options is None else FabricStrategy(options)
    fabric = Fabric(accelerator="cpu", strategy=strategy, **fabric_options)
    fabric.launch()
    return fabric


def fabric_accumulate(options: Options, folder: str) -> dict[str, Any]:
    """no_backward_sync for two of three batches, then clip_gradients."""
    fabric, scored = _fabric(options), Scored()
    model, optimizer = fabric.setup(scored, adam(scored.parameters()))
    for number, (x, y) in enumerate(fabric.setup_dataloaders(training.loader(batch(options)))):
        waits = number % 3 != 2
        with fabric.no_backward_sync(model, enabled=waits):
            fabric.backward(model(x, y) / 3)
        if not waits:
            fabric.clip_gradients(model, optimizer, max_norm=0.1)
            optimizer.step()
            optimizer.zero_grad()
    return weights_of(scored)


def fabric_parts(options: Options, folder: str) -> dict[str, Any]:
    """setup_module and setup_optimizers apart, a scheduler, loss.backward() and a method that is marked."""

    class Named(Scored):
        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            return self(x, y) * 2

    fabric, scored = _fabric(options), Named()
    model: Any = fabric.setup_module(scored)
    model.mark_forward_method("loss")
    optimizer: Any = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), 0.1))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for x, y in fabric.setup_dataloaders(training.loader(batch(options))):
        optimizer.zero_grad()
        model.loss(x, y).backward()
        fabric.clip_gradients(model, optimizer, clip_val=0.05)
        optimizer.step()
        schedule.step()
    assert model.module is scored
    return {**weights_of(scored), "lr": optimizer.param_groups[0]["lr"]}


def fabric_checkpoint(options: Options, folder: str) -> dict[str, Any]:
    """fabric.save, and fabric.load into new objects, which go on as the old ones did."""
    path = os.path.join(folder, "fabric.ckpt")

    def epoch(fabric: Fabric, state: dict[str, Any]) -> None:
        for x, y in fabric.setup_dataloaders(training.loader(batch(options))):
            state["optimizer"].zero_grad()
            fabric.backward(state["model"](x, y))
            state["optimizer"].step()

    def objects(fabric: Fabric) -> tuple[Scored, dict[str, Any]]:
        scored = Scored()
        model, optimizer = fabric.setup(scored, adam(scored.parameters()))
        return scored, {"model": model, "optimizer": optimizer, "epoch": 0}

    fabric = _fabric(options)
    scored, state = objects(fabric)
    epoch(fabric, state)
    fabric.save(path, {**state, "epoch": 1})
    epoch(fabric, state)
    expected = weights_of(scored)
    fabric = _fabric(options)
    scored, state = objects(fabric)
    fabric.load(path, state)
    assert state["epoch"] == 1
    epoch(fabric, state)
    found = weights_of(scored)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    saved = torch.load(path, weights_only=True)
    moments = {f"moments {place}": entry["exp_avg"] for place, entry in saved["optimizer"]["state"].items()}
    return {**found, **{f"saved {name}": value for name, value in saved["model"].items()}, **moments}


def fabric_two_models(options: Options, folder: str) -> dict[str, Any]:
    """Two models with an optimizer each."""
    fabric = _fabric(options)
    torch.manual_seed(5)
    net = nn.ModuleDict({"generator": nn.Linear(6, 6), "judge": nn.Linear(6, 1)})
    make, first = fabric.setup(net["generator"], torch.optim.SGD(net["generator"].parameters(), 0.1))
    judge, second = fabric.setup(net["judge"], torch.optim.SGD(net["judge"].parameters(), 0.1))
    loss = nn.functional.binary_cross_entropy_with_logits
    for x, _ in fabric.setup_dataloaders(training.loader(batch(options))):
        yes = torch.ones(len(x), 1)
        first.zero_grad()
        fabric.backward(loss(judge(make(x)), yes))
        first.step()
        second.zero_grad()
        fabric.backward(loss(judge(x + 1), yes) + loss(judge(make(x).detach()), 0 * yes))
        second.step()
    return weights_of(nn.ModuleDict({"net": net}))


def fabric_callbacks(options: Options, folder: str) -> dict[str, Any]:
    """Callbacks, which fabric.call and Fabric itself call."""
    seen: list[str] = []

    class Recorder:
        def on_after_setup(self, fabric: Any, module: Any) -> None:
            seen.append("setup")

        def on_after_optimizer_step(self, strategy: Any, optimizer: Any) -> None:
            seen.append("step")

        def mine(self, text: str) -> None:
            seen.append(text)

    fabric, scored = _fabric(options, callbacks=[Recorder()]), Scored()
    model, optimizer = fabric.setup(scored, adam(scored.parameters()))
    x, y = next(iter(training.loader(batch(options))))
    fabric.backward(model(x, y))
    optimizer.step()
    fabric.call("mine", text="called")
    return {"seen": seen}


TRAINER: list[Case] = [
    accumulate, clip_values, step_schedule, early_stopping, resumed, second_fit, without_fit, hooks, shared_norms,
    averaged, doubles, hyperparameters, manual, adversarial,
]  # fmt: skip
FABRIC: list[Case] = [fabric_accumulate, fabric_parts, fabric_checkpoint, fabric_two_models, fabric_callbacks]
CASES = {case.__name__: case for case in TRAINER + FABRIC}
UNUSED = {"find_unused_parameters": True}
OF_CASE: dict[str, Mapping[str, Any]] = {"adversarial": UNUSED}


def sharding(stage: int) -> dict[str, Any]:
    """Returns the options of sharding."""
    return {"sharding": True, "sharding_configs": {"stage": stage}}


STAGES = {
    1: ("manual", "averaged", "adversarial", "hyperparameters", "fabric_two_models"),
    2: ("clip_values", "hooks", "second_fit", "shared_norms", "fabric_accumulate", "fabric_parts"),
    3: ("accumulate", "early_stopping", "resumed", "without_fit", "fabric_checkpoint"),
}


def chosen(kind: str) -> list[tuple[str, str, dict[str, Any]]]:
    """Returns a title, the case and its options, of those of ``kind``: "trainer" or "fabric"."""
    names = [case.__name__ for case in (TRAINER if kind == "trainer" else FABRIC)]
    rows = [(name, name, {}) for name in names]
    rows += [(f"{n} stage {stage}", n, sharding(stage)) for stage, some in STAGES.items() for n in some if n in names]
    return [(title, name, {**options, **OF_CASE.get(name, {})}) for title, name, options in rows]


def run(rank: int, world_size: int, kind: str, folder: str) -> dict[str, Any]:
    """Returns the result of every case of ``kind``; in one process, of Lightning alone."""
    results: dict[str, Any] = {}
    for title, name, options in chosen(kind):
        if world_size == 1 and name in results:
            continue
        place = os.path.join(folder, title.replace(" ", "_"))
        os.makedirs(place, exist_ok=True)
        results[title] = CASES[name](options if world_size > 1 else None, place)
    training.forget_session()
    return results
