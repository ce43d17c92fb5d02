"""The sections of a run's settings: every key with its kind, its default, and what there is to say about it.

Read it beside docs/config.md, which is made from it. What one section alone can tell is wrong is refused here; what two
of them make together is refused in `Config`.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from zero.core import placement
from zero.errors import ConfigError
from zero.trainer.config.values import (
    Activations,
    Budget,
    Channels,
    Count,
    Disk,
    Folders,
    Fraction,
    Held,
    Holdout,
    Layers,
    LossScale,
    Memory,
    Name,
    Names,
    Natural,
    NonNegative,
    Page,
    Place,
    Positive,
    Project,
    Ranks,
    Rate,
    Rows,
    Section,
    Share,
    StageOrAuto,
    Steps,
    Threads,
    Units,
    Whole,
    Word,
    key,
    share,
)
from zero.trainer.data.source import DataConfig, HFTextConfig, SyntheticConfig, TextConfig, TokensConfig
from zero.trainer.models.gpt_config import GPTConfig
from zero.trainer.models.hf_config import HFConfig


class Zero(Section):
    """How the training state is sharded and moved."""

    stage: StageOrAuto = key(
        3,
        "what is sharded: 0 nothing, 1 moments and master, 2 and gradients, 3 and parameters; "
        "auto: the fastest that fits",
        trades="memory against traffic: each stage holds less per rank, 3 gathers each unit again in backward",
        example="2 launch.ranks=2",
    )
    units: Units = key(
        "auto",
        "what is gathered together: auto (each block), class names such as [Block], or both: [auto,Experts] is auto, "
        "and no part of such a class alone",
        trades="larger units take more memory while they compute, smaller ones wait more often",
        example="[Attention,MLP,Embedding,RMSNorm]",
    )
    prefetch: Natural = key(
        1,
        "units gathered ahead of the one that computes, in both directions",
        unit="units",
        trades="memory against waiting: each takes one more gathered unit",
        example="2",
    )
    activations: Activations = key(
        "keep",
        "activations of a unit: keep, remat (computed again in backward), or offload (kept in host memory)",
        trades="memory against time: remat keeps one activation per unit and computes a third more; offload sends "
        "those of 1 MiB and more to pinned host memory and back, and on a CPU it is keep",
        example="remat",
    )
    compile: bool = key(
        False,
        "run what each unit computes through torch.compile, once for each class of blocks",
        trades="time at the first steps, and memory of the compiler, against faster steps; the last bits differ",
        example="true",
    )
    update: Literal["lazy", "serial", "eager"] = key(
        "lazy",
        "when a unit's update runs: lazy (before its next gather), serial (right after backward), "
        "eager (in backward; needs optim.clip=null and no loss scaling)",
        trades="lazy and serial give the same bits, lazy hides the update behind the next forward; eager holds no "
        "gradient from backward to update",
        example="eager optim.clip=null",
    )


class Batch(Section):
    """global = micro x accumulate x ranks; what is auto follows from the rest (accumulate then is 1 where free)."""

    global_: Count = key(16, "rows per step over all ranks, or auto", alias="global", unit="rows", example="32")
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


class GPT(Section):
    """The sizes of a GPT."""

    name: Literal["gpt"] = key("gpt", "kind of model")
    vocab: Rows = key(256, "number of tokens that the model knows", unit="tokens", example="50304")
    width: Channels = key(192, "channels of the residual stream", unit="channels", example="256 model.heads=8")
    layers: Layers = key(4, "number of blocks", unit="blocks", example="8")
    heads: Channels = key(6, "attention heads; width / heads must be even", unit="heads", example="4")
    seq: Rows = key(
        256,
        "longest context, in tokens; also the length of a training row",
        unit="tokens",
        trades="memory and time: activations grow with it, attention's work with its square",
        example="512",
    )
    hidden: Channels | None = key(
        None,
        "channels inside the MLP; null: 4 x width for gelu, 8/3 x width rounded up to 64 for swiglu",
        unit="channels",
        example="768",
    )
    norm: Literal["rms", "layer"] = key("rms", "normalisation before each half of a block", example="layer")
    mlp: Literal["swiglu", "gelu"] = key("swiglu", "kind of MLP", example="gelu")
    tied: bool = key(True, "whether the head reuses the embedding's weight", example="false")
    rotary_base: Positive = key(10_000.0, "longest rotary wavelength", unit="2 pi tokens", example="500000")
    init_std: Rate = key(
        0.02,
        "standard deviation of fresh weights; residual projections get init_std / sqrt(2 x layers)",
        example="0.01",
    )

    @model_validator(mode="after")
    def _sizes_agree(self) -> Self:
        self.gpt()
        return self

    def gpt(self) -> GPTConfig:
        """The same sizes as the model's own record."""
        return GPTConfig(**self.model_dump(exclude={"name"}))


