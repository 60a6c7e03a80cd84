"""The MLP of the digits: shapes, and what it is there for."""

import torch
from torch.nn import functional

from adaecho.models.small_mlp import small_mlp


def test_the_gradient_of_a_batch_is_the_mean_of_its_parts_gradients() -> None:
    torch.manual_seed(0)
    model = small_mlp(10)
    images, labels = torch.randn(12, 1, 8, 8), torch.randint(10, (12,))
    parameters = list(model.parameters())

    def gradients(rows: slice) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(functional.cross_entropy(model(images[rows]), labels[rows]), parameters)

    parts = [gradients(slice(begin, begin + 4)) for begin in (0, 4, 8)]
    means = [torch.stack(tensors).mean(0) for tensors in zip(*parts, strict=True)]
    torch.testing.assert_close(list(gradients(slice(0, 12))), means)
    assert sum(parameter.numel() for parameter in parameters) == 64 * 64 + 64 + 64 * 10 + 10
