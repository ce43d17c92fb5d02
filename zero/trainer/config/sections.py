"""Sections of settings that only train.py has. `Config` checks conditions that involve several sections."""

import re
from typing import Annotated, Literal

from pydantic import Field

from zero.core.schema import Section
from zero.core.setting_types import (
    Memory,
    Names,
    Natural,
    NonNegative,
    PathText,
    PlainText,
    Ranks,
    Reads,
    Rows,
    ThreadCount,
    Whole,
    bytes_of,
    key,
    memory_bytes,
    or_auto,
    validate_text,
)
from zero.settings.step_sections import Zero


def _disk(value: object) -> int:
    return bytes_of(value) and memory_bytes(value)


def _pcie(value: object) -> str:
    if not re.fullmatch(r"[3-6]x(1|2|4|8|16)", str(value)):
        raise ValueError
    return str(value)


def _gpu(value: object) -> str:
    if type(value) is int and 100 <= value <= 9999:  # Hydra reads 4090 as a number
        return str(value)
    return validate_text(value)


DiskBytes = Annotated[int | Literal["auto"], or_auto("a size such as 4TB", _disk)]
GPUName = Annotated[str, Reads("text", _gpu)]
PCIe = Annotated[str, Reads("a generation from 3 to 6 and lanes, such as 5x16", _pcie)]


class ZeroOfRun(Zero):
    """Sharding and movement of the training state."""

    sequence: Whole = key(
        1,
        "ranks that share rows and hold slices of their tokens, for long rows (sequence parallelism by heads); it "
        "divides ranks, model.seq and attention heads",
        unit="ranks",
        trades="activations, a slice of a row on each rank, against exchanges of tokens for heads in each attention",
        example="2 launch.ranks=2",
    )


class Val(Section):
    """Validation on rows that training never sees."""

    path: PathText | None = key(
        None,
        "data for validation, read as the training data is, all of which then trains; null: data.holdout of it",
        example="held.jsonl data=chat data.path=chats.jsonl model=hf model.path=path/to/llama",
    )
    at_start: bool = key(False, "validate before the first step too", example="true")
    patience: Whole | None = key(
        None,
        "end the run after so many validations in a row without a lower loss; null: never",
        unit="validations",
        example="3",
    )
    every: Natural = key(100, "steps between two validations; 0: only after the last step", unit="steps", example="50")
    rows: Rows = key(
        64,
        "rows of model.seq tokens per validation, over all ranks",
        unit="rows",
        trades="time against noise in val/loss",
        example="256",
    )
    weights: Literal["parameter", "ema"] = key(
        "parameter",
        "weights that mode=eval evaluates: the parameters of the checkpoint, or ema, their running mean",
        example="ema mode=eval resume=latest",
    )


class Sample(Section):
    """The text that a run prints at its end."""

    tokens: Annotated[int, Field(ge=0, le=1_000_000)] = key(
        240, "length of the sample, in tokens; 0: none", unit="tokens", example="0"
    )
    temperature: NonNegative = key(0.7, "0: always the likeliest token", example="0")


class Launch(Section):
    """The start of the ranks."""

    ranks: Ranks = key("auto", "processes; auto: one per GPU, or 1 on a CPU", unit="processes", example="2")
    device: Literal["auto", "cpu", "cuda"] = key(
        "auto", "device: cuda, cpu, or auto: GPUs where torch finds some", example="cpu"
    )
    threads: ThreadCount = key(
        "auto", "CPU threads per rank; auto: the cores shared evenly", unit="threads", example="1"
    )
    timeout: Annotated[float, Field(ge=1, le=604_800)] = key(
        300.0,
        "longest wait for another rank, in seconds; the error then names it; at most a week",
        unit="seconds",
        trades="how soon a hung rank is noticed, against patience with a slow one",
        example="60",
    )
    max_restarts: Natural = key(
        0,
        "restarts of all ranks after a failure, from the newest valid checkpoint",
        unit="starts",
        example="3 checkpoint.every=100",
    )
    grace: Annotated[float, Field(ge=1, le=86_400)] = key(
        30.0,
        "seconds between SIGTERM or SIGUSR1 and the end; a save must fit in",
        unit="seconds",
        example="120",
    )
    malloc: Literal["raised", "lean", "default"] = key(
        "raised",
        "glibc's thresholds: raised keeps freed memory for faster steps, lean gives it back at once",
        trades="time against memory: page faults of fresh memory can cost more than an update",
        example="lean",
    )

    def asked_device(self) -> str | None:
        """Return the device for `zero.open_world`; None for auto."""
        return None if self.device == "auto" else self.device


