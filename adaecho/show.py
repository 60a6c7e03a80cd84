"""``python -m adaecho.show RUN``: what a run's model predicts, as a picture.

Detection shows true boxes beside predicted ones, classification its mistakes. The model is that of the run's
end, or, where it hasn't ended, of its last checkpoint; the images are the first of the validation split (the
first that it gets wrong). The picture is ``pictures/<task>.png`` in the run's folder, or what ``--out`` says.
Keys of the config can follow the folder, as of ``adaecho.evaluate``.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from adaecho.datasets.storage import storage_errors
from adaecho.errors import FolderError, UserError, say, told
from adaecho.evaluate import load_weights, open_run, parser
from adaecho.records.files import folder_errors
from adaecho.records.folder import RunFolder
from adaecho.records.status import Status
from adaecho.training import checkpoint
from adaecho.training.device import autocast, choose_device, choose_precision
from adaecho.training.optimizer import average_of

_SUFFIXES = (".png", ".jpg", ".svg", ".pdf")


@storage_errors()
def show(path: Path, overrides: Sequence[str] = (), *, number: int = 8, out: Path | None = None) -> Path:
    """Draw what a run's model predicts; returns the file.

    Args:
        path: the run's folder.
        overrides: of its config, as ``key=value``.
        number: of images at most.
        out: the file; its suffix (png, jpg, svg, pdf) decides the format.

    Raises:
        UserError: the folder holds no run or no weights, its data is gone, its task has no pictures, or
            there is no mistake to show, or the file can't be written.
    """
    from adaecho.figures.image_grid import grid  # needs the extra figures

    run, config, task = open_run(path, overrides)
    if task.pictures is None:
        raise UserError(f"{path}: task {task.name} has no pictures to show")
    device = choose_device(config)
    model = _trained(run, task.build_model()).to(device).eval()
    with torch.inference_mode(), autocast(device, choose_precision(config, device)):
        pictures = task.pictures(model, number, device)
    if not pictures:
        raise UserError(f"{path}: there is nothing to show: the model makes no mistake")
    out = out or path / "pictures" / f"{task.name}.png"
    with folder_errors(out):
        grid([(picture.image, picture.title, picture.true, picture.predicted) for picture in pictures], out)
    return out


def _trained(run: RunFolder, model: nn.Module) -> nn.Module:
    """The model as the run evaluated it last."""
    weights = run.path / "model" / "final.safetensors"
    summary = run.read_summary() or {}
    if weights.is_file() and summary.get("status") in (Status.REACHED, Status.BUDGET_SPENT):
        load_weights(weights, model)
        return model
    state = checkpoint.load(run)
    if state is None:
        raise FolderError(f"{run.path}: holds neither weights nor a checkpoint yet; run it again")
    model.load_state_dict(state["model"])
    if state["average"] is None:
        return model
    average = average_of(model, decay=0.0)  # what the run evaluates
    average.load_state_dict(state["average"])
    return average.module


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    command = parser("python -m adaecho.show", __doc__)
    command.add_argument("--number", type=int, default=8, help="images at most (8)")
    command.add_argument("--out", type=Path, help="the file: .png, .jpg, .svg or .pdf")
    typed = command.parse_intermixed_args(arguments)
    if typed.number < 1:
        command.error(f"--number {typed.number}: must be at least 1")
    if typed.out is not None and typed.out.suffix not in _SUFFIXES:
        command.error(f"--out {typed.out}: must end in {', '.join(_SUFFIXES)}")
    with told():
        say(show(typed.run, typed.overrides, number=typed.number, out=typed.out))


if __name__ == "__main__":
    main()
