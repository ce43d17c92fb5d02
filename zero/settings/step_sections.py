"""Settings of a training step: sharding of the state, batch, number types."""

from typing import Annotated, Any, Literal, Self

from pydantic import model_validator

from zero.core.activations import KEEP, policy_texts, policy_trades
from zero.core.activations.rows import ALL_ROWS, check_recomputes
from zero.core.batch import solve_batch
from zero.core.loss_scale import LossScaling
from zero.core.schema import Section
from zero.core.setting_types import (
    ChunkRows,
    Compile,
    Count,
    Names,
    Natural,
    Reads,
    UnitActivations,
    bytes_of,
    key,
    or_auto,
)
from zero.errors import ConfigError


def _stage(value: object) -> int:
    if type(value) is int and 0 <= value <= 3:
        return value
    raise ValueError


def _units(value: object) -> Any:
    if value == "auto":
        return value
    if not isinstance(value, list | tuple) or not value or not all(isinstance(name, str) for name in value):
        raise ValueError
    return tuple(value)


SizeOrAuto = Annotated[int | Literal["auto"], or_auto("a size in bytes such as 4MiB, or 0", bytes_of)]
StageOrAuto = Annotated[int | Literal["auto"], or_auto("0, 1, 2 or 3", _stage)]
Units = Annotated[Literal["auto"] | tuple[str, ...], Reads("auto or a list of class names, such as [Block]", _units)]


class Zero(Section):
    """Sharding and movement of the training state."""

    stage: StageOrAuto = key(
        3,
        "sharded state: 0 nothing, 1 optimizer state, 2 and gradients, 3 and parameters; auto: the fastest that fits",
        trades="memory against traffic: each stage holds less per rank, 3 gathers each unit again in backward",
        example="2 launch.ranks=2",
    )
    units: Units = key(
        "auto",
        "parameters gathered together: auto (each block), class names such as [Block], or both, such as [auto,Experts]",
        trades="larger units take more memory while they compute, smaller ones wait more often",
        example="[Attention,MLP,Embedding,RMSNorm]",
    )
    bucket: SizeOrAuto = key(
        "auto",
        "bytes of parameters up to which small units that follow each other are merged, such as 4MiB; 0 merges none; "
        "auto: 4MiB and at most a quarter of the model, 0 with one rank or with zero.units",
        trades="fewer messages for models of many small layers, against larger units",
        example="4MiB",
    )
    prefetch: Natural = key(
        1,
        "units gathered ahead of the one that computes, in both directions",
        unit="units",
        trades="memory against waiting: each takes one more gathered unit",
        example="2",
    )
    keep: Names = key(
        (),
        "units that stay gathered between forward and backward at stage 3, by patterns of their names, or [*]",
        trades="memory against traffic: a kept unit takes its whole size, and is not gathered again for backward",
        example="[head,blocks.1?]",
    )
    gather: Literal["auto", "world", "node"] = key(
        "auto",
        "path of parameters between nodes: world, rank to rank; node, over the wire once; auto: node where it fits",
        trades="at stage 3 node keeps all parameters once on each node, 2 bytes each in bf16, on the device or host",
        example="world",
    )
    reduce: Literal["auto", "exact", "native", "node"] = key(
        "auto",
        "sums of gradients: exact, rank by rank in fp32; node, first within each node and then node by node; native, "
        "by the backend in precision.reduce; auto: node on several nodes, else exact",
        trades="node moves fewer bytes between nodes: the sum of a node's ranks, in place of each one's gradient",
        example="node",
    )
    shard: Literal["world", "node"] = key(
        "world",
        "ranks that share a copy of the state: world, all; node, those of one node, as hybrid sharding (HSDP) does",
        trades="node holds a copy on each node and moves no parameters between nodes; it adds as zero.reduce=node does",
        example="node",
    )
    activations: UnitActivations = key(
        KEEP.name,
        f"activations of a unit: {policy_texts()}, or auto: keep what fits; or "
        "a list of patterns of units' names, each with one of these: the first that fits counts; a module around other "
        "units recomputes nothing of its own",
        trades=policy_trades(),
        example="remat",
    )
    rows: ChunkRows = key(
        ALL_ROWS,
        "rows of a chunk in which blocks run that are recomputed, forward and backward; 0: all rows of a microbatch; "
        "auto: as many as fit; a unit is gathered once for all chunks; rows may not meet, as in batch norm",
        unit="rows",
        trades="memory of activations inside of a block against larger products; gradients round otherwise",
        example="1 zero.activations=remat",
    )

    @model_validator(mode="after")
    def _rows_are_recomputed(self) -> Self:
        if self.activations != "auto":
            check_recomputes(self.rows, self.activations_by_pattern.values())
        return self

    @property
    def activations_by_pattern(self) -> dict[str, Any]:
        """Pattern of units' names -> the word of its activations. An "auto" that is not resolved yet counts as keep."""
        if self.activations == "auto":
            return {"*": KEEP.name}
        listed = (f"*:{self.activations}",) if isinstance(self.activations, str) else self.activations
        return {pattern: word for pattern, _, word in (entry.rpartition(":") for entry in listed)}

    compile: Compile = key(
        False,
        "run what each unit computes through torch.compile, once for each class of blocks: true, false, or its "
        "arguments such as {mode: max-autotune, fullgraph: true}",
        trades="time at the first steps, and memory of the compiler, against faster steps; the last bits differ",
        example="{mode:max-autotune}",
    )
    update: Literal["lazy", "serial"] = key(
        "lazy",
        "time of a unit's update: lazy (before its next gather) or serial (right after backward)",
        trades="the bits are the same, and lazy hides the update behind the next forward",
        example="serial",
    )


