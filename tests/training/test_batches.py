"""Micro-batches, clipping, schedules over fresh examples, and optimizers."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from adaecho.errors import ConfigError
from adaecho.tasks.base import Task
from adaecho.training.optimizer import EagerSGD, make_optimizer, parameter_groups, split_batch
from adaecho.training.trainer import Trainer
from tests.conftest import Compose

LENGTHS = (1, 5, 2, 4, 3, 1, 6, 2)


class Pair(NamedTuple):
    one: torch.Tensor
    other: list[torch.Tensor]


def test_a_nested_batch_is_split_by_example() -> None:
    batch = {"x": torch.arange(4), "pair": Pair(torch.arange(4) * 10, [torch.ones(n) for n in (1, 2, 3, 4)])}
    first, second = split_batch({**batch, "size": 7, "scale": torch.tensor(2.0)}, 2, 4)
    assert first["x"].tolist() == [0, 2]
    assert second["pair"].one.tolist() == [10, 30]
    assert [len(box) for box in second["pair"].other] == [2, 4]
    assert (first["size"], first["scale"].item()) == (7, 2.0)


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        ({"x": torch.zeros(4, 2), "tokens": torch.zeros(6, 4)}, r"a tensor \[6, 4\] of length 6"),
        ({"x": torch.zeros(4), "pair": [torch.zeros(4), torch.zeros(4)]}, "a list of length 2"),
    ],
    ids=["time first", "fields in a list"],
)
def test_a_batch_without_examples_first_is_not_split(batch: Any, says: str) -> None:
    """Otherwise each micro-batch would get every second token of all examples."""
    assert split_batch(batch, 1, 4)[0] is batch
    with pytest.raises(ConfigError, match=rf"num_gradients_to_accumulate=2: .* 4 examples.*{says}"):
        split_batch(batch, 2, 4)


class _Masked:
    """Sequences of different lengths; the loss counts tokens."""

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(row)
        return {"x": torch.randn(6, 3, generator=generator), "mask": (torch.arange(6) < LENGTHS[row]).float()}


def _loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return (model(batch["x"])[..., 0].square() * batch["mask"]).sum(), batch["mask"].sum()


def _trainer(compose_config: Compose, *overrides: str, weight: Callable[[Any], Any] | None = None) -> Trainer:
    config = compose_config(
        "batch_size=8", "echo.shuffle_buffer=1", "max_steps=1", "precision=float32", "target.value=null",
        *overrides,
    )  # fmt: skip
    task = Task(
        name="masked", metrics={"accuracy": "max"}, source=_Masked(), decode=None, augment=None, collate=None,
        build_model=lambda: nn.Linear(3, 1), loss=_loss, evaluate=lambda *_, **__: {"accuracy": 0.0},
        weight=weight,
    )  # fmt: skip
    return Trainer(config, task, record=lambda _: None)


@pytest.mark.parametrize("weight", [None, lambda batch: batch["mask"].sum()], ids=["of the loss", "its own"])
def test_micro_batches_of_uneven_weight_add_up_to_the_whole_batch(
    compose_config: Compose, weight: Callable[[Any], Any] | None
) -> None:
    gradients = []
    for overrides, parts in (((), 1), (("adascale=on", "adascale.num_gradients_to_accumulate=4"), 4)):
        trainer = _trainer(compose_config, *overrides, weight=weight)
        with trainer.loader:
            loss = trainer._mean_loss.backward(split_batch(next(iter(trainer.loader)), parts, 8))
        gradients.append([loss, *(p.grad for p in trainer.model.parameters())])
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    total = sum(_loss(model, _Masked()[row])[0] for row in range(8)) / sum(LENGTHS)
    total.backward()
    for whole, dealt, slow in zip(*gradients, [total, *(p.grad for p in model.parameters())], strict=True):
        torch.testing.assert_close(dealt, whole)
        torch.testing.assert_close(dealt, slow)


def test_a_gradient_is_clipped_as_a_whole(compose_config: Compose) -> None:
    trainer = _trainer(compose_config, "optimizer.max_grad_norm=0.01")
    with trainer.loader:
        trainer.train()
    norm = torch.cat([p.grad.flatten() for p in trainer.model.parameters()]).norm()
    assert norm.item() == pytest.approx(0.01, rel=1e-4)


def test_a_schedule_over_fresh_examples_is_constant_while_batches_repeat(compose_config: Compose) -> None:
    decay = ("schedule.shape=linear_decay", "schedule.decay_steps=10")

    def rates(counts: str) -> list[float]:
        echo = ("echo=batch", "echo.factor=3", "max_steps=6", f"schedule.unit={counts}")
        trainer, found = _trainer(compose_config, *decay, *echo), list[float]()
        step = trainer._step

        def spy(batch: Any) -> None:
            step(batch)
            found.append(trainer.optimizer.param_groups[0]["lr"])

        trainer._step = spy  # type: ignore[method-assign]
        with trainer.loader:
            trainer.train()
        return found

    assert len(set(rates("steps"))) == 6
    of_fresh = rates("fresh_examples")
    assert [len(set(of_fresh[k : k + 3])) for k in (0, 3)] == [1, 1]
    assert of_fresh[0] > of_fresh[3]


@pytest.mark.parametrize(
    ("name", "kind"), [("sgd", torch.optim.SGD), ("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW)]
)
def test_norms_and_biases_have_no_weight_decay(compose_config: Compose, name: str, kind: type) -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(2, 2))
    config = compose_config(
        f"optimizer.name={name}", "optimizer.weight_decay=0.1", "optimizer.decay_norms_and_biases=false"
    )
    optimizer = make_optimizer(config, model)
    assert isinstance(optimizer, kind)
    decayed, spared = optimizer.param_groups
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
    assert [p.dim() for p in decayed["params"]] == [4, 2]
    assert {p.dim() for p in spared["params"]} == {1}
    assert len(parameter_groups(model, 0.1, all_decay=True)) == 1
    with pytest.raises(ConfigError, match="nothing to train"):
        make_optimizer(config, model.requires_grad_(False))


def trained(make: Any, settings: dict[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    optimizer = make(model.parameters(), lr=0.1, **settings)
    for _ in range(5):
        model(torch.randn(6, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([one.detach().flatten() for one in model.parameters()]), optimizer.state_dict()


@pytest.mark.parametrize(
    "settings", [{}, {"momentum": 0.9, "weight_decay": 1e-2}, {"momentum": 0.9, "nesterov": True}], ids=str
)
def test_weights_and_state_equal_those_of_torchs_sgd_bit_for_bit(settings: dict[str, Any]) -> None:
    (ours, our_state), (theirs, their_state) = (
        trained(make, settings) for make in (EagerSGD, torch.optim.SGD)
    )
    assert torch.equal(ours, theirs)
    assert our_state["param_groups"] == their_state["param_groups"]
    for key, state in their_state["state"].items():
        for name, value in state.items():
            own = our_state["state"][key][name]
            assert value is own is None or torch.equal(own, value)


def test_a_step_records_no_graph() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = EagerSGD([weight], lr=0.1)
    weight.sum().backward()
    optimizer.step()
    assert weight.grad_fn is None
    assert torch.is_grad_enabled()


def test_metrics_with_the_name_of_a_recorded_column_are_refused(compose_config: Compose) -> None:
    trainer = _trainer(compose_config)
    evaluated = {"accuracy": 0.5, "steps": 1.0}
    object.__setattr__(trainer.task, "evaluate", lambda *_, **__: evaluated)
    with trainer.loader:
        trainer.train()
        with pytest.raises(ConfigError, match="task masked: evaluate returned steps, a reserved name"):
            trainer.evaluate_end()
