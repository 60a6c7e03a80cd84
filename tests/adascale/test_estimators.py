"""Sums of squares, and the bias of the clipped estimators. test_optimizer.py compares the estimators."""

import pytest
import torch

from adaecho.adascale.estimators import estimate, gain_ratio, norms_by_group, total_squares


def squares_by_group(groups):
    return total_squares(norms_by_group(groups))


def sum_of_squares(tensors):
    return squares_by_group([tensors])[0]


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 2e-6), (torch.float16, 2e-6)],
)
def test_sum_of_squares_is_accurate(dtype, tolerance):
    shapes = ((3,), (700_000,), (16, 5, 3, 3), (3, 9000), (0,))
    tensors = [torch.randn(shape).to(dtype) for shape in shapes]
    expected = sum(tensor.double().square().sum().item() for tensor in tensors)
    assert sum_of_squares(tensors).item() == pytest.approx(expected, rel=tolerance)


def test_groups_of_mixed_dtypes_and_an_empty_group():
    one, other = torch.randn(7), torch.randn(30_000, dtype=torch.float64)
    half, pair = torch.randn(5).bfloat16(), torch.randn(3, dtype=torch.complex64)
    squares = squares_by_group([[one, half, other], [], [pair]])
    expected = [sum(tensor.double().square().sum().item() for tensor in (one, half, other)), 0.0]
    assert squares.tolist() == pytest.approx([*expected, pair.abs().double().square().sum().item()], rel=1e-6)


def test_strided_and_sparse_gradients():
    image = torch.randn(4, 3, 5, 5)
    expected = image.double().square().sum().item()
    for layout in (image.to(memory_format=torch.channels_last), image.transpose(0, 2)):
        assert sum_of_squares([layout]).item() == pytest.approx(expected, rel=1e-6)
    # Row 1 occurs twice. Its elements are added before they are squared.
    values = [[1.0, 2.0], [3.0, 4.0], [1.0, 1.0]]
    for rows in (5, 50_000):
        sparse = torch.sparse_coo_tensor([[1, 1, 3]], values, (rows, 2), check_invariants=True)
        assert sum_of_squares([sparse]).item() == pytest.approx(16 + 36 + 2)
    diagonal = torch.arange(40_000).expand(2, -1)
    sparse = torch.sparse_coo_tensor(diagonal, torch.ones(40_000), (40_000, 40_000), check_invariants=True)
    assert sum_of_squares([sparse]).item() == pytest.approx(40_000)


@pytest.mark.parametrize(("directions", "percent_low"), [(100, 3.5), (1000, 1.1)])
def test_clipping_makes_the_gain_low_where_noise_dominates(directions, percent_low):
    """S = 2 and sigma^2 / mu^2 = 300 over independent directions, as estimators.py states."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for _ in range(20):
        noise = torch.randn(1000, 2, directions, generator=generator, dtype=torch.float64)
        gradients = noise * (300 / directions) ** 0.5
        gradients[..., 0] += 1  # mu^2 = 1
        sums, mean = gradients.square().sum((1, 2)), gradients.mean(1).square().sum(1)
        pairs = zip(sums.tolist(), mean.tolist(), strict=True)
        samples += [estimate(*pair, 2, 2.0) for pair in pairs]
    variance, square = (sum(of) / len(samples) for of in zip(*samples, strict=True))
    true = (300 + 1) / (300 / 2 + 1)
    low = 100 * (1 - gain_ratio(variance, square, 2.0) / true)
    assert low == pytest.approx(percent_low, abs=0.15)
