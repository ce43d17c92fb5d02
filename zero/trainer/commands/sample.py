"""Continue a text with the model in a checkpoint, or answer it if the run trained on chats with roles.

scripts/sample RUN "def main("                     RUN: a checkpoint, a run, or a folder of checkpoints
scripts/sample RUN "def main(" --tokens 200 --temperature 0
"""

import argparse
import contextlib
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from zero.platform.installed import as_called
from zero.trainer.launch import signals_waiting
from zero.trainer.text_output import command_line


def arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = command_line("sample", __doc__)
    parser.add_argument("run", help="a checkpoint, a run, or a folder of checkpoints; the newest valid one is used")
    parser.add_argument(
        "prompt",
        help="the text to continue; of a run on chats with roles a question, to which their template is applied",
    )
    parser.add_argument("--raw", action="store_true", help="continue the text as it is, without a chat template")
    parser.add_argument("--tokens", type=whole_number, default=200, help="how many tokens to generate")
    parser.add_argument("--temperature", type=temperature, default=0.8, help="0: always the most likely token")
    parser.add_argument(
        "--weights", default="parameter", choices=("parameter", "ema"), help="ema: their exponential moving average"
    )
    parser.add_argument("--seed", type=whole_number, default=0)
    return parser.parse_args(words)


def whole_number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number >= 0")
    return int(text)


def temperature(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number >= 0")
    return value


def coder(data: Any, *, raw: bool, turns: bool) -> tuple[Callable[[str], list[int]], Callable[[Any], str], int | None]:
    """Return (encode, decode, end) with the tokenizer of the run's data.

    `encode` maps a text to a list of at least one token, `decode` a 1-D tensor of tokens to a text. `end` is the token
    that ends an answer, None without chats.

    Args:
        raw: continue the text as it is.
        turns: whether the run trained on chats with roles, to which the chat template applies.

    Raises:
        ConfigError: the data has no text.
    """
    from zero.errors import ConfigError
    from zero.trainer.data.chat.encoder import ChatEncoder
    from zero.trainer.data.source import ChatConfig, TextConfig, TokenisedConfig
    from zero.trainer.data.text import decode_bytes
    from zero.trainer.data.tokenizer import Tokenizer

    if isinstance(data, TokenisedConfig):
        tokenizer = Tokenizer(data.tokenizer, data.end)

        def encode(text: str) -> list[int]:
            asked = octets(text).decode(errors="replace")
            if isinstance(data, ChatConfig) and not raw:
                return ChatEncoder(data.tokenizer, data.template, tokenizer.end).asked(asked, as_message=turns)
            return tokenizer.encode([asked])[0] or [tokenizer.end]

        end = tokenizer.end if isinstance(data, ChatConfig) and not raw else None
        return encode, lambda row: tokenizer.decode(row.tolist()), end
    if isinstance(data, TextConfig):
        return lambda text: list(octets(text) or b"\n"), decode_bytes, None
    raise ConfigError(f"data={data.name} has no text, so a prompt cannot be turned into tokens")


def octets(text: str) -> bytes:
    """Return the bytes of a command-line argument as they were typed, also if they are not valid UTF-8."""
    return text.encode(errors="surrogateescape")


def main(words: Sequence[str]) -> int:
    options = arguments(words)
    with signals_waiting():
        import torch

    import zero
    from zero.errors import CheckpointError, ZeroError
    from zero.settings.build import build_plan
    from zero.trainer.config import read
    from zero.trainer.models import generate
    from zero.trainer.run.evaluate import printable
    from zero.trainer.run.resume import open_named
    from zero.trainer.run.task import build_task

    try:
        world = zero.open_world()
        checkpoint = open_named(Path(options.run), world, partial(print, file=sys.stderr))
        saved = checkpoint.facts.get("config")
        if not isinstance(saved, dict):
            raise CheckpointError(
                f"{checkpoint.folder}: it does not contain the settings of its model, because train.py did not save it"
            )
        evaluation = {"mode": "eval", "resume": str(checkpoint.folder)}  # no training
        whole_rows = {"zero": {**saved.get("zero", {}), "sequence": 1}}
        config = read({**saved, **evaluation, **whole_rows, "offload": {}, "launch": {}, "batch": {}}).on(world.size)
        encode, decode, end = coder(config.source(), raw=options.raw, turns=checkpoint.facts.get("turns", True))
        task = build_task(config)
        plan = build_plan(config, task.model, world)
        with contextlib.closing(zero.open_store(plan)) as store:
            state = zero.load(zero.init(plan, store), checkpoint, moments=False, weights=options.weights)
            logits = partial(zero.make_forward(plan, task.logits), state)
            prompt = torch.tensor([encode(options.prompt)])
            row = generate(
                logits,
                prompt,
                options.tokens,
                seq=config.model.seq,
                temperature=options.temperature,
                seed=options.seed,
                end=end,
            )
        print(printable(decode(row[0])))
    except ZeroError as error:
        print(as_called(str(error)), file=sys.stderr)
        return error.exit_code
    return 0