class HF(Section):
    """A causal language model of transformers."""

    name: Literal["hf"] = key("hf", "kind of model")
    path: Place | None = key(
        None,
        "folder with config.json and safetensors; or a model type such as llama, with fresh weights; required",
        example="gpt2",
    )
    seq: Rows = key(256, "length of a training row, in tokens", unit="tokens", example="512 model.path=gpt2")

    @model_validator(mode="after")
    def _has_a_path(self) -> Self:
        if self.path is None:
            raise ConfigError("model=hf needs model.path=FOLDER, a folder with config.json and safetensors")
        return self

    def hf(self) -> HFConfig:
        """The same as the model's own record."""
        assert self.path is not None
        return HFConfig(path=self.path, seq=self.seq)


def _gpt_unless_named(value: Any) -> Any:
    return {"name": "gpt", **value} if isinstance(value, dict) else value


Model = Annotated[GPT | HF, Field(discriminator="name"), BeforeValidator(_gpt_unless_named)]


class Text(Section):
    """Every text file under a folder, bytes as tokens."""

    name: Literal["text"] = key("text", "kind of data")
    folder: Place | None = key(
        None, "folder; null: the sources of the Python standard library", example="/usr/share/doc"
    )
    skip: Folders = key(
        TextConfig().skip,
        "names of folders to leave out; those with a leading dot always are",
        example="[build,dist]",
    )
    holdout: Holdout = key(0.05, "share of whole files kept for validation", example="0.1")

    def source(self) -> DataConfig:
        """The same as `zero.trainer.data` reads it."""
        return TextConfig(**self.model_dump())


class Tokens(Section):
    """A file of token numbers, never read whole."""

    name: Literal["tokens"] = key("tokens", "kind of data")
    path: Place | None = key(
        None,
        "file of token numbers in this machine's byte order; required",
        example="train.bin model.vocab=50304",
    )
    dtype: Literal["uint16", "uint32"] = key(
        "uint16", "type of one token number in the file", example="uint32 data.path=train.bin model.vocab=50304"
    )
    vocab: Rows = key(
        50_304,
        "number of different tokens; larger numbers in the file are refused",
        unit="tokens",
        example="256 data.path=train.bin",
    )
    validation_path: Place | None = key(
        None,
        "a second file, for validation; null: the end of the first",
        example="held.bin data.path=train.bin model.vocab=50304",
    )
    holdout: Holdout = key(
        0.05,
        "share of the file's end kept for validation, without a second file",
        example="0.1 data.path=train.bin model.vocab=50304",
    )

    @model_validator(mode="after")
    def _file_can_be_read(self) -> Self:
        if self.path is None:
            raise ConfigError("data=tokens needs data.path=FILE, a file of token numbers")
        if self.dtype == "uint16" and self.vocab > 2**16:
            raise ConfigError(f"data.vocab={self.vocab} does not fit data.dtype=uint16; set data.dtype=uint32")
        return self

    def source(self) -> DataConfig:
        """The same as `zero.trainer.data` reads it."""
        return TokensConfig(**self.model_dump())


