"""What a loss was made of, and which passes through a model are training."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fleet.verify.draw_replay import Draws
from fleet.verify.engines.training_engine import TrainingEngine
from fleet.verify.gradient_causes import nodes_behind
from fleet.verify.loader_replay import ReplayedBatches
from fleet.verify.record_files import RecordFile, read_record
from fleet.verify.run_recording import Recording, _add_noise, has_running_statistics


def test_a_loss_that_adds_up_its_samples_says_so() -> None:
    scores, labels = torch.randn(4, 3, requires_grad=True), torch.tensor([0, 1, 2, 0])
    summed = torch.nn.functional.cross_entropy(scores, labels, reduction="sum")
    assert any(node.endswith(" sum") for node in nodes_behind([summed / 2]))
    assert not any(node.endswith(" sum") for node in nodes_behind([torch.nn.functional.cross_entropy(scores, labels)]))


def test_a_gradient_whose_terms_cancel_has_the_rounding_errors_of_large_ones() -> None:
    gradients = [torch.ones(100), torch.zeros(100), torch.full((100,), 0.1)]
    before = [one.clone() for one in gradients]
    _add_noise(gradients, 1e-3, 1)
    changes = [float((one - old).norm()) for one, old in zip(gradients, before, strict=True)]
    for change, size in zip(changes, (1e-2, 1e-5, 1e-3), strict=True):
        assert 0.7 * size < change < 1.4 * size


def test_a_call_says_whether_it_is_given_rows_that_need_gradients(tmp_path: Path) -> None:
    recording = recording_in(tmp_path)
    for given in (torch.ones(2, 2, requires_grad=True), torch.ones(2, requires_grad=True), torch.ones(2, 2)):
        with recording.collective("gather", ([given], {})):
            pass
    recording.record.close()
    assert [one["gathers"] for one in read_record(tmp_path, "collective")] == [True, False, False]


def recording_in(folder: Path) -> Recording:
    record = RecordFile(folder)
    return Recording(record, ReplayedBatches(record, lambda entered: None), Draws(folder), 2, {})


def watched(recording: Recording, model: nn.Module) -> nn.Module:
    for module in model.modules():
        module.register_forward_pre_hook(recording.before_forward)
        module.register_forward_hook(recording.after_forward)
    return model


def test_a_model_that_is_followed_is_not_trained(tmp_path: Path) -> None:
    """A pipeline that is cut from a plain model follows it with torch.fx, which calls its layers."""
    recording = recording_in(tmp_path)
    model = watched(recording, nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Tanh()))
    fx.symbolic_trace(model)
    assert (recording.roots, recording.current["forward"]) == ({}, [])
    model(torch.ones(1, 2))
    assert [call["module"] for call in recording.current["forward"]] == ["0.0", "0", "1", ""]
    recording.record.close()


def test_the_first_place_that_draws_without_being_seen_is_noted(tmp_path: Path) -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> Any:
            return self.last(torch.dropout(self.first(x), 0.5, self.training))

    recording = recording_in(tmp_path)
    model = watched(recording, Noisy())
    recording.draws.begin()
    model.eval()(torch.ones(1, 2))
    assert recording.draws.unseen == {}
    model.train()(torch.ones(1, 2))
    place = recording.draws.unseen
    assert (place["module"], place["type"], place["ended"]) == ("", "Noisy", False)
    assert place["where"].startswith(__file__)
    recording.record.close()


def test_an_optimizer_that_ends_with_the_script_had_its_parameters(tmp_path: Path) -> None:
    recording = recording_in(tmp_path)
    model = watched(recording, nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recording.optimizers.append(weakref.ref(optimizer))
    model(torch.ones(1, 2)).sum().backward()
    recording.before_update(optimizer)
    recording.finish_update()
    del optimizer
    gc.collect()
    assert recording.coverage()["held"] == ["bias", "weight"]
    recording.record.close()


def test_an_optimizer_may_hold_a_parameter_by_a_tensor_in_its_memory(tmp_path: Path) -> None:
    recording = recording_in(tmp_path)
    model = watched(recording, nn.Linear(2, 2, bias=False))
    for other, held in ((model.weight.detach(), ["weight"]), (model.weight.detach().clone(), [])):
        optimizer = torch.optim.SGD([other], lr=0.1)
        recording.optimizers.append(weakref.ref(optimizer))
        model(torch.ones(1, 2)).sum().backward()
        other.grad = torch.full_like(other, 3.0)
        recording._covered["held"].clear()
        recording.before_update(optimizer)
        assert recording._pending[0]["gradients"]["weight"]["s"] == (36.0 if held else 4.0)
        model.zero_grad()
        recording.finish_update()
        assert recording.coverage()["held"] == held
        recording.optimizers.clear()
        recording.steps = 9
    recording.record.close()


def test_a_norm_of_the_scripts_own_keeps_statistics() -> None:
    own = nn.Linear(2, 2)
    assert not has_running_statistics(own)
    for name in ("running_mean", "running_var"):
        own.register_buffer(name, torch.ones(2))
    assert has_running_statistics(own)
    assert has_running_statistics(nn.BatchNorm1d(2))
    assert not has_running_statistics(nn.BatchNorm1d(2, track_running_stats=False))


def test_a_step_inside_the_step_of_another_optimizer_is_a_part_of_its_update(tmp_path: Path) -> None:
    recording = recording_in(tmp_path)
    model = watched(recording, nn.Linear(2, 2))
    outer, inner = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    model(torch.ones(1, 2)).sum().backward()
    recording.before_step(outer, (outer,), {})  # ends with an error
    recording._pending.clear()
    recording.before_step(outer, (outer,), {})
    recording.before_step(inner, (inner,), {})
    recording.after_update(inner)
    assert len(recording._pending) == 1
    recording.steps = 9
    recording.after_update(outer)
    recording.record.close()
    assert [one["optimizer"] for one in read_record(tmp_path, "update")] == [0]


@pytest.mark.parametrize(("training", "also"), [(False, None), (True, None), (False, True), (True, False)])
def test_a_model_that_is_trained_in_evaluation_mode_alone_has_idle_dropout(
    tmp_path: Path, training: bool, also: bool | None
) -> None:
    recording = recording_in(tmp_path)
    model = watched(recording, nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for mode in (training, also):
        if mode is not None:
            model.train(mode)(torch.ones(1, 2)).sum().backward()
    recording.before_update(optimizer)
    assert recording._pending[0]["idle"] == ([] if training or also else ["1"])
    recording.record.close()


def test_a_step_with_a_closure_has_the_gradients_that_the_closure_made(tmp_path: Path) -> None:
    recording = recording_in(tmp_path)
    model = watched(recording, nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(recording.before_step)
    optimizer.register_step_post_hook(recording.after_update)

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).sum()
        loss.backward()
        return loss.item()

    assert isinstance(optimizer.step(closure), float)
    update = read_record(tmp_path, "update")[0]
    assert sorted(update["gradients"]) == ["bias", "weight"]
    assert update["forward"]
    recording.record.close()


def test_an_optimizer_that_is_made_after_another_one_has_ended_counts_for_itself(tmp_path: Path) -> None:
    """Python may give it the id of the first."""
    recording = recording_in(tmp_path)
    model = watched(recording, nn.Linear(2, 2))
    for _ in range(2):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 2)).sum().backward()
        recording.before_update(optimizer)
        recording.after_update(optimizer)
        del optimizer
        gc.collect()
    assert recording.counts() == {"0": 1, "1": 1}
    recording.record.close()


def test_what_begins_a_pass_without_training_is_written_down(tmp_path: Path) -> None:
    recording = recording_in(tmp_path)
    norm = nn.BatchNorm1d(2, affine=False)
    frozen, trained = nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2)
    with torch.no_grad():
        for model in (frozen, trained, frozen):
            watched(recording, model)(torch.ones(2, 2))
    watched(recording, norm)(torch.ones(2, 2))
    recording.record.close()
    begun = {one["model"]: list(one["values"]) for one in read_record(tmp_path, "start")}
    assert begun == {"frozen Linear 1": ["weight", "bias"], "frozen BatchNorm1d 1": ["running_mean", "running_var"]}


def test_the_statistics_of_each_model_count_from_its_own_pass(tmp_path: Path) -> None:
    """A second wrapper sends worker 0's when its own model is called: those of before are not what it trains with."""
    recording = recording_in(tmp_path)
    critic, generator = (watched(recording, nn.BatchNorm1d(2)) for _ in range(2))
    for model in (generator, critic):  # known by an update before
        model(torch.ones(2, 2))
    recording.current["entry"].clear()
    recording._entered.clear()
    recording.entry_buffers(critic)
    generator.running_mean.fill_(3.0)
    recording.entry_buffers(generator)
    generator.running_mean.fill_(5.0)
    recording.entry_buffers(generator)  # a second pass
    means = {name: one["s"] for name, one in recording.current["entry"].items() if name.endswith("running_mean")}
    assert means == pytest.approx({"running_mean": 18.0, "model 2: running_mean": 0.02})
    recording.record.close()


