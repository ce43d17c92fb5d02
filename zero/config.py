"""Every setting of a run, as one closed schema.

Reads a nested mapping, gives a frozen `Config` or raises one `ConfigError` of one line: the key as the user typed it,
what was seen, what to write. Knows nothing of ranks, Hydra or torch, so a mistake is answered before they are there.
Integers are strict (`Literal[0, 1, 2, 3]` alone would accept `True` and `2.0`), numbers finite, sizes bytes or 8MiB.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    WrapValidator,
    model_validator,
)

from zero import placement, refusal
from zero.data.source import DataConfig, SyntheticConfig, TextConfig, TokensConfig
from zero.errors import ConfigError
from zero.models.gpt_config import GPTConfig
from zero.stage import Stage

UNIT_CLASSES = ("Block", "Attention", "MLP", "Embedding", "Linear", "RMSNorm", "LayerNorm")
"""Classes of the models here that own parameters; `zero.units` chooses among them."""


class Section(BaseModel):
    """A closed, frozen, strict group of keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


# Types that pydantic would answer with several errors at once, or without naming the choices


def _count_or_auto(value: object) -> Any:
    if value == "auto" or (type(value) is int and 1 <= value <= 2**53):
        return value
    raise ValueError("must be a whole number from 1, or auto")


def _steps_or_auto(value: object) -> Any:
    if value == "auto" or (type(value) is int and 0 <= value <= 2**53):
        return value
    raise ValueError("must be a whole number from 0, or auto")


def _stage(value: object) -> Any:
    if value == "auto" or (type(value) is int and 0 <= value <= 3):
        return value
    raise ValueError("must be 0, 1, 2 or 3, or auto")


def _units(value: object) -> Any:
    if value == "auto":
        return value
    if not isinstance(value, list | tuple) or not value or not all(isinstance(name, str) for name in value):
        raise ValueError("must be auto or a list of class names, such as [Block]")
    for name in value:
        if name not in UNIT_CLASSES:
            raise ValueError(f"{name} is not a class of this model; {refusal.nearest(name, UNIT_CLASSES)}")
    return tuple(value)


def _activations(value: Any, check: Any) -> Any:
    if value == "offload":
        raise ValueError("comes later; keep and remat exist so far")
    return check(value)


def _size_text(value: object) -> Any:
    # pydantic's ByteSize ignores what follows the unit, and reads 0.5 as no bytes at all
    if isinstance(value, float) or (isinstance(value, str) and not _SIZE.fullmatch(value)):
        raise ValueError("must be a size in bytes such as 8MiB or 80GiB, not negative")
    return value


def _whole_blocks(value: ByteSize) -> ByteSize:
    if value < placement.BLOCK_BYTES or value % placement.BLOCK_BYTES:
        raise ValueError("must be a positive multiple of 4KiB")
    return value


def _budget(value: object) -> Any:
    """Bytes as an int, a share as it was typed."""
    if value == "auto" or (isinstance(value, str) and _share(value) is not None):
        return value
    try:
        return int(_BYTES.validate_python(value))
    except ValidationError:
        raise ValueError("must be a size such as 8GiB, a share of what is free such as 50%, or auto") from None


def _size_or_auto(value: object) -> Any:
    try:
        return value if value == "auto" else int(_BYTES.validate_python(value))
    except ValidationError:
        raise ValueError("must be a size such as 80GiB, or auto") from None


def _share(text: str) -> float | None:
    found = re.fullmatch(r"(\d{1,3}(?:\.\d{1,9})?)%", text)
    return float(found[1]) / 100 if found and 0 < float(found[1]) <= 100 else None


_SIZE = re.compile(r"\d{1,18}|\d{1,18}(\.\d{1,9})? ?[a-zA-Z]{1,5}")
_BYTES = TypeAdapter(Annotated[ByteSize, BeforeValidator(_size_text)])


