"""ResNet with 18, 34, 50, 101 or 152 layers, in plain torch.

The structure and the weight initialisation follow He et al., "Deep Residual Learning for Image Recognition" (2015)
and "Delving Deep into Rectifiers" (2015). In the bottleneck blocks the 3x3 convolution carries the stride, so the
parameter counts, and the names and shapes in ``state_dict()``, are those of the usual published weights.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

# depth -> (bottleneck blocks or basic ones, number of blocks in each of the four stages)
STAGES: dict[int, tuple[bool, tuple[int, int, int, int]]] = {
    18: (False, (2, 2, 2, 2)),
    34: (False, (3, 4, 6, 3)),
    50: (True, (3, 4, 6, 3)),
    101: (True, (3, 4, 23, 3)),
    152: (True, (3, 8, 36, 3)),
}
STEMS = ("imagenet", "small")


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut; the block of ResNet 18 and 34."""

    expansion = 1

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample = shortcut(in_channels, channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the block's output; ``x`` is (batch, in_channels, height, width)."""
        y = torch.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return torch.relu(y + self.downsample(x))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut; the block of ResNet 50, 101 and 152."""

    expansion = 4

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        out_channels = channels * self.expansion
        self.conv1 = nn.Conv2d(in_channels, channels, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, out_channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.downsample = shortcut(in_channels, out_channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the block's output; ``x`` is (batch, in_channels, height, width)."""
        y = torch.relu(self.bn1(self.conv1(x)))
        y = torch.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return torch.relu(y + self.downsample(x))


class ResNet(nn.Module):
    """A residual network that returns one logit per class.

    Args:
        depth: 18, 34, 50, 101 or 152.
        num_classes: size of the last layer.
        stem: ``imagenet`` is the published 7x7 convolution of stride 2 followed by max pooling, which divides height
            and width by 4; ``small`` is one 3x3 convolution of stride 1, for images below about 64 pixels.
        width: channels of the first stage; 64 is the published value.

    Raises:
        ValueError: ``depth`` or ``stem`` is not one of those above.
    """

    def __init__(self, depth: int, num_classes: int = 1000, *, stem: str = "imagenet", width: int = 64) -> None:
        super().__init__()
        if depth not in STAGES:
            raise ValueError(f"ResNet has depths {', '.join(map(str, STAGES))}; got {depth!r}.")
        if stem not in STEMS:
            raise ValueError(f"stem is one of {', '.join(STEMS)}; got {stem!r}.")
        bottleneck, num_blocks = STAGES[depth]
        block = Bottleneck if bottleneck else BasicBlock
        large = stem == "imagenet"
        self.conv1 = nn.Conv2d(3, width, 7 if large else 3, 2 if large else 1, padding=3 if large else 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1) if large else nn.Identity()
        channels = [width * 2**i for i in range(4)]
        self.layer1 = stage(block, num_blocks[0], width, channels[0], stride=1)
        self.layer2 = stage(block, num_blocks[1], channels[0] * block.expansion, channels[1], stride=2)
        self.layer3 = stage(block, num_blocks[2], channels[1] * block.expansion, channels[2], stride=2)
        self.layer4 = stage(block, num_blocks[3], channels[2] * block.expansion, channels[3], stride=2)
        self.fc = nn.Linear(channels[3] * block.expansion, num_classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits (batch, num_classes) of images (batch, 3, height, width)."""
        x = self.maxpool(torch.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(x.mean(dim=(2, 3)))
        return logits


def shortcut(in_channels: int, out_channels: int, stride: int) -> nn.Module:
    """Returns the identity, or a 1x1 projection where the shape changes."""
    if stride == 1 and in_channels == out_channels:
        return nn.Identity()
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 1, stride, bias=False),
        nn.BatchNorm2d(out_channels),
    )


def stage(
    block: type[BasicBlock] | type[Bottleneck], num_blocks: int, in_channels: int, channels: int, stride: int
) -> nn.Sequential:
    """Returns ``num_blocks`` blocks, of which the first one changes the size."""
    first = block(in_channels, channels, stride)
    rest = [block(channels * block.expansion, channels, 1) for _ in range(num_blocks - 1)]
    return nn.Sequential(first, *rest)


def initialise(model: nn.Module) -> None:
    """Draws convolution weights from He's normal distribution (fan out)."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def num_parameters(model: nn.Module) -> int:
    """Returns the number of trainable numbers in ``model``."""
    return sum(parameter.numel() for parameter in model.parameters())
