"""ResNets for CIFAR: numbers of the paper, and blocks against plain loops."""

import itertools
import math

import pytest
import torch
from torch import nn

from adaecho.models.images import BasicBlock, cifar_resnet


def test_it_is_the_papers_net_at_any_width() -> None:
    # He et al., table 6, rounds it to 0.46 M.
    assert sum(parameter.numel() for parameter in cifar_resnet().parameters()) == 464_154
    narrow = [m.out_channels for m in cifar_resnet(8, channels=8).modules() if isinstance(m, nn.Conv2d)]
    assert narrow == [8, 8, 8, 16, 16, 32, 32]
    x, shapes = torch.zeros(2, 3, 32, 32), []
    for layer in cifar_resnet(num_classes=7).eval():
        x = layer(x)
        shapes.append(tuple(x.shape[1:]))
    assert shapes[2:8:5] + shapes[8:13:4] + shapes[13:18:4] == [
        (channels, side, side) for channels, side in ((16, 32), (32, 16), (64, 8)) for _ in range(2)
    ]
    assert shapes[-1] == (7,)


@pytest.mark.parametrize("depth", [2, 9, 31, -4])
def test_other_depths_are_refused(depth: int) -> None:
    with pytest.raises(ValueError, match=f"depth={depth}: must be 6n"):
        cifar_resnet(depth)


def _slow_shortcut(x: torch.Tensor, channels: int) -> torch.Tensor:
    number, in_channels, height, width = x.shape
    out = torch.zeros(number, channels, height // 2, width // 2)
    for n, c, i, j in itertools.product(*map(range, (number, in_channels, height // 2, width // 2))):
        out[n, c, i, j] = x[n, c, 2 * i, 2 * j]
    return out


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_shortcut_is_the_identity_or_every_second_pixel_and_zeros(
    memory_format: torch.memory_format,
) -> None:
    torch.manual_seed(0)
    block = BasicBlock(4, 8).eval()
    nn.init.zeros_(block.bn2.weight)  # the residual branch gives 0, so the block is relu of the shortcut
    x = torch.randn(2, 4, 6, 6).to(memory_format=memory_format)
    torch.testing.assert_close(block(x), _slow_shortcut(x, 8).relu(), rtol=0, atol=0)
    plain = BasicBlock(4, 4).eval()
    nn.init.zeros_(plain.bn2.weight)
    torch.testing.assert_close(plain(x), x.relu(), rtol=0, atol=0)


def test_a_block_adds_its_branch_before_the_last_relu() -> None:
    torch.manual_seed(0)
    block = BasicBlock(4, 8)  # in training mode: statistics of the batch
    x = torch.randn(3, 4, 6, 6)

    def normalized(y: torch.Tensor) -> torch.Tensor:
        mean, variance = y.mean((0, 2, 3), keepdim=True), y.var((0, 2, 3), unbiased=False, keepdim=True)
        return (y - mean) / torch.sqrt(variance + 1e-5)

    inner = normalized(nn.functional.conv2d(x, block.conv1.weight, stride=2, padding=1)).relu()
    branch = normalized(nn.functional.conv2d(inner, block.conv2.weight, padding=1))
    torch.testing.assert_close(block(x), (branch + _slow_shortcut(x, 8)).relu())


def test_weights_have_variance_two_over_fan_in() -> None:
    torch.manual_seed(0)
    widest = [m for m in cifar_resnet().modules() if isinstance(m, nn.Conv2d) and m.in_channels == 64]
    weights = torch.cat([conv.weight.detach().flatten() for conv in widest])
    expected = math.sqrt(2 / (64 * 9))
    # The standard deviation of n normal numbers is known to within 1 / sqrt(2 n).
    assert abs(weights.std().item() / expected - 1) < 5 / math.sqrt(2 * len(weights))
    assert abs(weights.mean().item()) < 5 * expected / math.sqrt(len(weights))