Count = Annotated[int | Literal["auto"], BeforeValidator(_count_or_auto)]
Steps = Annotated[int | Literal["auto"], BeforeValidator(_steps_or_auto)]
Whole = Annotated[int, Field(ge=1, le=2**53)]
Natural = Annotated[int, Field(ge=0, le=2**53)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Holdout = Annotated[float, Field(gt=0, le=0.5)]
Budget = Annotated[int | str, BeforeValidator(_budget)]
Size = Annotated[int | Literal["auto"], BeforeValidator(_size_or_auto)]


class Zero(Section):
    """How the training state is sharded and moved."""

    stage: Annotated[int | Literal["auto"], BeforeValidator(_stage)] = Field(
        3,
        description="what is sharded: 0 nothing, 1 moments and master, 2 and gradients, 3 and parameters; "
        "auto: the fastest that fits",
    )
    units: Annotated[Literal["auto"] | tuple[str, ...], BeforeValidator(_units)] = Field(
        "auto", description="what is gathered together: auto (each block), or class names such as [Block]"
    )
    prefetch: Natural = Field(1, description="units gathered ahead of the one that computes, in both directions")
    activations: Annotated[Literal["keep", "remat"], WrapValidator(_activations)] = Field(
        "keep", description="activations of a unit: keep, or remat (computed again in backward)"
    )
    update: Literal["lazy", "serial", "eager"] = Field(
        "lazy",
        description="when a unit's update runs: lazy (before its next gather), serial (right after backward), "
        "eager (in backward; needs optim.clip=null and no loss scaling)",
    )


class Batch(Section):
    """global = micro x accumulate x ranks; what is auto follows from the rest (accumulate then is 1 where free)."""

    global_: Count = Field(16, alias="global", description="rows per step over all ranks, or auto")
    micro: Count = Field("auto", description="rows per microbatch and rank; auto: the most that fit")
    accumulate: Count = Field("auto", description="microbatches per step and rank, or auto")

    def solved(self, ranks: int) -> "Batch":
        """All three as numbers.

        Raises:
            ConfigError: they contradict each other or do not divide; the message has the numbers.
        """
        rows, micro, accumulate = self.global_, self.micro, self.accumulate
        if rows == "auto":
            if micro == "auto":
                raise ConfigError("batch.global and batch.micro are both auto; give one of them")
            accumulate = 1 if accumulate == "auto" else accumulate
            return Batch(**{"global": micro * accumulate * ranks, "micro": micro, "accumulate": accumulate})
        if micro == "auto":
            accumulate = 1 if accumulate == "auto" else accumulate
            micro = rows // (accumulate * ranks)
        elif accumulate == "auto":
            accumulate = rows // (micro * ranks)
        if rows != micro * accumulate * ranks:
            given = {"batch.micro": self.micro, "batch.accumulate": self.accumulate}
            factors = [f"{key}={value}" for key, value in given.items() if value != "auto"]
            product = " x ".join([*factors, f"{ranks} rank{'s' * (ranks > 1)}"])
            if len(factors) == 2:
                raise ConfigError(
                    f"batch.global={rows} is not {product} = {micro * accumulate * ranks}; set one of the three to auto"
                )
            raise ConfigError(f"batch.global={rows} does not divide by {product}; choose a multiple")
        return Batch(**{"global": rows, "micro": micro, "accumulate": accumulate})

    def numbers(self) -> tuple[int, int, int]:
        """(global, micro, accumulate) of a solved batch."""
        if self.global_ == "auto" or self.micro == "auto" or self.accumulate == "auto":
            raise ConfigError("batch.* still holds auto; write `config = config.on(ranks)` first")
        return self.global_, self.micro, self.accumulate


class Model(Section):
    """The sizes of a GPT."""

    name: Literal["gpt"] = Field("gpt", description="kind of model")
    vocab: Whole = Field(256, description="number of tokens that the model knows")
    width: Whole = Field(192, description="channels of the residual stream")
    layers: Whole = Field(4, description="number of blocks")
    heads: Whole = Field(6, description="attention heads; width / heads must be even")
    seq: Whole = Field(256, description="longest context, in tokens; also the length of a training row")
    hidden: Whole | None = Field(
        None, description="channels inside the MLP; null: 4 x width for gelu, 8/3 x width rounded up to 64 for swiglu"
    )
    norm: Literal["rms", "layer"] = Field("rms", description="normalisation before each half of a block")
    mlp: Literal["swiglu", "gelu"] = Field("swiglu", description="kind of MLP")
    tied: bool = Field(True, description="whether the head reuses the embedding's weight")
    rotary_base: Positive = Field(10_000.0, description="longest rotary wavelength, in units of 2 pi tokens")
    init_std: Positive = Field(
        0.02, description="standard deviation of fresh weights; residual projections get init_std / sqrt(2 x layers)"
    )

    @model_validator(mode="after")
    def _sizes_agree(self) -> Self:
        self.gpt()
        return self

    def gpt(self) -> GPTConfig:
        """The same sizes as the model's own record."""
        return GPTConfig(**self.model_dump(exclude={"name"}))


class Text(Section):
    """Every text file under a folder, bytes as tokens."""

    name: Literal["text"] = Field("text", description="kind of data")
    folder: str | None = Field(None, description="folder; null: the sources of the Python standard library")
    skip: tuple[str, ...] = Field(
        TextConfig().skip,
        strict=False,
        description="names of folders to leave out; those with a leading dot always are",
    )
    holdout: Holdout = Field(0.05, description="share of whole files kept for validation")

    def source(self) -> DataConfig:
        """The same as `zero.data` reads it."""
        return TextConfig(**self.model_dump())


class Tokens(Section):
    """A memory-mapped file of token numbers."""

    name: Literal["tokens"] = Field("tokens", description="kind of data")
    path: str | None = Field(None, description="file of token numbers in this machine's byte order; required")
    dtype: Literal["uint16", "uint32"] = Field("uint16", description="type of one token number in the file")
    vocab: Whole = Field(50_304, description="number of different tokens; larger numbers in the file are refused")
    validation_path: str | None = Field(None, description="a second file, for validation; null: the end of the first")
    holdout: Holdout = Field(0.05, description="share of the file's end kept for validation, without a second file")

    @model_validator(mode="after")
    def _path_given(self) -> Self:
        if self.path is None:
            raise ConfigError("data=tokens needs data.path=FILE, a file of token numbers")
        return self

    def source(self) -> DataConfig:
        """The same as `zero.data` reads it."""
        return TokensConfig(**self.model_dump())


class Synthetic(Section):
    """A made-up language: same tokens on every machine, nothing on disk."""

    name: Literal["synthetic"] = Field("synthetic", description="kind of data")
    vocab: Whole = Field(256, description="number of different tokens")

    def source(self) -> DataConfig:
        """The same as `zero.data` reads it."""
        return SyntheticConfig(**self.model_dump())


Data = Annotated[Text | Tokens | Synthetic, Field(discriminator="name")]


class _Optim(Section):
    lr: Positive = Field(1e-3, description="peak learning rate; the schedule scales it")
    weight_decay: NonNegative = Field(0.0, description="pull towards zero, per step and unit of learning rate")
    decay: Literal["matrices", "all"] = Field(
        "matrices", description="what decays: matrices (2 or more dimensions: no norms, no biases) or all"
    )
    clip: Positive | None = Field(1.0, description="largest global gradient norm; null: no clipping")


class AdamW(_Optim):
    """Adam with decoupled decay."""

    name: Literal["adamw"] = Field("adamw", description="kind of optimizer")
    lr: Positive = Field(3e-3, description="peak learning rate; the schedule scales it")
    beta1: Fraction = Field(0.9, description="memory of the gradient's mean, per step")
    beta2: Fraction = Field(0.99, description="memory of the gradient's square, per step")
    eps: Positive = Field(1e-8, description="added to the root of the second moment")
    weight_decay: NonNegative = Field(0.1, description="pull towards zero, per step and unit of learning rate")


class Adam(_Optim):
    """Adam; decay is added to the gradient."""

    name: Literal["adam"] = Field("adam", description="kind of optimizer")
    beta1: Fraction = Field(0.9, description="memory of the gradient's mean, per step")
    beta2: Fraction = Field(0.999, description="memory of the gradient's square, per step")
    eps: Positive = Field(1e-8, description="added to the root of the second moment")


class SGD(_Optim):
    """Gradient descent; decay is added to the gradient."""

    name: Literal["sgd"] = Field("sgd", description="kind of optimizer")
    lr: Positive = Field(0.1, description="peak learning rate; the schedule scales it")
    momentum: Fraction = Field(0.9, description="memory of the gradient, per step; 0: none kept")
    nesterov: bool = Field(False, description="whether to look ahead along the momentum")

    @model_validator(mode="after")
    def _nesterov_needs_momentum(self) -> Self:
        if self.nesterov and self.momentum == 0:
            raise ConfigError("optim.nesterov=true needs optim.momentum above 0")
        return self


class Lion(_Optim):
    """The sign of an averaged gradient, with decoupled decay."""

    name: Literal["lion"] = Field("lion", description="kind of optimizer")
    lr: Positive = Field(3e-4, description="peak learning rate; the schedule scales it")
    beta1: Fraction = Field(0.9, description="share of the memory in the sign that is applied")
    beta2: Fraction = Field(0.99, description="memory of the gradient, per step")
    weight_decay: NonNegative = Field(0.3, description="pull towards zero, per step and unit of learning rate")


Optim = Annotated[AdamW | Adam | SGD | Lion, Field(discriminator="name")]


class Constant(Section):
    """The peak learning rate throughout."""

    name: Literal["constant"] = Field("constant", description="kind of schedule")


class LinearWarmup(Section):
    """Up from zero in a line, then the peak."""

    name: Literal["linear_warmup"] = Field("linear_warmup", description="kind of schedule")
    warmup: Steps = Field("auto", description="steps until the peak; auto: a twentieth of `steps`")


class WarmupLinear(Section):
    """Up in a line, then down in a line over the rest of `steps`."""

    name: Literal["warmup_linear"] = Field("warmup_linear", description="kind of schedule")
    warmup: Steps = Field("auto", description="steps until the peak; auto: a twentieth of `steps`")
    final: Annotated[float, Field(ge=0, le=1)] = Field(
        0.1, description="learning rate after the last step, as a share of the peak"
    )


class WarmupCosine(Section):
    """Up in a line, then down along half a cosine over the rest of `steps`."""

    name: Literal["warmup_cosine"] = Field("warmup_cosine", description="kind of schedule")
    warmup: Steps = Field("auto", description="steps until the peak; auto: a twentieth of `steps`")
    final: Annotated[float, Field(ge=0, le=1)] = Field(
        0.1, description="learning rate after the last step, as a share of the peak"
    )


Schedule = Annotated[Constant | LinearWarmup | WarmupLinear | WarmupCosine, Field(discriminator="name")]


class Scale(Section):
    """Loss scaling; used by precision=fp16 only."""

    initial: Positive = Field(65536.0, description="first scale")
    window: Whole = Field(1000, description="finite steps before the scale doubles")
    hysteresis: Whole = Field(2, description="overflows before the scale halves")
    minimum: Positive = Field(1.0, description="the scale never falls below this")
    maximum: Positive = Field(16777216.0, description="the scale never rises above this")
    static: Positive | None = Field(None, description="a fixed scale; null: dynamic")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.minimum <= self.initial <= self.maximum:
            raise ConfigError(
                f"precision.scale.initial={self.initial:g} is not between minimum={self.minimum:g} "
                f"and maximum={self.maximum:g}"
            )
        return self


class Precision(Section):
    """Number types. The master copy and the accumulation are always fp32."""

    compute: Literal["fp32", "bf16", "fp16"] = Field("fp32", description="type of forward and backward")
    reduce: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32", description="widest type in which gradients travel (compute, if narrower); they are added in fp32"
    )
    scale: Scale = Field(Scale(), description="loss scaling, for fp16")