class Batch(Section):
    """global = micro x accumulate x ranks; what is auto follows from the rest (accumulate then is 1 where free)."""

    global_: Count = key(8, "rows per step over all ranks, or auto", alias="global", unit="rows", example="32")
    micro: Count = key(
        "auto",
        "rows per microbatch and rank; auto: the most that fit",
        unit="rows",
        trades="activation memory against speed: kernels like many rows at once",
        example="4",
    )
    accumulate: Count = key(
        "auto",
        "microbatches per step and rank, or auto",
        unit="microbatches",
        trades="time against memory: the same step in smaller pieces",
        example="4 batch.micro=4",
    )

    @property
    def is_open(self) -> bool:
        """Whether only `batch.global` is set, so that the microbatch may be chosen."""
        return self.global_ != "auto" and self.micro == "auto" and self.accumulate == "auto"

    def solved(self, ranks: int, unit: str = "rank") -> "Batch":
        """Return the batch with "auto" replaced by numbers; see `solve_batch`."""
        rows, micro, accumulate = solve_batch(self.global_, self.micro, self.accumulate, ranks, unit=unit)
        return Batch(**{"global": rows, "micro": micro, "accumulate": accumulate})

    def numbers(self) -> tuple[int, int, int]:
        """Return (global, micro, accumulate) of a solved batch."""
        if self.global_ == "auto" or self.micro == "auto" or self.accumulate == "auto":
            raise ConfigError("batch.* still holds auto. Write `config = config.on(ranks)` first.")
        return self.global_, self.micro, self.accumulate


class PrecisionSection(Section):
    """Number types. The master copy and the accumulation are always fp32."""

    compute: Literal["fp32", "bf16", "fp16"] = key(
        "fp32",
        "type of forward and backward",
        trades="half types halve gathered units, activations and traffic; fp16 skips steps that overflow",
        example="bf16",
    )
    reduce: Literal["fp32", "bf16", "fp16"] = key(
        "fp32",
        "widest type in which gradients travel (compute, if narrower); they are added in fp32",
        trades="traffic against digits of each gradient",
        example="bf16",
    )
    matmul: Literal["highest", "high", "medium"] = key(
        "highest",
        "precision of products of fp32 matrices: highest is fp32, high may use TF32, medium bf16",
        trades="digits of each product against the tensor cores of a GPU",
        example="high",
    )
    scale: LossScaling = key(LossScaling(), "loss scaling, for fp16")
    master: Literal["auto", "split", "whole"] = key(
        "auto",
        "form of the fp32 master: split, as the 16 bits that a bf16 parameter lacks; whole; auto: split with bf16",
        trades="whole: 2 more bytes per parameter, held and moved twice per step, for a little less arithmetic",
        example="whole",
    )
    frozen: Literal["compute", "nf4", "int8"] = key(
        "compute",
        "form of parameters that do not train: compute; nf4, 4 bits with a scale for each 64 values; int8, 8 bits with "
        "a scale for each 256; each gather expands codes to the type of compute",
        trades="0.52 (nf4) or 1.02 (int8) bytes per parameter, held and moved, against an expansion in each pass",
        example="nf4",
    )
    coded: Names = key(
        (),
        "parameters that are kept as codes, by patterns of their names; []: frozen matrices but embeddings and heads",
        example="[model.layers.*] precision.frozen=nf4",
    )

    @model_validator(mode="after")
    def _types_agree(self) -> Self:
        if self.coded and self.frozen == "compute":
            raise ConfigError("precision.coded needs a format. Set precision.frozen=nf4, or remove it.")
        if self.master == "split" and self.compute != "bf16":
            raise ConfigError(
                f"precision.master=split with precision.compute={self.compute}: a bf16 parameter alone is half of its "
                "master. Set precision.master=auto."
            )
        if self.reduce == "fp16" != self.compute:
            raise ConfigError(
                f"precision.reduce=fp16 has no loss scale with precision.compute={self.compute}, and small gradients "
                "would be lost. Set precision.reduce=bf16."
            )
        return self
