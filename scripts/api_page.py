"""Write docs/api.md, the table of public names, from the docstrings.

Run: python scripts/api_page.py > docs/api.md
"""

import inspect
import re
from importlib import import_module
from pathlib import Path

_HEAD = Path(__file__).with_name("api_page.txt").read_text()
PUBLIC = {
    "adaecho": ["EchoLoader", "AdaScale", "TarShards"],
    "adaecho.headroom": ["watch", "Watch"],
    "adaecho.transforms.photographs": ["DecodeImage", "RandomResizedCrop", "CenterCrop"],
    "adaecho.transforms.small_images": ["PadCropFlip"],
    "adaecho.tasks.boxes": ["SSDAugment", "ResizeWithBoxes", "collate_boxes"],
    "adaecho.tasks.base": ["Task"],
    "adaecho.config.tasks": ["TaskConfig"],
    "adaecho.datasets.split": ["Subset", "train_validation_split", "split_indices"],
    "adaecho.errors": ["UserError", "ConfigError", "DataError", "FolderError"],
}
WITH_MEMBERS = ("EchoLoader", "AdaScale", "Watch")


def first_sentence(thing: object) -> str:
    """Return the first sentence of an object's docstring on one line."""
    paragraph = (inspect.getdoc(thing) or "").split("\n\n")[0].removesuffix("::")
    line = " ".join(paragraph.split()).replace("``", "`").replace("|", "or")
    return re.split(r"\. (?=[A-Z`])", line)[0].rstrip(".")


def members(kind: type) -> dict[str, object]:
    """Return the public methods and properties of a class and of adaecho's base classes, in source order."""
    return {
        name: thing
        for one in kind.__mro__
        if one.__module__.startswith("adaecho.")
        for name, thing in vars(one).items()
        if not name.startswith("_") and (inspect.isfunction(thing) or isinstance(thing, property))
    }


def rows() -> list[tuple[str, str, str]]:
    """Return the name, the module and the description of each public name."""
    found = []
    for module, names in PUBLIC.items():
        for name in names:
            thing = getattr(import_module(module), name)
            found.append((f"`{name}`", f"`{module}`", first_sentence(thing)))
            for member, part in members(thing).items() if name in WITH_MEMBERS else ():
                call = "()" * (not isinstance(part, property))
                found.append((f"`{name}.{member}{call}`", "", first_sentence(part)))
    return found


def page() -> str:
    """Return the text of the whole page."""
    return _HEAD + "".join(f"| {' | '.join(row)} |\n".replace("|  |", "| |") for row in rows())


if __name__ == "__main__":
    print(page(), end="")