class Offload(Section):
    """Which tier each kind of state sleeps on, and how it travels.

    Options set `param` to cpu_if_sharded, which is cpu at the stage that shards parameters and none below. So whoever
    writes `offload.param=cpu` means it, and is refused below that stage; whoever writes `offload=cpu` is not.
    """

    optimizer: Literal["none", "cpu", "nvme", "auto"] = Field(
        "none", description="master and moments: none (the device), cpu, nvme, or auto (the fastest with room)"
    )
    param: Literal["none", "cpu", "nvme", "auto", "cpu_if_sharded"] = Field(
        "none", description="parameters, at zero.stage=3; cpu_if_sharded: cpu there, none below"
    )
    grad: Literal["none", "cpu", "nvme", "auto"] = Field("none", description="gradients")
    path: str | None = Field(None, description="folder of the nameless NVMe file; null: the current folder")
    page: Annotated[ByteSize, BeforeValidator(_size_text), AfterValidator(_whole_blocks)] = Field(
        ByteSize(4 * 1024**2), description="bytes of one fp32 page, such as 4MiB; a multiple of 4KiB"
    )
    threads: Count = Field("auto", description="threads that read, update and write pages; auto: measured at the start")
    read_ahead: Steps = Field("auto", description="pages of each kind that are read before their turn; auto: 2")
    device_budget: Budget = Field(
        "auto", description="most that a rank holds on the GPU: 60GiB, 75% of what is free, or auto: all that is free"
    )
    host_budget: Budget = Field(
        "auto",
        description="most that a rank holds in host memory: 8GiB, 50% of what is free, or auto: all that is free",
    )
    verify: bool = Field(True, description="check length, version and CRC-32 of each page that is read from a file")
    pin: bool = Field(True, description="lock host buffers for the GPU's copy engines")
    compute: Literal["device", "host"] = Field(
        "device", description="where pages that sleep off the device are updated: device, or host (the CPU's kernel)"
    )

    def asked(self) -> placement.Offload:
        """The same as the engine reads it."""
        return placement.Offload(
            optimizer=self.optimizer,
            param=self.param,
            grad=self.grad,
            path=None if self.path is None else str(Path(self.path).expanduser()),
            page_bytes=int(self.page),
            threads=None if self.threads == "auto" else self.threads,
            read_ahead=None if self.read_ahead == "auto" else self.read_ahead,
            device_budget=_share(self.device_budget) if isinstance(self.device_budget, str) else self.device_budget,
            host_budget=_share(self.host_budget) if isinstance(self.host_budget, str) else self.host_budget,
            verify=self.verify,
            pin=self.pin,
            compute=self.compute,
        )