class HFText(Section):
    """Texts through a tokenizer of Hugging Face, tokenised once and kept."""

    name: Literal["hf"] = key("hf", "kind of data")
    path: Place | None = key(
        None,
        "a folder of text and JSONL files, one such file, or a folder that datasets.save_to_disk made; required",
        example="texts data.tokenizer=path/to/llama",
    )
    column: Word = key(
        "text",
        "where the text is in a line of JSONL or a row of datasets",
        example="body data.path=texts data.tokenizer=path/to/llama",
    )
    tokenizer: Place | None = key(
        None,
        "a tokenizer.json or a folder with one; null: that of model.path, with model=hf",
        example="path/to/llama data.path=texts",
    )
    end: Word | None = key(
        None,
        "the token after each document; null: the end of text of the tokenizer's settings",
        example="'</s>' data.path=texts data.tokenizer=path/to/llama",
    )
    holdout: Holdout = key(
        0.05,
        "share of whole documents kept for validation",
        example="0.1 data.path=texts data.tokenizer=path/to/llama",
    )
    cache: Place | None = key(
        None,
        "folder where the tokens are kept, on a disk that all ranks share; null: functional-zero in the user's cache",
        example="tokens data.path=texts data.tokenizer=path/to/llama",
    )

    @model_validator(mode="after")
    def _has_a_path(self) -> Self:
        if self.path is None:
            raise ConfigError("data=hf needs data.path=FOLDER, a folder of text or JSONL files")
        return self

    def source(self) -> DataConfig:
        """The same as `zero.trainer.data` reads it."""
        return HFTextConfig(**self.model_dump())


class Synthetic(Section):
    """A made-up language: same tokens on every machine, nothing on disk."""

    name: Literal["synthetic"] = key("synthetic", "kind of data")
    vocab: Rows = key(256, "number of different tokens", unit="tokens", example="64")

    def source(self) -> DataConfig:
        """The same as `zero.trainer.data` reads it."""
        return SyntheticConfig(**self.model_dump())


Data = Annotated[Text | Tokens | HFText | Synthetic, Field(discriminator="name")]


class _Optim(Section):
    lr: Rate = key(1e-3, "peak learning rate; the schedule scales it", example="3e-4")
    weight_decay: NonNegative = key(0.0, "pull towards zero, per step and unit of learning rate", example="0.05")
    decay: Literal["matrices", "all"] = key(
        "matrices", "what decays: matrices (2 or more dimensions: no norms, no biases) or all", example="all"
    )
    clip: Positive | None = key(
        1.0,
        "largest global gradient norm; null: no clipping",
        trades="needs the norm of all gradients before the first update; zero.update=lazy hides the wait",
        example="null",
    )
    ema: Fraction | None = key(
        None,
        "memory of a running mean of the parameters, per step, kept beside the moments; null: none",
        trades="4 bytes per parameter",
        example="0.999",
    )


class AdamW(_Optim):
    """Adam with decoupled decay."""

    name: Literal["adamw"] = key("adamw", "kind of optimizer")
    lr: Rate = key(3e-3, "peak learning rate; the schedule scales it", example="3e-4")
    beta1: Fraction = key(0.9, "memory of the gradient's mean, per step", example="0.95")
    beta2: Fraction = key(0.99, "memory of the gradient's square, per step", example="0.95")
    eps: Positive = key(1e-8, "added to the root of the second moment", example="1e-6")
    weight_decay: NonNegative = key(0.1, "pull towards zero, per step and unit of learning rate", example="0.05")


class Adam(_Optim):
    """Adam; decay is added to the gradient."""

    name: Literal["adam"] = key("adam", "kind of optimizer")
    beta1: Fraction = key(0.9, "memory of the gradient's mean, per step", example="0.95")
    beta2: Fraction = key(0.999, "memory of the gradient's square, per step", example="0.95")
    eps: Positive = key(1e-8, "added to the root of the second moment", example="1e-6")


