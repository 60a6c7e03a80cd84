"""Every public name, from the code's own docstrings.

``python scripts/api_page.py > docs/api.md`` makes the page anew.
"""

import inspect
import re
from importlib import import_module

_HEAD = """# Public names

<!-- Made by scripts/api_page.py from the docstrings; a test holds it current. -->

What other programs may import. `help(name)` tells the rest: arguments, shapes, units, errors. Every other
module may change without notice. Commands are in [README](../README.md), [Sweeps](sweeps-and-devices.md) and
[Config keys](configuration.md).

| name | import it from | what it is |
|---|---|---|
"""
# Module: its public names, each followed by the members to list.
PUBLIC: dict[str, dict[str, bool]] = {
    "adaecho": {
        "EchoLoader": True,
        "AdaScale": True,
        "TarShards": False,
        "IndexedTarShards": False,
        "Retries": False,
    },
    "adaecho.adascale": {"AdaScaleWrapper": False},
    "adaecho.headroom": {"watch": False, "Watch": True},
    "adaecho.shards": {"TransferError": False, "ArchiveError": False},
    "adaecho.transforms.photographs": {
        "DecodeImage": False,
        "RandomResizedCrop": False,
        "CentreCrop": False,
    },
    "adaecho.transforms.small_images": {"PadCropFlip": False},
    "adaecho.tasks.boxes": {"SSDAugment": False, "ResizeWithBoxes": False, "collate_boxes": False},
    "adaecho.tasks.base": {"Task": False},
    "adaecho.config.tasks": {"TaskConfig": False},
    "adaecho.datasets.split": {"Rows": False, "hold_out": False, "hold_out_rows": False},
    "adaecho.errors": {"UserError": False, "ConfigError": False, "DataError": False, "FolderError": False},
}


def first_sentence(thing: object) -> str:
    """Of its docstring, on one line of a table."""
    paragraph = (inspect.getdoc(thing) or "").split("\n\n")[0].removesuffix("::")
    line = " ".join(paragraph.split()).replace("``", "`").replace("|", "or")
    return re.split(r"\. (?=[A-Z`])", line)[0].rstrip(".")


def members(kind: type) -> dict[str, object]:
    """Public methods and properties of a class and of ours above it, in the order of the source."""
    return {
        name: thing
        for one in kind.__mro__
        if one.__module__.startswith("adaecho.")
        for name, thing in vars(one).items()
        if not name.startswith("_") and (inspect.isfunction(thing) or isinstance(thing, property))
    }


def rows() -> list[tuple[str, str, str]]:
    """Name, module, description."""
    found = []
    for module, names in PUBLIC.items():
        for name, with_members in names.items():
            thing = getattr(import_module(module), name)
            found.append((f"`{name}`", f"`{module}`", first_sentence(thing)))
            for member, part in members(thing).items() if with_members else ():
                call = "" if isinstance(part, property) else "()"
                found.append((f"`{name}.{member}{call}`", "", first_sentence(part)))
    return found


def page() -> str:
    """The whole page."""
    return _HEAD + "".join(f"| {' | '.join(row)} |\n".replace("|  |", "| |") for row in rows())


if __name__ == "__main__":
    print(page(), end="")
