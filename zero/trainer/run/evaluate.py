"""Validation loss and a sample of text, computed by all ranks together.

Validation rows are split into chunks, whose size depends on neither the number of ranks nor the batch, and the ranks
take chunks in turn. A rank for which the last turn has no chunk computes another rank's chunk and ignores the result,
because every rank must run the model equally often. Ranks that share rows take slices of the same chunks.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from zero.distributed.world import World
from zero.progress import Progress, silent
from zero.trainer.config import Config
from zero.trainer.data.source import TextConfig
from zero.trainer.data.windows import Data, slice_of
from zero.trainer.launch import preempted
from zero.trainer.models import generate

CHUNK_TOKENS = 2048
"""Tokens that a rank evaluates at a time, in whole rows. It is small, so that validation needs no more memory than a
step."""


def validation_loss(
    loss: Callable[[Tensor], Tensor | tuple[Tensor, Tensor]],
    data: Data,
    world: World,
    *,
    rows: int,
    sequence: int = 1,
    progress: Progress = silent,
) -> float:
    """Return the mean loss over the first `rows` validation rows, or over all if there are fewer. Collective.

    Args:
        loss: maps rows (b, seq + 1) int64 on the world's device, or this rank's slice of them, to their mean loss, or
            to a sum and its number of tokens. Rows weigh as many tokens as they have.
        sequence: number of consecutive ranks that share rows.
        progress: called with the number of chunks that all ranks have evaluated.
    """
    whole = data.validation(0, min(rows, data.validation_rows))
    chunks = whole.split(max(1, CHUNK_TOKENS // (whole.shape[1] - 1)))
    total = torch.zeros(2, dtype=torch.float64, device=world.device)
    group, place = divmod(world.rank, sequence)
    for first in range(0, len(chunks), world.size // sequence):
        progress("validation", first, len(chunks))
        number = first + group
        chunk = slice_of(chunks[number % len(chunks)], place, sequence).to(world.device)
        result = loss(chunk)
        if number < len(chunks):
            added, count = result if isinstance(result, tuple) else (result.double() * len(chunk), len(chunk))
            total += torch.stack((added.double(), torch.as_tensor(count).to(total)))
    progress("validation", len(chunks), len(chunks))
    world.all_reduce(total, what="validation loss").wait()
    return float(total[0] / total[1])


def sample_text(logits: Callable[[Tensor], Tensor], data: Data, world: World, config: Config) -> str:
    """Return a prompt and the text that the model generates after it, with the settings in `config.sample`. Collective.

    The prompt is `def main(` for Python's standard library, the question of a held-out chat, or else the first tokens
    of a validation row. If any rank is requested to stop, the text ends early.

    Args:
        logits: maps tokens (1, t) int64 on the world's device to logits (1, t, vocab).
    """

    def stopped() -> bool:
        requests = torch.tensor([float(preempted())], device=world.device)
        world.all_reduce(requests, what="asked to stop").wait()
        return bool(requests)

    seq, sample = config.model.seq, config.sample
    source = config.source()
    if isinstance(source, TextConfig) and source.folder is None:  # Python's standard library
        prompt, end = torch.tensor([list(b"def main(")])[:, :seq], None
    else:
        prompt, end = data.prompt(seq)
    continued = generate(
        logits,
        prompt.to(world.device),
        sample.tokens,
        seq=seq,
        temperature=sample.temperature,
        seed=config.seed,
        stopped=stopped,
        end=end,
    )
    return printable(data.decode(continued[0].cpu()))


def printable(text: str) -> str:
    """Replace control characters, because a terminal would execute them."""
    return "".join(mark if mark.isprintable() or mark in "\n\t" else "\N{REPLACEMENT CHARACTER}" for mark in text)