class SGD(_Optim):
    """Gradient descent; decay is added to the gradient."""

    name: Literal["sgd"] = key("sgd", "kind of optimizer")
    lr: Rate = key(0.1, "peak learning rate; the schedule scales it", example="0.01")
    momentum: Fraction = key(
        0.9,
        "memory of the gradient, per step; 0: none kept",
        trades="4 bytes per parameter; at 0 the optimizer keeps nothing",
        example="0",
    )
    nesterov: bool = key(False, "whether to look ahead along the momentum", example="true")

    @model_validator(mode="after")
    def _nesterov_needs_momentum(self) -> Self:
        if self.nesterov and self.momentum == 0:
            raise ConfigError("optim.nesterov=true needs optim.momentum above 0")
        return self


class Lion(_Optim):
    """The sign of an averaged gradient, with decoupled decay."""

    name: Literal["lion"] = key("lion", "kind of optimizer")
    lr: Rate = key(3e-4, "peak learning rate; the schedule scales it", example="1e-4")
    beta1: Fraction = key(0.9, "share of the memory in the sign that is applied", example="0.95")
    beta2: Fraction = key(0.99, "memory of the gradient, per step", example="0.98")
    weight_decay: NonNegative = key(0.3, "pull towards zero, per step and unit of learning rate", example="1")


class Adagrad(_Optim):
    """Steps shrink with the sum of all squared gradients; decay is added to the gradient."""

    name: Literal["adagrad"] = key("adagrad", "kind of optimizer")
    lr: Rate = key(1e-2, "peak learning rate; the schedule scales it", example="3e-3")
    eps: Positive = key(1e-10, "added to the root of the sum of squares", example="1e-8")


Optim = Annotated[AdamW | Adam | SGD | Lion | Adagrad, Field(discriminator="name")]


class Constant(Section):
    """The peak learning rate throughout."""

    name: Literal["constant"] = key("constant", "kind of schedule")


class Warmup(Section):
    """What every schedule with a warm-up has."""

    warmup: Steps = key("auto", "steps until the peak; auto: a twentieth of `steps`", unit="steps", example="20")
    start: Share | None = key(
        None,
        "learning rate of the first step, as a share of the peak; null: a line from 0 before it, and 0 for curve=log",
        example="0.01",
    )
    curve: Literal["linear", "log"] = key(
        "linear", "how it rises: linear, or log (as the logarithm of the step: steep at first)", example="log"
    )


class Decay(Warmup):
    """What every schedule with a decay has."""

    hold: Held = key(
        0, "steps that the peak lasts before the decay; -1: the decay is a step ahead", unit="steps", example="100"
    )
    total: Whole | None = key(
        None, "step of the last learning rate, which may lie beyond the run; null: `steps`", unit="steps", example="400"
    )
    final: Share = key(0.1, "learning rate after the last step, as a share of the peak", example="0")


class LinearWarmup(Warmup):
    """Up from zero in a line, then the peak."""

    name: Literal["linear_warmup"] = key("linear_warmup", "kind of schedule")


class WarmupLinear(Decay):
    """Up in a line, then down in a line over the rest of `steps`."""

    name: Literal["warmup_linear"] = key("warmup_linear", "kind of schedule")


class WarmupCosine(Decay):
    """Up in a line, then down along half a cosine over the rest of `steps`."""

    name: Literal["warmup_cosine"] = key("warmup_cosine", "kind of schedule")