class Jsonl(Section):
    """metrics.jsonl and the console; always on."""

    name: Literal["jsonl"] = Field("jsonl", description="kind of tracker")
    every: Whole = Field(10, description="steps between two rows")
    console: Literal["auto", "bar", "lines", "none"] = Field(
        "auto", description="auto: a progress bar on a terminal, plain lines in a pipe"
    )


class Wandb(Jsonl):
    """The same, and a Weights & Biases run beside it."""

    name: Literal["wandb"] = Field("wandb", description="kind of tracker")  # type: ignore[assignment]
    project: str = Field("functional-zero", description="W&B project")
    run: str | None = Field(None, description="name of the run; null: its overrides in a sweep, else its folder")
    group: str | None = Field(None, description="group of the run; null: the folder of its sweep, if it has one")
    mode: Literal["auto", "online", "offline", "disabled"] = Field(
        "auto", description="auto: online where a key is found, else offline"
    )
    artifacts: bool = Field(False, description="record each checkpoint's place as a reference artifact; no upload")


Tracker = Annotated[Jsonl | Wandb, Field(discriminator="name")]


class Val(Section):
    """Validation on rows that training never sees."""

    every: Natural = Field(50, description="steps between two validations; 0: only after the last step")
    rows: Whole = Field(64, description="rows of model.seq tokens per validation, over all ranks")


