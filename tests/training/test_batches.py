"""How a batch becomes a step: nested batches, uneven micro-batches, clipping, what a schedule counts."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from adaecho.config.schema import Config
from adaecho.tasks.base import Task
from adaecho.training.optimizer import deal, make_optimizer, parameter_groups
from adaecho.training.trainer import Trainer
from tests.conftest import Compose

LENGTHS = (1, 5, 2, 4, 3, 1, 6, 2)


class Pair(NamedTuple):
    one: torch.Tensor
    other: list[torch.Tensor]


def test_any_nesting_is_dealt_example_by_example() -> None:
    batch = {"x": torch.arange(4), "pair": Pair(torch.arange(4) * 10, [torch.ones(n) for n in (1, 2, 3, 4)])}
    first, second = deal({**batch, "size": 7, "scale": torch.tensor(2.0)}, 2)
    assert first["x"].tolist() == [0, 2]
    assert second["pair"].one.tolist() == [10, 30]
    assert [len(box) for box in second["pair"].other] == [2, 4]
    assert (first["size"], first["scale"].item()) == (7, 2.0)


class _Masked:
    """Sequences of different lengths as a source: the loss counts tokens, not examples."""

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(row)
        return {"x": torch.randn(6, 3, generator=generator), "mask": (torch.arange(6) < LENGTHS[row]).float()}


def _loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return (model(batch["x"])[..., 0].square() * batch["mask"]).sum(), batch["mask"].sum()


def _weight(batch: Any) -> torch.Tensor:
    weight: torch.Tensor = batch["mask"].sum()
    return weight


def _trainer(config: Config, weight: Callable[[Any], Any] | None = None) -> Trainer:
    task = Task(
        name="masked",
        metrics={"accuracy": "max"},
        source=_Masked(),
        decode=None,
        augment=None,
        collate=None,
        build_model=lambda: nn.Linear(3, 1),
        loss=_loss,
        evaluate=lambda *_, **__: {"accuracy": 0.0},
        weight=weight,
    )
    return Trainer(config, task, record=lambda _: None, interrupted=lambda: False)


def _config(compose_config: Compose, *overrides: str) -> Config:
    return compose_config(
        "batch_size=8", "echo.shuffle_buffer=1", "max_steps=1", "precision=float32", "target.value=null",
        *overrides,
    )  # fmt: skip


@pytest.mark.parametrize("weight", [None, _weight])
def test_micro_batches_of_uneven_weight_add_up_to_the_whole_batch(
    compose_config: Compose, weight: Callable[[Any], Any] | None
) -> None:
    gradients = []
    for overrides in ((), ("adascale=on", "adascale.num_gradients_to_accumulate=4")):
        trainer = _trainer(_config(compose_config, *overrides), weight)
        with trainer.loader:
            loss = trainer._mean_loss.backward(deal(next(iter(trainer.loader)), len(overrides) * 2 or 1))
        gradients.append([loss, *(p.grad for p in trainer.model.parameters())])
    examples = [_Masked()[row] for row in range(8)]
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    total = sum(_loss(model, one)[0] for one in examples) / sum(LENGTHS)
    total.backward()
    for whole, dealt, slow in zip(*gradients, [total, *(p.grad for p in model.parameters())], strict=True):
        torch.testing.assert_close(dealt, whole)
        torch.testing.assert_close(dealt, slow)


def test_a_gradient_is_clipped_as_a_whole(compose_config: Compose) -> None:
    trainer = _trainer(_config(compose_config, "optimizer.clip_norm=0.01"))
    with trainer.loader:
        trainer.train()
    norm = torch.cat([p.grad.flatten() for p in trainer.model.parameters()]).norm()
    assert norm.item() == pytest.approx(0.01, rel=1e-4)


def test_a_schedule_over_fresh_examples_stands_still_while_batches_repeat(compose_config: Compose) -> None:
    common = (
        "echo=batch",
        "echo.factor=3",
        "max_steps=6",
        "schedule.shape=linear_decay",
        "schedule.decay_steps=10",
    )
    rates: dict[str, list[float]] = {"steps": [], "fresh_examples": []}
    for counts, found in rates.items():
        trainer = _trainer(_config(compose_config, *common, f"schedule.counts={counts}"))
        step = trainer._step

        def spy(batch: Any, trainer: Trainer = trainer, step: Any = step, found: list[float] = found) -> None:
            step(batch)
            found.append(trainer.optimizer.param_groups[0]["lr"])

        trainer._step = spy  # type: ignore[method-assign]
        with trainer.loader:
            trainer.train()
    assert len(set(rates["steps"])) == 6
    assert [len(set(rates["fresh_examples"][k : k + 3])) for k in (0, 3)] == [1, 1]
    assert rates["fresh_examples"][0] > rates["fresh_examples"][3]


@pytest.mark.parametrize(
    ("name", "kind"), [("sgd", torch.optim.SGD), ("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW)]
)
def test_the_configured_optimizer_with_its_decay_spares_norms_and_biases(
    compose_config: Compose, name: str, kind: type
) -> None:
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