class OneCycle(Section):
    """Up to the peak and down again while the momentum goes down and up; then a decay."""

    name: Literal["one_cycle"] = key("one_cycle", "kind of schedule")
    start: Share = key(0.1, "learning rate at both ends of the cycle, as a share of the peak", example="0.04")
    rise: Count = key("auto", "steps up to the peak; auto: half of `steps`", unit="steps", example="50")
    fall: Whole | None = key(None, "steps down from the peak; null: as many", unit="steps", example="80")
    rise_stairs: Natural = key(0, "stairs on the way up; 0: none, it moves at every step", unit="stairs", example="5")
    fall_stairs: Natural | None = key(None, "stairs on the way down; null: as many", unit="stairs", example="5")
    decay_every: Natural = key(
        0, "steps of one interval of the decay after the cycle; 0: no decay", unit="steps", example="10"
    )
    decay_rate: NonNegative = key(
        0.0,
        "after n intervals the learning rate is that of the cycle's end over 1 + decay_rate x n",
        example="0.5 schedule.decay_every=10",
    )
    momentum: bool = key(
        True,
        "whether momentum (or beta1) moves against the learning rate, in place of the optimizer's",
        example="false",
    )
    momentum_min: Fraction = key(0.8, "momentum at the peak of the learning rate", example="0.85")
    momentum_max: Fraction = key(0.9, "momentum at both ends of the cycle", example="0.95")
    momentum_start: Fraction | None = key(None, "momentum of the first step; null: momentum_max", example="0.8")
    momentum_decay_rate: NonNegative = key(
        0.0,
        "after n intervals of the decay the momentum is momentum_max x (1 + momentum_decay_rate x n)",
        example="0.001 schedule.decay_every=10",
    )

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> Self:
        if self.momentum_min > self.momentum_max:
            raise ConfigError(
                f"schedule.momentum_min={self.momentum_min:g} is above schedule.momentum_max={self.momentum_max:g}"
            )
        return self


class LrRange(Section):
    """A test of learning rates: up from optim.lr for as long as it runs."""

    name: Literal["lr_range"] = key("lr_range", "kind of schedule")
    every: Whole = key(10, "steps of one interval", unit="steps", example="20")
    rate: NonNegative = key(1.0, "after n intervals the learning rate is optim.lr x (1 + rate x n)", example="5")
    stairs: bool = key(False, "whether it moves once per interval only", example="true")


Schedule = Annotated[
    Constant | LinearWarmup | WarmupLinear | WarmupCosine | OneCycle | LrRange, Field(discriminator="name")
]


class Scale(Section):
    """Loss scaling; used by precision=fp16 only."""

    initial: LossScale = key(65536.0, "first scale", example="1024")
    window: Whole = key(
        1000,
        "finite steps before the scale doubles",
        unit="steps",
        trades="a short window follows growing gradients closely and skips more steps",
        example="500",
    )
    hysteresis: Whole = key(2, "overflows before the scale halves", unit="steps", example="1")
    minimum: LossScale = key(1.0, "the scale never falls below this", example="16")
    maximum: LossScale = key(16777216.0, "the scale never rises above this", example="65536")
    static: LossScale | None = key(None, "a fixed scale; null: dynamic", example="1024")

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

    compute: Literal["fp32", "bf16", "fp16"] = key(
        "fp32",
        "type of forward and backward",
        trades="half types halve gathered units, activations and traffic and are fast where the hardware has them; "
        "fp16 skips steps that overflow",
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
        "how products of fp32 matrices may be computed: highest is fp32, high may use TF32, medium bf16",
        trades="digits of each product against the tensor cores of a GPU",
        example="high",
    )
    scale: Scale = key(Scale(), "loss scaling, for fp16")

    @model_validator(mode="after")
    def _fp16_is_scaled(self) -> Self:
        if self.reduce == "fp16" != self.compute:
            raise ConfigError(
                f"precision.reduce=fp16 has no loss scale with precision.compute={self.compute}, and small gradients "
                "would be lost; set precision.reduce=bf16"
            )
        return self


