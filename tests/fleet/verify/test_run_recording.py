"""What a loss was made of, and which passes through a model are training."""

from pathlib import Path

import torch
from torch import fx, nn

from fleet.verify.draw_replay import Draws
from fleet.verify.loader_replay import ReplayedBatches
from fleet.verify.record_files import RecordFile
from fleet.verify.run_recording import Recording, _nodes


def test_a_loss_that_adds_up_its_samples_says_so() -> None:
    scores, labels = torch.randn(4, 3, requires_grad=True), torch.tensor([0, 1, 2, 0])
    summed = torch.nn.functional.cross_entropy(scores, labels, reduction="sum")
    assert any(node.endswith(" sum") for node in _nodes([summed / 2]))
    assert not any(node.endswith(" sum") for node in _nodes([torch.nn.functional.cross_entropy(scores, labels)]))


def test_a_model_that_is_followed_is_not_trained(tmp_path: Path) -> None:
    """A pipeline that is cut from a plain model follows it with torch.fx, which calls its layers."""
    record = RecordFile(tmp_path)
    recording = Recording(record, ReplayedBatches(record, lambda entered: None), Draws(tmp_path), 2, {})
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Tanh())
    for module in model.modules():
        module.register_forward_pre_hook(recording.before_forward)
        module.register_forward_hook(recording.after_forward)
    fx.symbolic_trace(model)
    assert (recording.roots, recording.current["forward"]) == ({}, [])
    model(torch.ones(1, 2))
    assert [call["module"] for call in recording.current["forward"]] == ["0.0", "0", "1", ""]
    record.close()
