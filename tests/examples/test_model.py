"""The ResNet of the example: published sizes, shapes, and the two stems."""

from __future__ import annotations

import pytest
import torch

from tests.examples.scripts import example_module

model = example_module("model")

# He et al. 2015 and the weights everybody uses: 1000 classes, stride in the 3x3 convolution.
PUBLISHED = {18: 11_689_512, 34: 21_797_672, 50: 25_557_032, 101: 44_549_160, 152: 60_192_808}


@pytest.mark.parametrize(("depth", "count"), PUBLISHED.items())
def test_parameter_counts_are_the_published_ones(depth: int, count: int) -> None:
    with torch.device("meta"):
        network = model.ResNet(depth)
    assert model.num_parameters(network) == count


def test_names_and_shapes_are_those_of_the_usual_weights() -> None:
    with torch.device("meta"):
        state = model.ResNet(50).state_dict()
    assert len(state) == 320
    assert state["conv1.weight"].shape == (64, 3, 7, 7)
    assert state["layer1.0.downsample.0.weight"].shape == (256, 64, 1, 1)
    assert state["layer3.5.conv2.weight"].shape == (256, 256, 3, 3)
    assert state["layer4.2.bn3.running_var"].shape == (2048,)
    assert state["fc.weight"].shape == (1000, 2048)


@pytest.mark.parametrize("depth", [18, 50])
@pytest.mark.parametrize(("stem", "size", "deepest"), [("imagenet", 64, 2), ("small", 16, 2)])
def test_logits_and_the_deepest_feature_map_have_the_expected_size(
    depth: int, stem: str, size: int, deepest: int
) -> None:
    network = model.ResNet(depth, 7, stem=stem, width=4)
    maps = []
    network.layer4.register_forward_hook(lambda module, inputs, output: maps.append(output.shape[-2:]))
    assert network(torch.randn(2, 3, size, size)).shape == (2, 7)
    assert maps == [(deepest, deepest)]


def test_every_parameter_receives_a_gradient() -> None:
    for depth in (18, 50):
        network = model.ResNet(depth, 3, stem="small", width=4)
        network(torch.randn(4, 3, 8, 8)).square().sum().backward()
        assert [name for name, p in network.named_parameters() if p.grad is None] == []


def test_a_block_is_a_residual_block() -> None:
    """With the last scale of a block at zero the block passes its (positive) input through."""
    block = model.BasicBlock(4, 4, stride=1)
    torch.nn.init.zeros_(block.bn2.weight)
    x = torch.rand(2, 4, 5, 5)
    torch.testing.assert_close(block(x), x)


def test_the_seed_decides_the_weights() -> None:
    networks = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        networks.append(model.ResNet(18, 3, width=4).state_dict()["layer1.0.conv1.weight"])
    assert torch.equal(networks[0], networks[1])
    assert not torch.equal(networks[0], networks[2])


@pytest.mark.parametrize(
    ("arguments", "message"), [((19, 10, "small"), "depths 18, 34"), ((18, 10, "tiny"), "stem is")]
)
def test_wrong_arguments_are_refused(arguments: tuple[int, int, str], message: str) -> None:
    depth, num_classes, stem = arguments
    with pytest.raises(ValueError, match=message):
        model.ResNet(depth, num_classes, stem=stem)