class Offload(Section):
    """Which tier each kind of state sleeps on, and how it travels.

    Options set `param` to cpu_if_sharded, which is cpu at the stage that shards parameters and none below. So whoever
    writes `offload.param=cpu` means it, and is refused below that stage; whoever writes `offload=cpu` is not.
    """

    optimizer: Literal["none", "cpu", "nvme", "auto"] = key(
        "none",
        "master and moments: none (the device), cpu, nvme, or auto (the fastest with room)",
        trades="12 bytes per parameter on the device against their way there once per step, behind the next forward",
        example="cpu",
    )
    param: Literal["none", "cpu", "nvme", "auto", "cpu_if_sharded"] = key(
        "none",
        "parameters, at zero.stage=3; cpu_if_sharded: cpu there, none below",
        trades="memory of the device against a read before every gather",
        example="cpu",
    )
    grad: Literal["none", "cpu", "nvme", "auto"] = key(
        "none",
        "gradients",
        trades="4 bytes per parameter on the device against a write and a read per step",
        example="cpu",
    )
    path: Place | None = key(
        None, "folder of the nameless NVMe file; null: the current folder", example=". offload=nvme"
    )
    page: Page = key(
        "auto",
        "bytes of one fp32 page, such as 4MiB; a multiple of 4KiB; auto: 4MiB, for large models up to 64MiB",
        unit="bytes",
        trades="host memory against speed: the arena holds a few pages per thread, disks like large ones",
        example="8MiB",
    )
    threads: Threads = key(
        "auto", "threads that read, update and write pages; auto: measured at the start", unit="threads", example="4"
    )
    read_ahead: Steps = key(
        "auto",
        "pages of each kind that are read before their turn; auto: 2",
        unit="pages",
        trades="host memory against waiting for the disk",
        example="4",
    )
    device_budget: Budget = key(
        "auto",
        "most that a rank holds on the GPU: 60GiB, 75% of what is free, or auto: all that is free",
        unit="bytes",
        example="60GiB",
    )
    reserve: Memory = key(
        "auto",
        "of a GPU's free memory, what is left to its libraries, such as 2GiB; auto: 1GiB and a fiftieth of the GPU",
        unit="bytes",
        example="2GiB",
    )
    host_budget: Budget = key(
        "auto",
        "most that a rank holds in host memory: 8GiB, 50% of what is free, or auto: all that is free, 90% beside a GPU",
        unit="bytes",
        example="50%",
    )
    verify: bool = key(
        True,
        "check length, version and CRC-32 of each page that is read from a file",
        trades="about a hundredth of a step against pages that a disk changed in silence",
        example="false",
    )
    pin: bool = key(
        True,
        "lock host buffers for the GPU's copy engines",
        trades="memory that the system cannot take back against copies that run beside compute",
        example="false",
    )
    compute: Literal["device", "host"] = key(
        "device",
        "where pages that sleep off the device are updated: device, or host (the CPU's kernel)",
        trades="host moves gradients and parameters only, and computes on the slower processor",
        example="host",
    )

    def asked(self) -> placement.Offload:
        """The same as the engine reads it."""
        return placement.Offload(
            optimizer=self.optimizer,
            param=self.param,
            grad=self.grad,
            path=None if self.path is None else str(Path(self.path).expanduser()),
            page_bytes=None if self.page == "auto" else self.page,
            reserve_bytes=None if self.reserve == "auto" else self.reserve,
            threads=None if self.threads == "auto" else self.threads,
            read_ahead=None if self.read_ahead == "auto" else self.read_ahead,
            device_budget=share(self.device_budget) if isinstance(self.device_budget, str) else self.device_budget,
            host_budget=share(self.host_budget) if isinstance(self.host_budget, str) else self.host_budget,
            verify=self.verify,
            pin=self.pin,
            compute=self.compute,
        )


class Jsonl(Section):
    """metrics.jsonl and the console; always on."""

    name: Literal["jsonl"] = key("jsonl", "kind of tracker")
    every: Whole = key(10, "steps between two rows", unit="steps", example="1")
    console: Literal["auto", "bar", "lines", "none"] = key(
        "auto", "auto: a progress bar on a terminal, plain lines in a pipe", example="lines"
    )


class Wandb(Jsonl):
    """The same, and a Weights & Biases run beside it."""

    name: Literal["wandb"] = key("wandb", "kind of tracker")  # type: ignore[assignment]
    project: Project = key("functional-zero", "W&B project", example="my-project")
    run: Name | None = key(None, "name of the run; null: its overrides in a sweep, else its folder", example="first")
    group: Name | None = key(None, "group of the run; null: the folder of its sweep, if it has one", example="stages")
    mode: Literal["auto", "online", "offline", "disabled"] = key(
        "auto", "auto: online where a key is found, else offline", example="offline"
    )
    artifacts: bool = key(False, "record each checkpoint's place as a reference artifact; no upload", example="true")


Tracker = Annotated[Jsonl | Wandb, Field(discriminator="name")]


