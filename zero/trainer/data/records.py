"""Records, dicts of fields, in the files that people have: JSON, CSV, TSV, Parquet, and folders that `datasets` saved.

A place is a path, or a name on Hugging Face's hub. The files of a folder are read in the order of their names, which is
the same on every machine.
"""

import csv
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from zero.errors import ConfigError, in_short
from zero.platform.installed import require_hf
from zero.progress import Progress
from zero.trainer import hub
from zero.trainer.data.files import TextFile, files_below

SAVED = "dataset_info.json"
"""The file that `save_to_disk` of `datasets` writes in the folder of a dataset."""

SPLITS = "dataset_dict.json"
"""The file that `save_to_disk` writes in a folder that contains several datasets."""

RECORDS_PER_READ = 256
LARGEST_CELL = 2**31 - 1


class Record(NamedTuple):
    """A record, and its place for messages."""

    fields: Mapping[str, Any]
    where: str


def is_dataset(place: str) -> bool:
    """Return whether a place is read by `datasets`.

    Raises:
        ConfigError: the folder holds several datasets.
    """
    if (Path(place) / SPLITS).is_file():
        folders = sorted(path.parent.name for path in Path(place).glob(f"*/{SAVED}"))
        raise ConfigError(f"data.path={place} holds the splits {', '.join(folders)}. Give the folder of one split.")
    return (Path(place) / SAVED).is_file() or hub.is_name(place)


def open_dataset(place: str) -> Any:
    """Open a folder that `datasets` saved, or the training split of a dataset of the hub.

    Raises:
        ConfigError: `datasets` is not installed, or cannot read it.
    """
    if hub.is_name(place):
        return hub.dataset(place)
    require_hf("datasets", f"data.path={place} needs")
    import datasets

    try:
        return datasets.load_from_disk(place).with_format(None)
    except Exception as error:  # a damaged folder raises errors of Arrow, the file system or datasets
        raise ConfigError(f"data.path={place}: datasets cannot read it: {in_short(error)}") from error


def files_at(place: str, wanted: Callable[[Path], bool]) -> list[TextFile]:
    """Return the files of a place, in the order in which they are read.

    Args:
        wanted: returns whether a file of a folder is read.

    Raises:
        ConfigError: the place does not exist.
    """
    path = Path(place)
    if is_dataset(place):
        return _dataset_files(place)
    if path.is_dir():
        return [*files_below(path, wanted)]
    if not path.exists():
        raise ConfigError(f"data.path={place} does not exist. Give a file, a folder, or ORG/NAME of the hub.")
    return [TextFile(path, path.name, path.stat().st_size)]


def _dataset_files(place: str) -> list[TextFile]:
    if hub.is_name(place):
        paths = [Path(file["filename"]) for file in open_dataset(place).cache_files]
    else:
        paths = sorted(path for path in Path(place).iterdir() if path.is_file())
    return [TextFile(path, path.name, path.stat().st_size) for path in paths]


def of_dataset(place: str, columns: Sequence[str] = ()) -> Iterator[Record]:
    """Yield the records of a dataset.

    Args:
        columns: the columns to read, as far as they exist; (): all.
    """
    rows = open_dataset(place)
    if chosen := [name for name in columns if name in rows.column_names]:
        rows = rows.select_columns(chosen)
    number = 0
    for batch in rows.iter(RECORDS_PER_READ):
        for values in zip(*batch.values(), strict=True):
            yield Record(_without_nulls(dict(zip(batch, values, strict=True))), f"{place}, row {number}")
            number += 1


def of_file(file: Path, columns: Sequence[str] = ()) -> Iterator[Record]:
    """Yield the records of a file whose suffix is in `READERS`.

    Args:
        columns: the columns of Parquet to read, as far as they exist; (): all.

    Raises:
        ConfigError: the file cannot be read, or holds something else than records.
    """
    yield from READERS[file.suffix](file, columns)


def hash_files(digest: "hashlib._Hash", files: Sequence[TextFile], what: str, progress: Progress) -> None:
    """Add the names and all bytes of files to a digest.

    Args:
        what: describes the work in the progress.
    """
    done, total = 0, sum(file.size for file in files)
    for file in files:
        digest.update(f"{len(os.fsencode(file.key))} {file.size} ".encode() + os.fsencode(file.key))
        with file.path.open("rb") as read:
            while block := read.read(2**22):
                digest.update(block)
                done += len(block)
                progress(what, min(done, total), total)


def _of_lines(file: Path, _: Sequence[str]) -> Iterator[Record]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                where = f"{file}, line {number}"
                yield _record(_parsed(line, where), where)


def _of_json(file: Path, columns: Sequence[str]) -> Iterator[Record]:
    """Yield the records of one list, or of lines."""
    with file.open("rb") as read:
        begins = read.read(4096).lstrip()[:1]
    if begins != b"[":
        yield from _of_lines(file, columns)
        return
    for number, fields in enumerate(_parsed(file.read_bytes(), str(file))):
        yield _record(fields, f"{file}, record {number}")


def _parsed(octets: bytes, where: str) -> Any:
    try:
        return json.loads(octets)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"data.path: {where} is not JSON: {in_short(error)}") from error


def _record(fields: Any, where: str) -> Record:
    if not isinstance(fields, dict):
        raise ConfigError(f"data.path: {where} is not a record such as {{'text': ..}}")
    return Record(fields, where)


def _of_table(separator: str, file: Path, _: Sequence[str]) -> Iterator[Record]:
    csv.field_size_limit(LARGEST_CELL)
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            rows = csv.DictReader(lines, delimiter=separator, strict=True)
            for fields in rows:
                where = f"{file}, line {rows.line_num}"
                if None in fields or None in fields.values():
                    raise ConfigError(
                        f"data.path: {where} has not the {len(rows.fieldnames or ())} cells of the first."
                    )
                yield Record(fields, where)
    except (csv.Error, UnicodeDecodeError) as error:
        raise ConfigError(f"data.path: {file}: it is no table in UTF-8: {in_short(error)}") from error


def _of_parquet(file: Path, columns: Sequence[str]) -> Iterator[Record]:
    require_hf("pyarrow", f"data.path: {file} needs")
    from pyarrow import parquet

    number = 0
    try:
        opened = parquet.ParquetFile(file)
        chosen = [name for name in columns if name in opened.schema_arrow.names] or None
        for batch in opened.iter_batches(RECORDS_PER_READ, columns=chosen):
            for fields in batch.to_pylist():
                yield Record(_without_nulls(fields), f"{file}, row {number}")
                number += 1
    except Exception as error:  # Arrow raises its own errors for damaged files
        raise ConfigError(f"data.path: {file}, row {number}: Arrow cannot read it: {in_short(error)}") from error


def _without_nulls(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record of Arrow whose values lack the fields of other rows, which Arrow fills with nulls."""

    def cleared(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: cleared(each) for name, each in value.items() if each is not None}
        return [cleared(each) for each in value] if isinstance(value, list) else value

    return {name: cleared(value) for name, value in fields.items()}


READERS: Mapping[str, Callable[[Path, Sequence[str]], Iterator[Record]]] = {
    ".jsonl": _of_lines,
    ".ndjson": _of_lines,
    ".json": _of_json,
    ".csv": partial(_of_table, ","),
    ".tsv": partial(_of_table, "\t"),
    ".parquet": _of_parquet,
}
"""Suffix of a file of records -> the function that reads it."""
