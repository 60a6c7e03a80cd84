"""On a GPU, the numbers equal those of the CPU."""

import pytest
import torch

from adaecho import AdaScale
from tests.adascale.helpers import accumulating, assert_identical, backward, batches, mlp, weights
from tests.adascale.test_estimators import sum_of_squares

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]


def test_norms_of_mixed_types():
    tensors = [torch.randn(5), torch.randn(7, dtype=torch.float64), torch.randn(3).half()]
    expected = sum(tensor.double().square().sum().item() for tensor in tensors)
    assert sum_of_squares([tensor.cuda() for tensor in tensors]).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("fused", [False, True])
def test_steps_equal_those_of_the_processor(fused):
    model, expected = mlp().cuda(), mlp()
    rate = torch.tensor(0.05, device="cuda") if fused else 0.05
    on_gpu = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, fused=fused or None)
    optimizer = AdaScale(on_gpu, num_gradients_to_accumulate=2)
    plain = accumulating(expected)
    for micro_batches in batches(6, 2):
        for one, by, device in ((model, optimizer, "cuda"), (expected, plain, "cpu")):
            by.zero_grad()
            backward(one, [(x.to(device), y.to(device)) for x, y in micro_batches])
        assert optimizer.gain() == pytest.approx(plain.gain(), rel=1e-5)
        optimizer.step()
        plain.step()
    torch.testing.assert_close([one.cpu() for one in weights(model)], weights(expected), rtol=1e-5, atol=1e-6)


def test_a_step_that_is_not_finite_is_skipped():
    model = mlp().cuda()
    optimizer = AdaScale(torch.optim.SGD(model.parameters(), lr=0.05), num_gradients_to_accumulate=2)
    (x, y), other = next(batches(1, 2))
    before = weights(model)
    backward(model, [(one.cuda(), labels.cuda()) for one, labels in ((x / 0, y), other)])
    optimizer.step()
    assert_identical(weights(model), before)
    assert optimizer.skipped_steps == 1