class Val(Section):
    """Validation on rows that training never sees."""

    every: Natural = key(50, "steps between two validations; 0: only after the last step", unit="steps", example="100")
    rows: Rows = key(
        64,
        "rows of model.seq tokens per validation, over all ranks",
        unit="rows",
        trades="time against noise in val/loss",
        example="256",
    )
    weights: Literal["parameter", "ema"] = key(
        "parameter",
        "what mode=eval gives the model: the parameters of the checkpoint, or ema, their running mean",
        example="ema mode=eval resume=latest",
    )


class Sample(Section):
    """The text that a run prints at its end."""

    tokens: Annotated[int, Field(ge=0, le=1_000_000)] = key(
        160, "length of the sample, in tokens; 0: none", unit="tokens", example="0"
    )
    temperature: NonNegative = key(0.8, "0: always the likeliest token", example="0")


class Launch(Section):
    """How ranks are started."""

    ranks: Ranks = key("auto", "processes; auto: one per GPU, or 1 on a CPU", unit="processes", example="2")
    device: Literal["auto", "cpu", "cuda"] = key(
        "auto", "what computes: cuda, cpu, or auto: GPUs where torch finds some", example="cpu"
    )
    threads: Threads = key("auto", "CPU threads per rank; auto: the cores shared evenly", unit="threads", example="1")
    timeout: Annotated[float, Field(ge=1, le=604_800)] = key(
        300.0,
        "longest wait for another rank, in seconds; at most a week",
        unit="seconds",
        trades="how soon a hung rank is noticed, against patience with a slow one",
        example="60",
    )
    max_restarts: Natural = key(
        0,
        "how often all ranks are started again after a failure, from the newest valid checkpoint",
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
        """As `World.from_env` takes it."""
        return None if self.device == "auto" else self.device


class Checkpoint(Section):
    """What is saved, where and how often; see docs/checkpoints.md."""

    dir: Place | None = key(
        None, "folder of all checkpoints; null: checkpoints/ in the run's folder", example="checkpoints"
    )
    every: Natural = key(
        0,
        "save after every so many steps and after the last; 0: only when stopped",
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
    async_: bool = key(
        False,
        "write a copy behind the next steps; needs host memory for it",
        alias="async",
        trades="host memory for this rank's share of the state, against waiting for the disk",
        example="true",
    )
    on_failure: Literal["stop", "continue"] = key("stop", "what a run does when a save fails", example="continue")
    partial: Names = key(
        (), "names or patterns of tensors that resume leaves as they are, such as [head.*]", example="[head.*]"
    )
    convert: Names = key((), "names or patterns of tensors that resume may read from another dtype", example="['*']")


class Machine(Section):
    """The machine that mode=plan plans for; auto: this one."""

    ranks: Ranks = key(
        "auto", "ranks in all; auto: launch.ranks, on one machine", unit="processes", example="64 mode=plan"
    )
    ranks_per_node: Ranks = key(
        "auto",
        "ranks that share one host memory; auto: all of launch.ranks, or at most 8 of plan.ranks",
        unit="processes",
        example="4 mode=plan",
    )
    device_memory: Memory = key(
        "auto", "memory of one GPU, such as 80GiB; auto: what is free here", unit="bytes", example="80GiB mode=plan"
    )
    host_memory: Memory = key(
        "auto", "host memory of one node, such as 1TiB; auto: what is free here", unit="bytes", example="1TiB mode=plan"
    )
    disk: Disk = key(
        "auto",
        "disk of one node for offload, such as 4TB; auto: what offload.path has free",
        unit="bytes",
        example="4TB mode=plan",
    )


class Explain(Section):
    """What mode=explain explains."""

    key: Word | None = key(
        None, "a key, such as zero.stage, or a section, such as offload", example="zero.stage mode=explain"
    )


class Debug(Section):
    """Aids for finding mistakes."""

    overfit: bool = key(False, "train on the first batch again and again", example="true")
    stop_at: Whole | None = key(
        None, "end after this step, schedule unchanged; null: after `steps`", unit="steps", example="10"
    )
