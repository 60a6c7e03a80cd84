"""Ghost batch norm against nn.BatchNorm2d run on each slice by itself."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from adaecho.errors import ConfigError
from adaecho.models.ghost_batch_norm import GhostBatchNorm2d, use_ghost_batch_norm

C, SIZE, SLICES = 5, 4, 3
LAYOUTS = [torch.contiguous_format, torch.channels_last]


def _rows(index: int) -> slice:
    return slice(index * SIZE, (index + 1) * SIZE)


def _batch(layout: torch.memory_format, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(SIZE * SLICES, C, 6, 7, generator=generator) * 3 + 1
    return x.contiguous(memory_format=layout)


def _norms(statistics: str) -> tuple[GhostBatchNorm2d, list[nn.BatchNorm2d]]:
    torch.manual_seed(1)
    ghost = GhostBatchNorm2d(C, SIZE, statistics=statistics, momentum=0.2, eps=1e-3)
    nn.init.uniform_(ghost.weight)
    nn.init.uniform_(ghost.bias)
    plain = [nn.BatchNorm2d(C, momentum=0.2, eps=1e-3) for _ in range(SLICES)]
    for norm in plain:
        norm.load_state_dict(ghost.state_dict())
    return ghost, plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("of_gradient", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_output_and_gradients_are_those_of_batch_norm_on_each_slice(
    layout: torch.memory_format, of_gradient: torch.memory_format, dtype: torch.dtype
) -> None:
    """In bfloat16, as under autocast, with statistics in float32."""
    ghost, (plain, *_) = _norms("average")
    x, weight = _batch(layout).to(dtype).requires_grad_(), _batch(of_gradient, seed=2).to(dtype)
    slow = x.detach().clone().requires_grad_()
    out = ghost(x)
    out.backward(weight)
    expected = torch.empty_like(out)
    for index in range(SLICES):
        rows = _rows(index)
        expected[rows] = plain(slow[rows])
    expected.backward(weight)
    assert (out.dtype, x.grad.dtype, ghost.running_mean.dtype) == (dtype, dtype, torch.float32)
    assert out.is_contiguous(memory_format=layout)
    close = {"rtol": 1e-5, "atol": 2e-6} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(out, expected, **close)
    torch.testing.assert_close(x.grad, slow.grad, **close)
    if dtype == torch.float32:
        torch.testing.assert_close(ghost.weight.grad, plain.weight.grad, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(ghost.bias.grad, plain.bias.grad, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("statistics", ["average", "sequential"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_statistics_equal_those_of_batch_norms_on_the_slices(
    layout: torch.memory_format, statistics: str
) -> None:
    ghost, plain = _norms(statistics)
    if statistics == "sequential":
        plain = plain[:1] * SLICES
    for step in range(4):
        x = _batch(layout, seed=step)
        ghost(x)
        for index, norm in enumerate(plain):
            norm(x[_rows(index)])
    for name in ("running_mean", "running_var"):
        mean = torch.stack([getattr(norm, name) for norm in plain]).mean(0)
        torch.testing.assert_close(getattr(ghost, name), mean, rtol=2e-6, atol=2e-6)
    assert ghost.num_batches_tracked.item() == 4


def test_evaluation_uses_the_running_statistics_for_any_number_of_examples() -> None:
    ghost, (plain, *_) = _norms("average")
    ghost(_batch(torch.contiguous_format))
    plain.load_state_dict(ghost.state_dict())
    x = _batch(torch.contiguous_format, seed=5)[:3]
    torch.testing.assert_close(ghost.eval()(x), plain.eval()(x), rtol=0, atol=0)


def test_other_batch_sizes_are_refused_without_an_update() -> None:
    ghost, _ = _norms("average")
    with pytest.raises(ValueError, match="ghost size 4 does not divide a batch of 11"):
        ghost(_batch(torch.contiguous_format)[:11])
    assert ghost.num_batches_tracked.item() == 0
    assert ghost.running_mean.abs().sum().item() == 0


def _refused(*modules: nn.Module) -> Callable[[], object]:
    return lambda: use_ghost_batch_norm(nn.Sequential(*modules), 4)


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "none in the model": (_refused(nn.Linear(2, 2)), "has no batch norm"),
    "others in the model": (_refused(nn.BatchNorm1d(3)), "BatchNorm1d"),
}


@pytest.mark.parametrize(("act", "message"), REFUSED.values(), ids=REFUSED)
def test_models_without_plain_batch_norm_are_refused(act: Callable[[], object], message: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=message):
        act()


def test_a_model_keeps_its_weights_when_its_batch_norm_is_replaced() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, C, 3), nn.BatchNorm2d(C, eps=1e-3), nn.Sequential(nn.BatchNorm2d(C)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    use_ghost_batch_norm(model, SIZE, "sequential")
    assert isinstance(model[1], GhostBatchNorm2d)
    assert isinstance(model[2][0], GhostBatchNorm2d)
    assert (model[1].eps, model[1].statistics) == (1e-3, "sequential")
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