class CheckpointSection(Section):
    """Checkpoints of a run; see docs/checkpoints.md."""

    dir: PathText | None = key(
        None, "folder of all checkpoints; null: checkpoints/ in the run's folder", example="checkpoints"
    )
    every: Natural = key(
        0,
        "save after every so many steps, after the last and when stopped; 0: only when SIGTERM stops the run",
        unit="steps",
        trades="work lost in a crash against time for saving",
        example="100",
    )
    keep: Annotated[int, Field(ge=2, le=2**31)] = key(
        2,
        "newest valid checkpoints to keep, 2 or more",
        unit="checkpoints",
        trades="disk: each holds 12 bytes per parameter with Adam",
        example="3",
    )
    keep_every: Whole | None = key(
        None,
        "keep those of every so many steps as well; null: no others",
        unit="steps",
        example="1000 checkpoint.every=100",
    )
    best: Literal["val/loss"] | None = key(
        None,
        "save after each validation with the lowest loss so far, and keep the last of these, as the link best beside "
        "the checkpoints; null: keep by age alone",
        example="val/loss",
    )
    async_: bool = key(
        False,
        "write a copy behind the next steps; needs host memory for it",
        alias="async",
        trades="host memory for this rank's share of the state, against waiting for the disk",
        example="true",
    )
    on_failure: Literal["stop", "continue"] = key("stop", "reaction to a save that fails", example="continue")
    partial: Names = key(
        (), "names or patterns of tensors that resume leaves as they are, such as [head.*]", example="[head.*]"
    )
    convert: Names = key((), "names or patterns of tensors that resume may read from another dtype", example="['*']")

    @property
    def saves(self) -> bool:
        """Whether the run has a place for checkpoints, so that Ctrl-C saves."""
        return self.every > 0 or self.best is not None or self.dir is not None


class MachineSection(Section):
    """The machine that mode=plan plans for; auto: this one."""

    all: bool = key(False, "print every stage and offload with its bytes above the answer", example="true mode=plan")
    ranks: Ranks = key(
        "auto", "ranks in all; auto: launch.ranks, on one machine", unit="processes", example="64 mode=plan"
    )
    ranks_per_node: Ranks = key(
        "auto",
        "ranks that share one host memory; auto: all of launch.ranks, or at most 8 of plan.ranks",
        unit="processes",
        example="4 mode=plan",
    )
    gpu: GPUName | None = key(
        None, "model of the GPUs, such as H100, for their memory and rates; null: round rates", example="H100 mode=plan"
    )
    pcie: PCIe | None = key(
        None,
        "generation and lanes of the PCIe of each GPU, such as 5x16; null: those of plan.gpu, or what is measured here",
        example="4x8 plan.gpu=H100 mode=plan",
    )
    disks: Rows | None = key(
        None,
        "drives of one node that share the pages; null: one, or the folders of offload.path on this machine",
        unit="drives",
        example="4 plan.gpu=H100 mode=plan",
    )
    device_memory: Memory = key(
        "auto",
        "memory of one GPU, such as 80GiB; auto: that of plan.gpu, or what is free here",
        unit="bytes",
        example="80GiB mode=plan",
    )
    host_memory: Memory = key(
        "auto", "host memory of one node, such as 1TiB; auto: what is free here", unit="bytes", example="1TiB mode=plan"
    )
    disk: DiskBytes = key(
        "auto",
        "disk of one node for offload, such as 4TB; auto: what offload.path has free",
        unit="bytes",
        example="4TB mode=plan",
    )


class Explain(Section):
    """The key or section that mode=explain explains."""

    key: PlainText | None = key(
        None, "a key, such as zero.stage, or a section, such as offload", example="zero.stage mode=explain"
    )


class Debug(Section):
    """Aids for finding mistakes."""

    overfit: bool = key(False, "train on the first batch again and again", example="true")
    stop_at: Whole | None = key(
        None, "end after this step, schedule unchanged; null: after `steps`", unit="steps", example="10"
    )
    check_writes: bool = key(
        False,
        "compare each unit's parameters before and after every call of it, and raise, with the name, where a forward "
        "writes into one",
        trades="a copy of the unit and a comparison in each call",
        example="true",
    )
    check_rows: bool = key(
        False,
        "compare the first call of each block that runs in chunks of rows with one on other rows, and raise, with the "
        "name, where a row depends on others; zero.rows=auto does so",
        trades="two more calls of each block on a chunk, once in a run",
        example="true zero.rows=1 zero.activations=remat",
    )
    replay: Natural = key(
        0,
        "make each step twice whose number is a multiple of this, and end the run with the names of unit and rank if a "
        "bit differs; a GPU needs deterministic=true; 0: no step",
        unit="steps",
        trades="these steps take 2.7 to 2.9 times as long",
        example="100",
    )
