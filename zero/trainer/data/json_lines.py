"""Records in lines of JSON."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zero.errors import ConfigError, in_short


def json_lines(file: Path, example: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place for messages and the fields of each record; empty lines are left out.

    Args:
        example: a record, for the message.

    Raises:
        ConfigError: a line is not JSON, or no record.
    """
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{file}, line {number}"
            try:
                fields = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"data.path: {where} is not JSON: {in_short(error)}") from error
            if not isinstance(fields, dict):
                raise ConfigError(f"data.path: {where} is not a record such as {example}")
            yield where, fields
