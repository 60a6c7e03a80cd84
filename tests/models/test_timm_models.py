"""timm's models by name."""

import argparse
from pathlib import Path

import pytest
import safetensors.torch
import torch

from adaecho.errors import ConfigError, DataError
from adaecho.models.ghost_batch_norm import GhostBatchNorm2d, use_ghost_batch_norm
from adaecho.models.timm_models import timm_model


def test_resnet50_has_its_published_parameters_and_each_batch_norm_becomes_a_ghost() -> None:
    # He et al. 2015; torchvision's table of models says the same.
    with torch.device("meta"):
        model = timm_model("resnet50", 1000, 224)
        assert sum(parameter.numel() for parameter in model.parameters()) == 25_557_032
        use_ghost_batch_norm(model, 32)
    assert sum(isinstance(module, GhostBatchNorm2d) for module in model.modules()) == 53


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet-50", r"task\.model=resnet-50: timm has no such model; similar names: .*resnet50"),
        (
            "inception_v3",
            r"task\.image_size=32: task\.model=inception_v3 does not accept this size \(.*Kernel size",
        ),
    ],
)
def test_unknown_models_and_sizes_are_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        timm_model(name, 5, 32)


def weights(name: str = "resnet18", **arguments: int) -> dict[str, torch.Tensor]:
    import timm  # takes seconds

    torch.manual_seed(5)
    return dict(timm.create_model(name, **arguments).state_dict())


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("form", ["safetensors", "state_dict", "checkpoint", "of a run"])
def test_a_model_starts_from_the_weights_of_a_file(tmp_path: Path, form: str) -> None:
    saved, file = weights(num_classes=7), tmp_path / ("w.safetensors" if form != "state_dict" else "w.pt")
    if form == "safetensors":
        safetensors.torch.save_file(saved, file)
    elif form == "of a run":
        safetensors.torch.save_file({f"1.{name}": value for name, value in saved.items()}, file)
    elif form == "checkpoint":
        file = tmp_path / "w.pth"
        torch.save({"epoch": 3, "args": argparse.Namespace(lr=1), "state_dict": saved}, file)
    else:
        torch.save(saved, file)
    assert equal(timm_model("resnet18", 7, 64, str(file)).state_dict(), saved)


@pytest.mark.parametrize("headless", [False, True])
def test_another_number_of_classes_gets_a_new_last_layer_and_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], headless: bool
) -> None:
    saved, file = weights(), tmp_path / "w.pt"
    if headless:
        del saved["fc.weight"], saved["fc.bias"]
    torch.save(saved, file)
    model = timm_model("resnet18", 3, 64, str(file))
    loaded = model.state_dict()
    assert loaded.pop("fc.weight").shape == (3, 512)
    assert loaded.pop("fc.bias").shape == (3,)
    assert equal(loaded, {name: value for name, value in saved.items() if not name.startswith("fc.")})
    has = "no last layer" if headless else "1,000 classes"
    warning = f"warning: task.pretrained={file}: has {has}, but the data has 3; fc is initialized"
    assert warning in capsys.readouterr().err.splitlines()
    assert model.training


def test_position_embeddings_are_fitted_to_the_size_of_the_images(tmp_path: Path) -> None:
    saved, file = weights("vit_tiny_patch16_224", num_classes=5), tmp_path / "w.pt"
    torch.save(saved, file)
    loaded = timm_model("vit_tiny_patch16_224", 5, 32, str(file)).state_dict()
    assert saved["pos_embed"].shape[1] == 14 * 14 + 1
    assert loaded["pos_embed"].shape[1] == 2 * 2 + 1
    assert torch.equal(loaded["blocks.3.attn.qkv.weight"], saved["blocks.3.attn.qkv.weight"])


class Payload:
    """Unpickling it would create a file."""

    def __init__(self, leaves: Path) -> None:
        self.leaves = leaves

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.leaves,)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("absent", "there is no such file"),
        ("text", "contains no weights that can be read"),
        ("code", "contains no weights that can be read without executing code"),
        ("no tensors", "contains no state dict"),
        ("resnet34", r"contains weights of a model other than task\.model=resnet18 \(.*layer1\.2"),
    ],
)
def test_other_files_are_refused_by_name(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "w.pt"
    if content == "text":
        file.write_text("no weights")
    elif content == "code":
        torch.save({"fc.bias": Payload(tmp_path / "executed")}, file)
    elif content == "no tensors":
        torch.save({"fc.bias": 1}, file)
    elif content != "absent":
        torch.save(weights(content), file)
    with pytest.raises(DataError, match=rf"task\.pretrained={file}: .*{message}"):
        timm_model("resnet18", 9, 64, str(file))
    assert not (tmp_path / "executed").exists()