class Sample(Section):
    """The text that a run prints at its end."""

    tokens: Natural = Field(160, description="length of the sample, in tokens; 0: none")
    temperature: NonNegative = Field(0.8, description="0: always the likeliest token")


class Launch(Section):
    """How ranks are started."""

    ranks: Count = Field("auto", description="processes; auto: one per GPU, or 1 on a CPU")
    threads: Count = Field("auto", description="CPU threads per rank; auto: the cores shared evenly")
    timeout: Annotated[float, Field(ge=1, le=604_800)] = Field(
        300.0, description="longest wait for another rank, in seconds; at most a week"
    )
    max_restarts: Natural = Field(
        0, description="how often all ranks are started again after a failure, from the newest valid checkpoint"
    )
    grace: Annotated[float, Field(ge=1, le=86_400)] = Field(
        30.0, description="seconds between SIGTERM or SIGUSR1 and the end; a save must fit in"
    )
    malloc: Literal["raised", "lean", "default"] = Field(
        "raised",
        description="glibc's thresholds: raised keeps freed memory for faster steps, lean gives it back at once",
    )


class Checkpoint(Section):
    """What is saved, where and how often; see docs/checkpoints.md."""

    dir: str | None = Field(None, description="folder of all checkpoints; null: checkpoints/ in the run's folder")
    every: Natural = Field(0, description="save after every so many steps and after the last; 0: only when stopped")
    keep: Annotated[int, Field(ge=2, le=2**31)] = Field(2, description="newest valid checkpoints to keep, 2 or more")
    keep_every: Whole | None = Field(None, description="keep those of every so many steps as well; null: no others")
    async_: bool = Field(
        False, alias="async", description="write a copy behind the next steps; needs host memory for it"
    )
    on_failure: Literal["stop", "continue"] = Field("stop", description="what a run does when a save fails")
    partial: tuple[str, ...] = Field(
        (), strict=False, description="names or patterns of tensors that resume leaves as they are, such as [head.*]"
    )
    convert: tuple[str, ...] = Field(
        (), strict=False, description="names or patterns of tensors that resume may read from another dtype"
    )


