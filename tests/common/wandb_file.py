"""Reads .wandb files without W&B's own reader, which changes its place from version to version.

A .wandb file is a header of 7 bytes and blocks of 32 KiB. A block contains chunks, each with a header (CRC, length, and
kind: the whole, first, middle or last part of a record). The end of a block that is too short for a header is padding.
A record is a protobuf message. Source: LevelDB's log format.
"""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

BLOCK, HEADER = 32 * 1024, 7
LAST = (1, 4)
"""Kinds of chunks that end a record: whole, and last."""


class RunRecord(NamedTuple):
    """Everything that a file says about its run. `rows` are in order, without W&B's own keys, which begin with _."""

    run: Any
    config: dict[str, Any]
    rows: list[dict[str, Any]]
    metrics: dict[str, Any]
    summary: dict[str, Any]
    artifacts: list[Any]
    exit_code: int | None


def chunks(data: bytes) -> Iterator[tuple[int, bytes]]:
    place = HEADER
    while place + HEADER <= len(data):
        if BLOCK - place % BLOCK < HEADER:
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        yield kind, data[place + HEADER : place + HEADER + length]
        place += HEADER + length


def messages(path: Path) -> Iterator[bytes]:
    data, message = path.read_bytes(), b""
    assert data.startswith(b":W&B"), path
    for kind, chunk in chunks(data):
        message += chunk
        if kind in LAST:
            yield message
            message = b""


def read(folder: Path) -> RunRecord:
    """The only W&B run in a run folder."""
    (path,) = folder.glob("wandb/*run-*/run-*.wandb")
    return read_file(path)


def read_file(path: Path) -> RunRecord:
    from wandb.proto.wandb_internal_pb2 import Record

    run_record = RunRecord(None, {}, [], {}, {}, [], None)
    for message in messages(path):
        record = Record.FromString(message)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run_record = run_record._replace(run=record.run)
            run_record.config.update(values(record.run.config.update))
        elif kind == "config":
            run_record.config.update(values(record.config.update))
        elif kind == "history":
            row = {key: value for key, value in values(record.history.item).items() if not key.startswith("_")}
            run_record.rows.append(row)
        elif kind == "metric":
            run_record.metrics[record.metric.name or record.metric.glob_name] = record.metric
        elif kind == "summary":
            run_record.summary.update(values(record.summary.update))
        elif kind == "artifact":
            run_record.artifacts.append(record.artifact)
        elif kind == "exit":
            run_record = run_record._replace(exit_code=record.exit.exit_code)
    run_record.config.pop("_wandb", None)
    return run_record


def values(items: Any) -> dict[str, Any]:
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}
