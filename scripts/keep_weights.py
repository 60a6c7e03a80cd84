"""Keep a run's weights in the repository: ``python scripts/keep_weights.py RUN NAME``.

The folder results/weights/NAME then holds what ``python -m adaecho.evaluate`` and ``adaecho.show`` need,
without where the data lay on the machine that trained, and a card that says what the weights are.
"""

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from safetensors import safe_open  # noqa: E402

from adaecho.config.identity import run_id  # noqa: E402
from adaecho.errors import FolderError  # noqa: E402
from adaecho.records.files import read_json, read_yaml, yaml_text  # noqa: E402
from adaecho.records.folder import RunFolder  # noqa: E402

WEIGHTS = ROOT / "results" / "weights"
_DATA = {
    "digits": "The images come with scikit-learn: Optical Recognition of Handwritten Digits (Alpaydin and "
    "Kaynak 1998), UCI Machine Learning Repository, CC BY 4.0.",
    "cifar10": "CIFAR-10 (Krizhevsky 2009), which its authors publish without naming a licence.",
}
_CARD = """# {name}

{what}: echo={variant}, e = {factor}, seed {seed}, {device}, {precision}.
Weights are float32, kept by `scripts/keep_weights.py`.

| | |
|---|---|
| task | [{task}](../../../docs/tasks/{task}.md) |
| run | {run} (hash of its [config](config.yaml)) |
| commit | {commit} |
| fresh examples, steps | {fresh_examples:,}, {steps:,} |
{metrics}
| licence | of the weights: Apache-2.0, as the code's. {data} |

The figures again; another kind of processor or other versions round otherwise:

    python -m adaecho.evaluate results/weights/{name}{path}
"""


def card(folder: Path) -> str:
    """The card of kept weights, from the records beside them."""
    config, summary = read_yaml(folder / "config.yaml"), read_json(folder / "summary.json")
    metric, lines = summary["best"]["metric"], RunFolder(folder).read_metrics()
    last = summary.get("final") or {
        metric: next(line[metric] for line in reversed(lines) if line["steps"] == summary["steps"])
    }
    measured = {"validation": last, "test": summary.get("test", {})}
    metrics = [
        f"| {split} {metric} | {value} |" for split, of in measured.items() for metric, value in of.items()
    ]
    task = summary["task"]
    return _CARD.format(
        name=folder.name,
        what=f"Trained to {summary['target']['metric']} {summary['target']['value']} on {task}",
        **summary["echo"],
        **{key: summary[key] for key in ("seed", "device", "precision", "task", "fresh_examples", "steps")},
        run=run_id(config),
        commit=read_json(folder / "environment.json")["git"]["sha"],
        metrics="\n".join(metrics),
        data=_DATA[task],
        path="" if task == "digits" else " data.path=FOLDER",
    )


def keep(run: Path, name: str) -> None:
    """Copy what is kept and write the card."""
    RunFolder(run).check_links()
    summary = read_json(run / "summary.json")
    with safe_open(run / "model" / "final.safetensors", "pt") as weights:
        steps = int(weights.metadata()["steps"])
    if summary["status"] not in ("reached", "budget_spent") or summary["steps"] != steps:
        raise FolderError(
            f"{run}: its weights are those of step {steps}, and it is {summary['status']} at step "
            f"{summary['steps']}; let it end"
        )
    folder = WEIGHTS / name
    (folder / "model").mkdir(parents=True, exist_ok=True)
    for file in ("summary.json", "environment.json", "metrics.jsonl", "model/final.safetensors"):
        shutil.copyfile(run / file, folder / file)
    config: dict[str, Any] = dict(read_yaml(run / "config.yaml"))
    config["data"]["path"] = None
    (folder / "config.yaml").write_text(yaml_text(config))
    (folder / "README.md").write_text(card(folder))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="its folder")
    parser.add_argument("name", help="of the folder in results/weights")
    typed = parser.parse_args()
    keep(typed.run, typed.name)