class Machine(Section):
    """The machine that mode=plan plans for; auto: this one."""

    ranks: Count = Field("auto", description="ranks in all; auto: launch.ranks")
    ranks_per_node: Count = Field("auto", description="ranks that share one host memory; auto: all of them, at most 8")
    device_memory: Size = Field("auto", description="memory of one GPU, such as 80GiB; auto: what is free here")
    host_memory: Size = Field("auto", description="host memory of one node, such as 1TiB; auto: what is free here")
    disk: Size = Field(
        "auto", description="disk of one node for offload, such as 4TB; auto: what offload.path has free"
    )


class Explain(Section):
    """What mode=explain explains."""

    key: str | None = Field(None, description="a key, such as zero.stage, or a section, such as offload")


class Debug(Section):
    """Aids for finding mistakes."""

    overfit: bool = Field(False, description="train on the first batch again and again")
    stop_at: Whole | None = Field(None, description="end after this step, schedule unchanged; null: after `steps`")


class Config(Section):
    """A whole run. `Config()` is the default run."""

    mode: Literal["train", "eval", "plan", "doctor", "explain"] = Field(
        "train",
        description="what to do: train, eval (the validation loss of a checkpoint), plan (what fits where, nothing is "
        "run), doctor (is this machine ready), explain (what a key means)",
    )
    resume: str = Field(
        "none", min_length=1, description="none, latest (the newest valid checkpoint), or a step, a run or a root"
    )
    steps: Whole = Field(200, description="optimizer steps")
    seed: Natural = Field(0, description="seed of weights, data order and sample")
    deterministic: bool = Field(False, description="refuse kernels whose result varies from run to run (GPU)")
    profile: bool = Field(False, description="record a few steps with torch.profiler, for Perfetto")
    zero: Zero = Zero()
    batch: Batch = Batch()
    model: Model = Model()
    data: Data = Text()
    optim: Optim = AdamW()
    schedule: Schedule = WarmupCosine()
    precision: Precision = Precision()
    offload: Offload = Offload()
    tracker: Tracker = Jsonl()
    val: Val = Val()
    sample: Sample = Sample()
    launch: Launch = Launch()
    checkpoint: Checkpoint = Checkpoint()
    plan: Machine = Machine()
    explain: Explain = Explain()
    debug: Debug = Debug()

    @model_validator(mode="after")
    def _keys_agree(self) -> Self:
        if self.mode == "eval" and self.resume == "none":
            raise ConfigError("mode=eval needs a checkpoint: set resume=latest, or resume=PATH of a step or a run")
        self.offload.asked().at(parameters_sharded=self.zero.stage == "auto" or Stage(self.zero.stage).parameters)
        eager = self.zero.update == "eager"
        if eager and self.optim.clip is not None:
            raise ConfigError(
                f"zero.update=eager cannot wait for the norm that optim.clip={self.optim.clip:g} needs; "
                "set optim.clip=null or zero.update=lazy"
            )
        if eager and self.precision.compute == "fp16":
            raise ConfigError("zero.update=eager cannot undo an overflow of fp16; set zero.update=lazy")
        if self.schedule.name.startswith("warmup_") and self.warmup >= self.steps:
            raise ConfigError(f"schedule.warmup={self.warmup} leaves no step of steps={self.steps} for the decay")
        norm, absent = ("RMSNorm", "LayerNorm") if self.model.norm == "rms" else ("LayerNorm", "RMSNorm")
        if absent in self.zero.units:
            raise ConfigError(f"zero.units: a model with model.norm={self.model.norm} has no {absent}; write {norm}")
        vocab = 256 if isinstance(self.data, Text) else self.data.vocab
        if vocab > self.model.vocab:
            raise ConfigError(
                f"model.vocab={self.model.vocab} is smaller than the {vocab} tokens of data={self.data.name}; "
                f"set model.vocab={vocab}"
            )
        return self

    @property
    def warmup(self) -> int:
        """Steps until the peak learning rate."""
        given = 0 if isinstance(self.schedule, Constant) else self.schedule.warmup
        return self.steps // 20 if given == "auto" else given

    def on(self, ranks: int) -> "Config":
        """The same run with `launch.ranks` and the batch as numbers.

        Raises:
            ConfigError: the batch does not divide over `ranks`.
        """
        launch = self.launch.model_copy(update={"ranks": ranks})
        return self.model_copy(update={"launch": launch, "batch": self.batch.solved(ranks)})

    def plain(self) -> dict[str, Any]:
        """Nested dict of plain values, keys as the user types them; `read` gives the same Config back."""
        return self.model_dump(by_alias=True, mode="json")


def read(raw: Mapping[str, Any]) -> Config:
    """The settings in `raw`, defaults for what it leaves out.

    Raises:
        ConfigError: one line about the first mistake, unknown keys before wrong values.
    """
    try:
        return Config.model_validate(dict(raw))
    except ValidationError as refused:
        raise ConfigError(refusal.sentence(Config, refused, raw)) from None


def keys() -> tuple[str, ...]:
    """Every dotted key that some choice of options has, in reading order."""
    return refusal.keys(Config)


def flat(config: Config) -> dict[str, str]:
    """Dotted key to value as text, for comparing the settings of ranks."""

    def walk(node: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
        for key, value in node.items():
            if isinstance(value, dict):
                yield from walk(value, f"{prefix}{key}.")
            else:
                yield prefix + key, str(value)

    return dict(walk(config.plain(), ""))


def unknown_key(key: str) -> str:
    """The sentence for a key that does not exist."""
    return refusal.unknown_key(Config, key)
