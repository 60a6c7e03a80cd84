"""Sums of squares in float32 or better."""

import pytest
import torch

from adaecho.adascale.squares import sum_of_squares


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 2e-6), (torch.float16, 2e-6)],
)
def test_sum_of_squares_is_accurate(dtype, tolerance):
    tensors = [
        torch.randn(3),
        torch.randn(700_000),
        torch.randn(16, 5, 3, 3),
        torch.randn(3, 9000),
        torch.randn(0),
    ]
    tensors = [tensor.to(dtype) for tensor in tensors]
    expected = sum(tensor.double().square().sum().item() for tensor in tensors)
    assert sum_of_squares(tensors).item() == pytest.approx(expected, rel=tolerance)


def test_half_precision_does_not_overflow():
    assert sum_of_squares([torch.full((10,), 6e4, dtype=torch.float16)]).item() == pytest.approx(
        10 * float(torch.tensor(6e4, dtype=torch.float16)) ** 2
    )


def test_strided_and_sparse_gradients():
    image = torch.randn(4, 3, 5, 5)
    expected = image.double().square().sum().item()
    for layout in (image.to(memory_format=torch.channels_last), image.transpose(0, 2)):
        assert sum_of_squares([layout]).item() == pytest.approx(expected, rel=1e-6)
    # Row 1 twice: the elements add up before they are squared.
    values = [[1.0, 2.0], [3.0, 4.0], [1.0, 1.0]]
    for rows in (5, 50_000):
        sparse = torch.sparse_coo_tensor([[1, 1, 3]], values, (rows, 2), check_invariants=True)
        assert sum_of_squares([sparse]).item() == pytest.approx(16 + 36 + 2)
    diagonal = torch.arange(40_000).expand(2, -1)
    sparse = torch.sparse_coo_tensor(diagonal, torch.ones(40_000), (40_000, 40_000), check_invariants=True)
    assert sum_of_squares([sparse]).item() == pytest.approx(40_000)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(bad):
    assert not sum_of_squares([torch.ones(3), torch.tensor([bad])]).isfinite()
