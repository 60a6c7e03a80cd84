"""AdaScale SGD written from the paper's formulas in float64, one gradient at a time."""

import math

import torch


class SlowAdaScale:
    """Plain SGD with momentum over a list of float64 tensors per group; see Algorithm 2 and appendix B.3."""

    def __init__(self, groups, learning_rates, scale, smoothing, momentum=0.0, debias=True):
        self.groups = groups
        self.learning_rates = learning_rates
        self.scale = scale
        self.smoothing = smoothing
        self.momentum = momentum
        self.debias = debias
        self.samples = [[] for _ in groups]
        self.buffers = {}
        self.tau = 0.0

    def averages(self, group):
        """(sigma^2, mu^2) from all samples so far, by the definition of a weighted mean."""
        variance = square = total = 0.0
        samples = self.samples[group]
        if self.debias:
            weights = [self.smoothing ** (len(samples) - 1 - i) for i in range(len(samples))]
        else:
            weights = self.paper_weights(len(samples))
        for weight, (sample_variance, sample_square) in zip(weights, samples, strict=True):
            variance += weight * sample_variance
            square += weight * sample_square
            total += weight
        return variance / total, square / total

    def paper_weights(self, count):
        weights = []
        for number in range(1, count + 1):
            if number < 1 / (1 - self.smoothing):
                weights = [1 / number] * number
            else:
                weights = [self.smoothing * weight for weight in weights] + [1 - self.smoothing]
        return weights

    def ratio(self, variance, square):
        return (variance + square) / (variance / self.scale + square)

    def step(self, gradients):
        """``gradients[i][group][k]``: micro-batch i's gradient of a group's k-th tensor."""
        count = len(gradients)
        pooled_variance = pooled_square = 0.0
        for group, tensors in enumerate(self.groups):
            flat = [torch.cat([g.reshape(-1) for g in micro[group]]) for micro in gradients]
            mean = sum(flat) / count
            variance = sum((g - mean).square().sum().item() for g in flat) / (count - 1)
            square = mean.square().sum().item() - variance / count
            self.samples[group].append((max(variance * self.scale / count, 1e-6), max(square, 0.0)))
            variance, square = self.averages(group)
            pooled_variance += variance
            pooled_square += square
            rate = self.learning_rates[group] * self.ratio(variance, square)
            for k, tensor in enumerate(tensors):
                gradient = sum(micro[group][k] for micro in gradients) / count
                buffer = self.buffers.get((group, k))
                buffer = gradient if buffer is None else self.momentum * buffer + gradient
                self.buffers[group, k] = buffer
                tensor.data -= rate * buffer
        gain = self.ratio(pooled_variance, pooled_square)
        self.tau += gain
        return gain

    @property
    def schedule_step(self):
        return math.floor(self.tau)
