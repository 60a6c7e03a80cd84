"""Read W&B's offline files: LevelDB's log format around protobuf records."""

import json
import struct
from pathlib import Path

BLOCK, FRAME, IDENT = 32768, 7, 7
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def frames(data):
    """The records of a log; a record has one frame, or a first, middle and last frame."""
    assert data[:4] == b":W&B"
    position, parts = IDENT, b""
    while position + FRAME <= len(data):
        left = BLOCK - position % BLOCK
        if left < FRAME:  # the rest of a block is padding
            position += left
            continue
        _crc, length, kind = struct.unpack_from("<IHB", data, position)
        position += FRAME + length
        parts += data[position - length : position]
        if kind in (FULL, LAST):
            yield parts
            parts = b""
        else:
            assert kind in (FIRST, MIDDLE)


def read(path):
    """The protobuf records of one ``.wandb`` file."""
    from wandb.proto.wandb_internal_pb2 import Record

    return [Record.FromString(data) for data in frames(Path(path).read_bytes())]


def _values(items):
    return {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}


def pieces(root, name=None):
    """The offline runs under ``root/wandb``, optionally of one name, oldest first, as plain values."""
    found = [_piece(read(path)) for path in sorted(Path(root).glob("wandb/offline-run-*/*.wandb"))]
    return [piece for piece in found if name in (None, piece["name"])]


def _piece(records):
    def of(kind):
        found = [record for record in records if record.WhichOneof("record_type") == kind]
        return [getattr(record, kind) for record in found]

    (run, *_), summary = of("run"), {}
    for one in of("summary"):
        summary |= _values(one.update)
    return {
        "id": run.run_id, "project": run.project, "name": run.display_name, "group": run.run_group,
        "config": _values(run.config.update), "summary": summary,
        "history": [_values(one.item) for one in of("history")],
        "exit_code": next((one.exit_code for one in of("exit")), None),
    }  # fmt: skip
