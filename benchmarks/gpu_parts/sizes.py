"""All sizes: for a GPU, and for a dry run, which does the same with tiny models."""

from dataclasses import dataclass, field
from typing import Any, Literal

MiB, GiB = 2**20, 2**30


@dataclass(frozen=True)
class Model:
    """A GPT to be timed.

    Attributes:
        config: arguments of `zero.trainer.models.GPTConfig`.
        rows: sizes of the steps that are tried, in rows of `config["seq"]` tokens.
        activations: kept, or recomputed in backward, by every system alike.
        seconds: time limit of its task in a run of the usual length.
    """

    name: str
    config: dict[str, Any]
    rows: tuple[int, ...]
    activations: Literal["keep", "remat"]
    seconds: float


@dataclass(frozen=True)
class Sizes:
    """All sizes of one run.

    Attributes:
        laws, law_rows, law_steps: the model whose bits are compared, rows of its steps, number of steps.
        compile: backend of the compiled units.
        speed: models that all systems train.
        warm, timed, rounds: steps to warm up, timed steps, and the largest number of turns of each system.
        largest: models that are tried with offload=auto, the most likely to fit first.
        largest_steps: steps of each of these.
        traced: the model of which a step is profiled.
        page_bytes: of the store; None: the library's default.
        copy_bytes, disk_bytes, product: for rates: bytes copied, bytes written to disk, width of multiplied matrices.
        collective_bytes: sizes of the tensors of collectives.
        precisions: precisions in which the bits of compiled units and of several ranks are compared.
        ranks: models that several ranks train; rows are for each rank.
        law_pages: further page sizes, in bytes, that must not change the bits.
    """

    laws: dict[str, Any]
    law_rows: int
    law_steps: int
    compile: bool | str
    speed: tuple[Model, ...]
    warm: int
    timed: int
    rounds: int
    largest: tuple[Model, ...]
    largest_steps: int
    traced: Model
    page_bytes: int | None
    copy_bytes: int
    disk_bytes: int
    product: int
    collective_bytes: tuple[int, ...]
    precisions: tuple[str, ...]
    ranks: tuple[Model, ...]
    law_pages: tuple[int, ...] = field(default=(64 * 1024,))


def _gpt(width: int, layers: int, seq: int, vocab: int = 50304, heads: int | None = None) -> dict[str, Any]:
    return {"vocab": vocab, "width": width, "layers": layers, "heads": heads or width // 64, "seq": seq}


SMALL = Model("124M", _gpt(768, 12, 1024), (4, 32), "keep", 30)
MEDIUM = Model("340M", _gpt(1024, 24, 1024), (4, 16), "keep", 65)
LARGE = Model("1.3B", _gpt(2048, 24, 2048, heads=16), (8, 2), "remat", 130)

FULL = Sizes(
    laws=_gpt(256, 4, 128, vocab=1024),
    law_rows=4,
    law_steps=4,
    compile=True,
    speed=(SMALL, MEDIUM, LARGE),
    warm=2,
    timed=4,
    rounds=3,
    largest=(
        Model("6.7B", _gpt(4096, 32, 2048, heads=32), (8,), "remat", 70),
        Model("14B", _gpt(5120, 44, 2048, heads=40), (8,), "remat", 130),
    ),
    largest_steps=3,
    traced=Model("340M", _gpt(1024, 24, 1024), (8,), "keep", 25),
    page_bytes=None,
    copy_bytes=512 * MiB,
    disk_bytes=1 * GiB,
    product=8192,
    collective_bytes=(16 * MiB, 64 * MiB, 256 * MiB, 1 * GiB),
    precisions=("bf16", "fp32"),
    ranks=(
        Model("340M", _gpt(1024, 24, 1024), (8,), "keep", 60),
        Model("1.3B", _gpt(2048, 24, 2048, heads=16), (4,), "remat", 110),
    ),
)

_TINY = _gpt(32, 2, 16, vocab=64, heads=2)

DRY = Sizes(
    laws=_TINY,
    law_rows=2,
    law_steps=2,
    compile="eager",
    speed=(Model("tiny", _TINY, (2, 1), "remat", 20),),
    warm=1,
    timed=1,
    rounds=2,
    largest=(Model("tiny", _TINY, (2,), "remat", 5), Model("tiny, deep", {**_TINY, "layers": 6}, (2,), "remat", 5)),
    largest_steps=2,
    traced=Model("tiny", _TINY, (2,), "keep", 5),
    page_bytes=4096,
    copy_bytes=MiB,
    disk_bytes=MiB,
    product=64,
    collective_bytes=(MiB // 16,),
    precisions=("bf16",),
    ranks=(Model("tiny", _TINY, (2,), "keep", 15),),
    law_pages=(),
)
