"""Every composed config is valid, and a run's name depends on what it should."""

from pathlib import Path

import pytest

from adaecho.config import schema
from adaecho.config.identity import changes, run_id
from adaecho.echo.variants import VARIANTS
from adaecho.errors import ConfigError
from adaecho.run import CONF
from tests.conftest import Compose


def _options(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


@pytest.mark.parametrize("echo", _options("echo"))
@pytest.mark.parametrize("task", _options("task"))
def test_every_task_composes_with_every_echo(compose_config: Compose, task: str, echo: str) -> None:
    config = compose_config(f"task={task}", f"echo={echo}")
    assert task.startswith(config.task.name)
    assert config.echo.variant == echo
    assert schema.from_plain(schema.to_plain(config)) == config


def test_echo_variants_in_the_schema_are_the_groups_options() -> None:
    assert sorted(VARIANTS) == _options("echo")


def test_no_config_names_a_class_to_build() -> None:
    assert not [path for path in Path(CONF).rglob("*.yaml") if "_target_" in path.read_text()]


KEEPS = (
    "tracking=wandb", "data.num_workers=3", "data.prefetch=9", "data.processes=true",
    "echo.buffer_format=encoded", "max_steps=3", "search.trials=9", "restart=true", "data.max_bad_examples=5",
)  # fmt: skip
CHANGES = (
    "seed=1", "threads=2", "echo=batch", "target.value=0.5", "batch_size=8", "data.split_seed=1",
    "precision=bfloat16", "data.order=sequential", "task.model=mlp", "optimizer.name=adam",
    "evaluate.max_examples=10", "task.label_smoothing=0.1", "task=imagenet task.pretrained=w.pt",
    "task=small_text task.label_smoothing=0.1",
)  # fmt: skip


@pytest.mark.parametrize("override", [*KEEPS, *CHANGES])
def test_what_can_change_the_trajectory_changes_the_name_and_nothing_else(
    compose_config: Compose, override: str
) -> None:
    *task, changed = override.split()
    before, after = (schema.to_plain(compose_config(*task, *more)) for more in ((), (changed,)))
    assert (run_id(before) != run_id(after)) == (override in CHANGES)
    assert not changes(before, after) or override in (*CHANGES, "max_steps=3")  # a budget can only grow


# Of each task as it is: a key that is added later leaves them.
NAMES = {
    "cifar10": "ea2d4b7569", "imagenet": "5a010adaa4", "coco": "27e375108d", "scenes": "e26c1462f8",
    "digits": "e04505ea82", "digits_mlp": "25e4eeaaeb", "small_text": "9f8724d9da", "lm1b": "922c3e3c29",
    "common_crawl": "4c8f6ff571",
}  # fmt: skip


@pytest.mark.parametrize("task", NAMES)
def test_keys_that_were_added_leave_the_names_of_earlier_runs(compose_config: Compose, task: str) -> None:
    assert run_id(schema.to_plain(compose_config(f"task={task}"))) == NAMES[task]


TEXT = "task=small_text"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("optimizer.name=lion",), "optimizer.name=lion: must be one of sgd, adam, adamw"),
        (("optimizer.max_grad_norm=0",), r"optimizer\.max_grad_norm=0.0: must be greater than 0"),
        (("schedule.shape=step_decay",), r"schedule\.first_milestone_steps=None: .*first_milestone_epochs"),
        (("schedule.warmup_steps=3", "schedule.warmup_epochs=2"), "set only one of the two"),
        (("schedule.milestone_gap_epochs=-1",), r"schedule\.milestone_gap_epochs=-1.0"),
        (("schedule.unit=tokens",), r"schedule\.unit=tokens"),
        (("echo.buffer_format=gpu",), r"echo\.buffer_format=gpu: must be one of auto, decoded, encoded"),
        (
            ("echo=batch", "echo.split_augmentation=true"),
            r"echo\.split_augmentation=true: needs echo=example_before_augmentation",
        ),
        (("data.order=random",), r"data\.order=random"),
        (
            ("adascale=on", "optimizer.name=adam"),
            r"optimizer\.name=adam: needs adascale\.rule=sqrt_gain, not gain",
        ),
        (("adascale=on", "schedule.unit=fresh_examples"), r"schedule\.unit=fresh_examples: AdaScale"),
        (("task.model=resnet",), r"task\.model=resnet: must be one of conv, mlp"),
        (
            ("+task.depth=3",),
            r"task\.depth: Key 'depth' not in 'DigitsOptions'; options of digits: name, model",
        ),
        (("task=cifar10", "+task.width=3"), "options of cifar10: name, depth"),
        (("task=cifar10", "task.depth=10"), "depth=10: must be 6n"),
        ((TEXT, "task.width=30"), r"task\.width=30: must be a multiple of twice task\.heads=4"),
        ((TEXT, "task.packing=loose"), r"task\.packing=loose: must be one of packed, sentence"),
        ((TEXT, "task.dropout=1"), r"task\.dropout=1\.0"),
        ((TEXT, "task.layers=0"), r"task\.layers=0"),
        (("task=lm1b", "task.vocab_size=100"), r"task\.vocab_size=100: must be at least 258"),
        (("task=common_crawl", "task.packing=packed"), "must be one of document"),
        *(
            ((f"task={task}", "task.label_smoothing=1"), r"task\.label_smoothing=1.*: must lie in \[0, 1\)")
            for task in ("imagenet", "cifar10", "digits", "small_text")
        ),
    ],
)
def test_what_cant_be_names_the_key(
    compose_config: Compose, overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        compose_config(*overrides)


def test_a_config_read_back_with_an_unknown_key_is_refused(compose_config: Compose) -> None:
    plain = schema.to_plain(compose_config())
    plain["echo"]["faktor"] = 2
    with pytest.raises(ConfigError, match="faktor"):
        schema.from_plain(plain)
