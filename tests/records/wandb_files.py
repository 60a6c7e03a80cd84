"""Reads W&B's offline files back: LevelDB's log framing around the SDK's protobuf records."""

import json
import struct
from pathlib import Path

BLOCK, FRAME, IDENT = 32768, 7, 7
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def frames(data):
    """The records of a log: each in one frame, or split over blocks as first, middle ..., last."""
    assert data[:4] == b":W&B"
    position, parts = IDENT, b""
    while position + FRAME <= len(data):
        left = BLOCK - position % BLOCK
        if left < FRAME:  # the rest of a block is padding
            position += left
            continue
        _crc, length, kind = struct.unpack_from("<IHB", data, position)
        position += FRAME
        parts += data[position : position + length]
        position += length
        if kind in (FULL, LAST):
            yield parts
            parts = b""
        else:
            assert kind in (FIRST, MIDDLE)


def read(path):
    """The protobuf records of one ``.wandb`` file."""
    from wandb.proto.wandb_internal_pb2 import Record

    records = []
    for data in frames(Path(path).read_bytes()):
        record = Record()
        record.ParseFromString(data)
        records.append(record)
    return records


def _values(items):
    return {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}


def pieces(folder):
    """The offline pieces of the run in a folder, oldest first, as plain values."""
    return [_piece(read(path)) for path in sorted(Path(folder).glob("wandb/offline-run-*/*.wandb"))]


def _piece(records):
    kinds = {kind: [r for r in records if r.WhichOneof("record_type") == kind] for kind in ("run", "history")}
    run = kinds["run"][0].run
    summary = {}
    for record in records:
        if record.WhichOneof("record_type") == "summary":
            summary.update(_values(record.summary.update))
    return {
        "id": run.run_id,
        "project": run.project,
        "name": run.display_name,
        "group": run.run_group,
        "config": _values(run.config.update),
        "history": [_values(record.history.item) for record in kinds["history"]],
        "summary": summary,
        "exit_code": next((r.exit.exit_code for r in records if r.WhichOneof("record_type") == "exit"), None),
    }
