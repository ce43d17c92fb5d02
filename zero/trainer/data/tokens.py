"""Data of data=tokens: a file of uint16 or uint32 token numbers, of which only the rows in use are read.

The file is not mapped into memory, because reading a mapped file that has been truncated ends the process with SIGBUS.
"""

import hashlib
import os
import weakref
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from zero.errors import MachineError
from zero.trainer.data.source import TokensConfig, check_length
from zero.trainer.data.windows import Windows, decode_numbers

DIGEST_BLOCK_BYTES = 64 * 1024
BLOCKS = 256


class TokenFile:
    """An open file of tokens. `numel` is the number of tokens at the time of opening.

    Args:
        dtype: "uint16" or "uint32".
    """

    def __init__(self, path: str, dtype: str) -> None:
        self._path, self._dtype = path, getattr(torch, dtype)
        self._item_bytes = self._dtype.itemsize
        self._fd = os.open(Path(path), os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._fd)
        self.numel = os.fstat(self._fd).st_size // self._item_bytes

    def read(self, start: int, count: int) -> Tensor:
        """Read tokens [start, start + count): a 1-D tensor.

        Raises:
            MachineError: the file has become shorter, or cannot be read.
        """
        data, offset, nbytes = bytearray(), start * self._item_bytes, count * self._item_bytes
        try:
            while len(data) < nbytes and (more := os.pread(self._fd, nbytes - len(data), offset + len(data))):
                data += more
        except OSError as error:
            raise MachineError(f"{self._path} cannot be read at byte {offset}: {error.strerror}") from error
        if len(data) < nbytes:
            raise MachineError(
                f"{self._path} has {os.fstat(self._fd).st_size} bytes, but had "
                f"{self.numel * self._item_bytes} when the run began. Restore the file and resume the run."
            )
        return torch.frombuffer(data, dtype=self._dtype)


class _Stretch:
    """A range of tokens of a file, which can be sliced like a 1-D tensor."""

    def __init__(self, file: TokenFile, start: int, stop: int) -> None:
        self._file, self._start, self._stop = file, start, stop

    def numel(self) -> int:
        return self._stop - self._start

    def __getitem__(self, part: slice) -> Tensor:
        start, stop, _ = part.indices(self.numel())
        return self._file.read(self._start + start, stop - start)


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file's length and of 256 blocks of 64 KiB spread over it: of all bytes up to 16 MiB."""
    size = path.stat().st_size
    digest = hashlib.sha256(size.to_bytes(8, "little"))
    last = max(0, size - DIGEST_BLOCK_BYTES)
    with path.open("rb") as file:
        for start in sorted({last * block // (BLOCKS - 1) for block in range(BLOCKS)}):
            file.seek(start)
            digest.update(file.read(DIGEST_BLOCK_BYTES))
    return digest.hexdigest()


def open_tokens(
    config: TokensConfig,
    seq: int,
    seed: int,
    *,
    held_path: str | None = None,
    decode: Callable[[Tensor], str] = decode_numbers,
    what: str = "",
) -> Windows:
    """Open the token file, and another one for validation if there is one.

    The digest covers `file_digest` of each file, the dtype, and the split into training and validation.

    Args:
        what: the setting that a message begins with; "": data.path.

    Raises:
        ConfigError: training or validation has fewer tokens than a row.
    """
    file = TokenFile(config.path, config.dtype)
    digests = [] if config.dtype == "uint16" else [str(config.dtype)]
    digests.append(file_digest(Path(config.path)))
    if held_path is None:
        cut = config.lengths()[0]
        train, held = _Stretch(file, 0, cut), _Stretch(file, cut, file.numel)
        digests.append(str(cut))
    else:
        other = TokenFile(held_path, config.dtype)
        train, held = _Stretch(file, 0, file.numel), _Stretch(other, 0, other.numel)
        digests.append(file_digest(Path(held_path)))
    check_length(what or f"data.path={config.path}", train.numel(), held.numel(), seq + 1, config.holdout)
    digest = hashlib.sha256(" ".join(digests).encode()).hexdigest()
    return Windows(train, held, seq=seq, seed=seed, vocab_size=config.vocab, digest=digest, decode_tokens=decode)
