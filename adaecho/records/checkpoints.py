"""Checkpoint files: whole or absent, sealed with a digest and the run they belong to, the one before kept.

A checkpoint is a ZIP archive, as ``torch.save`` writes it, and stays one: the seal is the archive's comment,
``adaecho <identity> sha256:<hex>``, over every byte before the hex digits. ZIP's own CRCs miss what lies
between its members, and a reader need not check them.
"""

import hashlib
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path

from adaecho.records.files import atomic_file, open_regular

LAST, PREVIOUS = "last.pt", "previous.pt"

_END = b"PK\x05\x06"  # an archive's last record: 22 bytes, of which the last two are the comment's length
_END_BYTES = 22
_HEX_BYTES = 64
_SEAL = re.compile(rb"adaecho (\S{1,64}) sha256:")


def save(folder: Path, archive: memoryview, identity: str, may_write: Callable[[], None]) -> None:
    """Write ``archive`` as the last checkpoint; the one before it stays as the previous.

    A kill or a power cut at any instant leaves at least one of the two whole.

    Args:
        folder: of the checkpoints.
        archive: a ZIP archive without a comment; the length of its comment is set in place.
        identity: which run it belongs to, without blanks, at most 64 characters.
        may_write: raises if this process has lost the right to write; called right before the renames.

    Raises:
        FolderError: the disk is full or read-only; earlier checkpoints are untouched.
    """

    def make_room() -> None:
        may_write()
        if (folder / LAST).exists():
            (folder / LAST).replace(folder / PREVIOUS)

    assert bytes(archive[-_END_BYTES:][:4]) == _END, "no ZIP archive, or one with a comment"
    comment = b"adaecho %s sha256:" % identity.encode()
    archive[-2:] = struct.pack("<H", len(comment) + _HEX_BYTES)
    digest = hashlib.sha256(archive)
    digest.update(comment)
    with atomic_file(folder / LAST, ready=make_room) as file:
        file.write(archive)
        file.write(comment + digest.hexdigest().encode())


def identity_of(path: Path) -> str:
    """Which run a checkpoint belongs to, all its bytes checked against its seal.

    Raises:
        OSError: it can't be read.
        ValueError: it is damaged.
    """
    with open_regular(path) as file:
        digest, left = hashlib.sha256(), max(os.fstat(file.fileno()).st_size - _HEX_BYTES, 0)
        file.seek(max(left - 128, 0))
        end = file.read(min(left, 128))
        seal = _SEAL.search(end)
        if seal is None or seal.end() != len(end):  # told before a terabyte of holes, say, is read
            raise ValueError("damaged: it does not end in a seal")
        file.seek(0)
        while left > 0 and (block := file.read(min(left, 1 << 20))):
            digest.update(block)
            left -= len(block)
        if file.read() != digest.hexdigest().encode():
            raise ValueError("damaged: its bytes do not match its digest")
    return seal[1].decode()
