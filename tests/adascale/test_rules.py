"""The three rules: the gain for SGD, its square root for Adam, and measuring only."""

import math

import pytest
import torch

from adaecho import AdaScale
from tests.adascale.helpers import (
    assert_identical,
    backward,
    batches,
    layers,
    micro_gradients,
    mlp,
    train,
    weights,
)  # fmt: skip
from tests.adascale.slow import SlowAdaScale


class SlowAdam:
    """Algorithm 1 of Kingma and Ba (2015), decoupled weight decay as in Loshchilov and Hutter (2019)."""

    def __init__(self, tensors, betas, eps, decay):
        self.tensors, self.betas, self.eps, self.decay = tensors, betas, eps, decay
        self.first = [torch.zeros_like(tensor) for tensor in tensors]
        self.second = [torch.zeros_like(tensor) for tensor in tensors]
        self.t = 0

    def step(self, gradients, rate):
        self.t += 1
        one, two = self.betas
        for k, (tensor, gradient) in enumerate(zip(self.tensors, gradients, strict=True)):
            self.first[k] = one * self.first[k] + (1 - one) * gradient
            self.second[k] = two * self.second[k] + (1 - two) * gradient**2
            mean, square = self.first[k] / (1 - one**self.t), self.second[k] / (1 - two**self.t)
            tensor.data -= rate * self.decay * tensor + rate * mean / (square.sqrt() + self.eps)


@pytest.mark.parametrize("decay", [0.0, 0.1], ids=["Adam", "AdamW"])
def test_the_square_root_rule_against_a_slow_version(decay):
    model, twin = mlp(), mlp()
    twins, rates, options = layers(twin), [0.02, 0.005], {"betas": (0.8, 0.95), "eps": 1e-3}
    kind = torch.optim.AdamW if decay else torch.optim.Adam
    adam = kind(layers(model, *rates), **options, weight_decay=decay)
    optimizer = AdaScale(adam, num_gradients_to_accumulate=3, smoothing=0.6, rule="sqrt_gain")
    measured = SlowAdaScale(twins, [0.0, 0.0], 3, 0.6)
    adams = [SlowAdam(group, **options, decay=decay) for group in twins]
    tau = 0.0
    for micro_batches in batches(8, 3):
        gradients = list(micro_gradients(twin, twins, micro_batches))
        tau += measured.step(gradients)
        for number, (adam, rate) in enumerate(zip(adams, rates, strict=True)):
            gain = measured.ratio(*measured.averages(number))
            means = [sum(parts) / 3 for parts in zip(*(micro[number] for micro in gradients), strict=True)]
            adam.step(means, rate * math.sqrt(gain))
        (pooled,) = train(model, optimizer, [micro_batches])
        assert 1 < pooled <= 3
    torch.testing.assert_close(weights(model), weights(twin), rtol=1e-9, atol=1e-12)
    assert optimizer.scale_invariant_steps == pytest.approx(tau, rel=1e-9)
    assert [group["lr"] for group in optimizer.param_groups] == rates


OPTIMIZERS = {
    "SGD": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01},
    "Adam": {"lr": 0.01},
    "AdamW": {"lr": 0.01, "weight_decay": 0.1},
    "RMSprop": {"lr": 0.01},
    "Adagrad": {"lr": 0.01},
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_measuring_does_not_change_the_weights(kind, dtype):
    model, bare = mlp(dtype), mlp(dtype)
    ours, plain = (getattr(torch.optim, kind)(one.parameters(), **OPTIMIZERS[kind]) for one in (model, bare))
    optimizer = AdaScale(ours, num_gradients_to_accumulate=2, smoothing=0.5, rule="measure")
    slow = SlowAdaScale([list(bare.parameters())], [0.0], 2, 0.5)
    tau = 0.0
    for micro_batches in batches(8, 2, dtype=dtype):
        tau += slow.step(list(micro_gradients(bare, [list(bare.parameters())], micro_batches)))
        plain.zero_grad()
        backward(bare, micro_batches)
        plain.step()
        (gain,) = train(model, optimizer, [micro_batches])
        variance, square = slow.averages(0)
        relative = 1e-9 if dtype == torch.float64 else 1e-3
        assert gain == pytest.approx(slow.ratio(variance, square), rel=relative)
        noise_scale = variance / square if square else math.inf
        assert optimizer.gradient_noise_scale() == pytest.approx(noise_scale, rel=10 * relative)
    assert gain > 1
    assert optimizer.scale_invariant_steps == pytest.approx(tau, rel=relative)
    assert_identical(weights(model), weights(bare))


def test_the_noise_scale_before_a_sample_and_of_noise_alone():
    weight = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer = AdaScale(torch.optim.SGD([weight], lr=0.0), num_gradients_to_accumulate=2)
    assert math.isnan(optimizer.gradient_noise_scale())
    for sign in (1, -1):
        (sign * weight.sum() / 2).backward()
    optimizer.step()
    assert optimizer.gradient_noise_scale() == optimizer.gradient_noise_scale(0) == math.inf


PARAMETER = torch.nn.Parameter(torch.zeros(3))


def of(kind, **arguments):
    return lambda: AdaScale(kind([PARAMETER], **arguments), num_gradients_to_accumulate=2)


def under(rule, kind):
    return lambda: AdaScale(kind([PARAMETER], lr=0.1), num_gradients_to_accumulate=2, rule=rule)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (of(torch.optim.Adam), 'rule="gain" does not support Adam; .* "sqrt_gain" for Adam'),
        (of(torch.optim.AdamW), 'does not support AdamW'),
        (of(torch.optim.RMSprop), 'does not support RMSprop; .* "measure", which leaves'),
        (under("sqrt_gain", torch.optim.SGD), 'does not support SGD; use "gain" for SGD'),
        (under("sqrt_gain", torch.optim.Adagrad), 'does not support Adagrad'),
        (under("root", torch.optim.SGD), "rule='root': must be one of gain, sqrt_gain, measure"),
    ],
)  # fmt: skip
def test_a_rule_that_does_not_fit_is_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()
