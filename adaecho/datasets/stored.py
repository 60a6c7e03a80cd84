"""Tables of examples through Hugging Face ``datasets``: local files, by its builders, and the hub."""

from pathlib import Path
from typing import Any, NamedTuple

from adaecho.errors import DataError


class Stored(NamedTuple):
    """A stored data set.

    Attributes:
        splits: a ``datasets.Dataset`` for each name, such as "train".
        files: the local files, or for a hub id those in the cache of ``datasets``.
    """

    splits: dict[str, Any]
    files: list[Path]


def load(path: str, columns: tuple[str, ...], key: str = "data.path") -> Stored:
    """What a path names, loaded with ``datasets.load_dataset``: splits are found by its conventions.

    It keeps a copy of tables as Arrow in its cache (``HF_HOME``), from which rows are read at random.

    Args:
        path: a local folder (parquet, say), or a hub id: owner/name, or owner/name/configuration.
        columns: that each split must have; images among them stay encoded.
        key: of the config, that names the path.

    Raises:
        DataError: it can't be had, or lacks a column.
    """
    from datasets import Image, load_dataset  # most of a second to import; only tasks with tables need it

    local = Path(path).expanduser()
    owner_name, configuration = "/".join(path.split("/")[:2]), "/".join(path.split("/")[2:]) or None
    if not local.exists() and ("://" in path or path.count("/") not in (1, 2)):
        raise DataError(f"{key}={path}: there is no such file or folder, and it is no hub id (owner/name)")
    named = (str(local.resolve()), None) if local.exists() else (owner_name, configuration)
    try:
        # Its files are mapped, also where HF_DATASETS_IN_MEMORY_MAX_SIZE asks for small ones in memory.
        splits = load_dataset(*named, keep_in_memory=False)
    except Exception as error:  # it raises many kinds, and all mean the same here
        what = (
            "can't be loaded"
            if local.exists()
            else "there is no such folder, nor can it be loaded as a hub id"
        )
        raise DataError(
            f"{key}={path}: {what} ({type(error).__name__}: {error}). Check files, name, connection and "
            "access (HF_HUB_OFFLINE=1 looks into the cache alone)"
        ) from error
    for name, split in splits.items():
        if not {*columns} <= {*split.features}:
            raise DataError(
                f"{key}={path}: its split {name} needs the columns {', '.join(columns)}, and has "
                f"{', '.join(split.features)}"
            )
        for column in columns:
            if isinstance(split.features[column], Image):
                split = split.cast_column(column, Image(decode=False))
        splits[name] = split.select_columns(list(columns))
    if local.exists():
        files = sorted(one for one in local.rglob("*") if one.is_file() and one.name[0] != ".")
    else:
        files = [Path(file["filename"]) for split in splits.values() for file in split.cache_files]
    return Stored(dict(splits), files)