def test_one_process_takes_the_rates_and_momenta_of_the_workers(tmp_path: Path) -> None:
    """A schedule that is made for N workers may change both at each update; the settings are the script's own after."""
    recording = recording_in(tmp_path)
    model = watched(recording, nn.Linear(1, 1, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1), betas=(0.8, 0.9))
    recording.scheduled = {"0/1": [{"lr": 0.5, "betas": [0.7, 0.99]}]}
    model(torch.ones(1, 1)).sum().backward()
    recording.before_update(optimizer)
    group = optimizer.param_groups[0]
    assert (float(group["lr"]), group["betas"]) == (0.5, (0.7, 0.99))
    recording.after_update(optimizer)
    assert (group["lr"], group["betas"]) == (torch.tensor(0.1), (0.8, 0.9))
    recording.record.close()
    (written,) = read_record(tmp_path, "update")
    assert written["scheduled"] == [{"lr": pytest.approx(0.1), "betas": [0.8, 0.9]}]


def test_noise_changes_the_part_of_a_divided_gradient() -> None:
    """In the one process a part of ``fully_shard`` is the whole."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        gradient = distribute_tensor(torch.ones(64), init_device_mesh("cpu", (1,)), [Shard(0)])
        _add_noise([gradient], 1e-2, update=1)
        change = gradient.to_local() - 1
    finally:
        dist.destroy_process_group()
    assert 0.05 < float(change.norm()) < 0.12


def test_places_in_a_batch_are_no_outputs(tmp_path: Path) -> None:
    recording = recording_in(tmp_path)
    packed = nn.utils.rnn.pack_padded_sequence(torch.ones(2, 3, 1), torch.tensor([2, 3]), True, enforce_sorted=False)
    watched(recording, nn.GRU(1, 4))(packed)
    (call,) = recording.current["forward"]
    assert [out["shape"] for out in call["outs"]] == [[5, 4], [1, 2, 4]]
    recording.record.close()


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_batch_norm_that_exchanges_something_is_synced(tmp_path: Path, exchanges: bool) -> None:
    recording = recording_in(tmp_path)

    class Norm(nn.BatchNorm1d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if exchanges:
                recording.exchanged()
            return super().forward(x)

    watched(recording, nn.Sequential(nn.Linear(2, 2), Norm(2)))(torch.ones(3, 2))
    recording.exchanged()  # outside of it
    assert recording.current["synced"] is exchanges
    recording.record.close()


def test_one_process_begins_with_the_weights_of_worker_0(tmp_path: Path) -> None:
    kept = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    for n, first in enumerate((True, False)):
        (tmp_path / str(n)).mkdir()
        worker = recording_in(tmp_path / str(n))
        worker.is_first = first
        watched(worker, kept)(torch.ones(2, 2))
        worker.record.close()
    assert [path.parent.name for path in tmp_path.rglob("initial*.npz")] == ["0"]
    (tmp_path / "alone").mkdir()
    alone = recording_in(tmp_path / "alone")
    alone.initial = tmp_path / "0"
    other = watched(alone, nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    other(torch.ones(2, 2))
    alone.record.close()
    assert torch.equal(other[0].weight, kept[0].weight)


def trained(recording: Recording, optimizer: torch.optim.Optimizer, *models: nn.Module) -> dict[str, Any]:
    """Returns what is written down for an update after a pass through each of ``models``."""
    recording.steps = 9
    optimizer.zero_grad()
    for model in models:
        model(torch.ones(1, 2)).sum().backward()
    recording.before_update(optimizer)
    update = {**recording._pending[0], **recording.current}
    recording.after_update(optimizer)
    return update


def test_a_part_of_a_model_may_be_called_by_itself(tmp_path: Path) -> None:
    """It is known by the model's pass before, and is no model of its own."""
    recording = recording_in(tmp_path)
    part = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    model = watched(recording, nn.Sequential(part, nn.Linear(2, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert len(trained(recording, optimizer, model)["gradients"]) == 4
    assert (sorted(trained(recording, optimizer, part)["gradients"])) == ["0.0.bias", "0.0.weight"]
    assert trained(recording, optimizer, part.eval())["idle"] == ["0.1"]
    assert trained(recording, optimizer, part, part.train())["idle"] == []
    part.eval()
    assert trained(recording, optimizer, part, model)["idle"] == []  # the model trains, with this dropout turned off
    assert len(recording.roots) == 1
    recording.record.close()


@pytest.mark.parametrize("shares", ["part", "two models"])
def test_what_a_model_shares_with_one_before_begins_and_counts_once(tmp_path: Path, shares: str) -> None:
    """The workers train it by then, each in its own way where nothing averages."""
    recording = recording_in(tmp_path)
    part = nn.Linear(2, 2)
    first = part if shares == "part" else nn.Sequential(part, nn.Tanh())
    watched(recording, first)
    model = nn.Sequential(part, nn.Linear(2, 2))
    for hooked in (model, model[1]):
        hooked.register_forward_pre_hook(recording.before_forward)
        hooked.register_forward_hook(recording.after_forward)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for one in (first, model, first):
        trained(recording, optimizer, one)
    recording.record.close()
    name = "" if shares == "part" else "0."
    begun = [list(one["values"]) for one in read_record(tmp_path, "start")]
    assert begun == [[f"{name}weight", f"{name}bias"], ["model 2: 1.weight", "model 2: 1.bias"]]
    assert sorted(read_record(tmp_path, "update")[-1]["parameters"]) == sorted(sum(begun, []))
    # One process takes worker 0's values of the rest alone.
    alone = recording_in(tmp_path / "alone")
    alone.initial = tmp_path
    other = nn.Linear(2, 2)
    watched(alone, other)(torch.ones(1, 2))
    with torch.no_grad():
        other.weight.fill_(7.0)
    joined = nn.Sequential(other, nn.Linear(2, 2))
    joined.register_forward_pre_hook(alone.before_forward)
    joined(torch.ones(1, 2))
    alone.record.close()
    assert other.weight.tolist() == [[7.0, 7.0], [7.0, 7.0]]


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


def test_a_pass_around_the_wrapper_has_its_line(tmp_path: Path) -> None:
    class Engine(TrainingEngine):
        wrappers = (Wrapper,)

    recording = recording_in(tmp_path)
    recording.engines = [Engine()]
    part, other = nn.Linear(2, 2), watched(recording, nn.Linear(2, 2))
    model = watched(recording, Wrapper(nn.Sequential(part, nn.Linear(2, 2))))
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    ways = ((model,), (model, other), (model, part), (model.module,))
    found = ["around" in trained(recording, optimizer, *passes)["lines"] for passes in ways]
    recording.record.close()
    assert found == [False, False, True, True]
