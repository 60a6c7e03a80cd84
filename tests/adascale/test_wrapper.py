"""AdaScaleWrapper: an optimizer's constructor."""

import pytest
import torch

from adaecho.adascale import AdaScale, AdaScaleWrapper
from tests.adascale.helpers import assert_identical, batches, mlp, train, weights


def test_wrapper_builds_the_optimizer_it_names():
    model, expected = mlp(), mlp()
    optimizer = AdaScaleWrapper(
        model.parameters(),
        num_gradients_to_accumulate=2,
        debias_ewma=False,
        smoothing=0.5,
        optim_cls=torch.optim.SGD,
        lr=0.05,
        momentum=0.9,
        nesterov=True,
    )
    sgd = torch.optim.SGD(expected.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    plain = AdaScale(sgd, num_gradients_to_accumulate=2, debias_ewma=False, smoothing=0.5)
    assert train(model, optimizer, batches(5, 2)) == train(expected, plain, batches(5, 2))
    assert_identical(weights(model), weights(expected))


def test_losses_that_are_not_divided():
    model = mlp()
    optimizer = AdaScaleWrapper(
        model.parameters(), num_gradients_to_accumulate=2, debias_ewma=False, is_scaled_loss=False, lr=0.05
    )
    optimizer.scale_grad_by_num_grads_to_accum()  # nothing to divide yet
    model(next(batches(1, 1))[0][0]).sum().backward()
    before = model[0].weight.grad.clone()
    optimizer.scale_grad_by_num_grads_to_accum()
    assert_identical(model[0].weight.grad, before / 2)
    with pytest.raises(TypeError, match="no_such_argument"):
        AdaScaleWrapper(model.parameters(), scale=2.0, lr=0.1, no_such_argument=1)
