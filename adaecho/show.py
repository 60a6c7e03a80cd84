"""``python -m adaecho.show RUN``: draw predictions of a run's model for images of the validation split.

For detection, the picture shows true boxes next to predicted boxes; for classification it shows images that
the model gets wrong. The model has the final weights, or those of the last checkpoint if the run has not
ended. The picture is written to ``pictures/<task>.png`` in the run's folder, or to ``--out``. Overrides of
the config may follow the folder, as for ``adaecho.evaluate``.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from adaecho.datasets.storage import storage_errors
from adaecho.errors import FolderError, UserError, print_line, report_errors
from adaecho.evaluate import load_weights, open_run, parser
from adaecho.records.files import folder_errors
from adaecho.records.folder import RunFolder
from adaecho.records.trials import Status
from adaecho.training import checkpoint
from adaecho.training.device import autocast, choose_device, choose_precision
from adaecho.training.optimizer import average_of

_SUFFIXES = (".png", ".jpg", ".svg", ".pdf")


@storage_errors()
def show(path: Path, overrides: Sequence[str] = (), *, number: int = 8, out: Path | None = None) -> Path:
    """Draw predictions of a run's model, and return the path of the picture.

    Args:
        path: the run's folder.
        overrides: overrides of the run's config, as ``key=value``.
        number: maximum number of images.
        out: the file to write; its suffix (png, jpg, svg, pdf) determines the format.

    Raises:
        UserError: the run cannot be drawn, for example because its classifier makes no mistake to show.
    """
    from adaecho.figures.image_grid import grid  # imported here, because it needs the extra "figures"

    run, config, task = open_run(path, overrides)
    if task.pictures is None:
        raise UserError(f"{path}: task {task.name} has no pictures to show")
    device = choose_device(config)
    model = _trained(run, task.build_model()).to(device).eval()
    with torch.inference_mode(), autocast(device, choose_precision(config, device)):
        pictures = task.pictures(model, number, device)
    if not pictures:
        raise UserError(f"{path}: nothing to show, because the model makes no mistakes")
    out = out or path / "pictures" / f"{task.name}.png"
    with folder_errors(out):
        grid([(picture.image, picture.title, picture.true, picture.predicted) for picture in pictures], out)
    return out


def _trained(run: RunFolder, model: nn.Module) -> nn.Module:
    """Load the weights that the run evaluated last into the model, and return the model."""
    weights = run.path / "model" / "final.safetensors"
    summary = run.read_summary() or {}
    if weights.is_file() and summary.get("status") in (Status.REACHED, Status.BUDGET_SPENT):
        load_weights(weights, model)
        return model
    state = checkpoint.load(run)
    if state is None:
        raise FolderError(f"{run.path}: contains neither weights nor a checkpoint; continue the run first")
    model.load_state_dict(state["model"])
    if state["average"] is None:
        return model
    average = average_of(model, decay=0.0)
    average.load_state_dict(state["average"])
    return average.module


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command ``python -m adaecho.show``."""
    command = parser("python -m adaecho.show", __doc__)
    command.add_argument("--number", type=int, default=8, help="maximum number of images (default: 8)")
    command.add_argument("--out", type=Path, help="the file to write: .png, .jpg, .svg or .pdf")
    typed = command.parse_intermixed_args(arguments)
    if typed.out is not None and typed.out.suffix not in _SUFFIXES:
        command.error(f"--out {typed.out}: must end in {', '.join(_SUFFIXES)}")
    with report_errors():
        print_line(show(typed.run, typed.overrides, number=typed.number, out=typed.out))


if __name__ == "__main__":
    main()
