"""The keys of DeepSpeed 0.19's configuration: a field for each supported key, except those of optimizer and scheduler.

A field's description names the corresponding setting of this library. The value of a field that is declared with `to`
is copied to that setting unchanged.
"""

import math
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from zero.core.schema import Section
from zero.core.setting_types import MOST, Count, Names, PlainText, Whole
from zero.deepspeed.config.key_types import Dtype, NonNegativeFloat, means, to

Every = Annotated[Whole, BeforeValidator(lambda value: MOST if value == math.inf else value)]


class Fp16(Section):
    """Keys of `fp16`."""

    enabled: bool = means("`precision=fp16`", False)
    loss_scale: NonNegativeFloat = means("`precision.scale.static`; 0 is `null`: dynamic", 0.0)
    initial_scale_power: Annotated[int, Field(ge=0, le=40)] = means("`precision.scale.initial`, 2 to that power", 16)
    loss_scale_window: Whole | None = to("precision.scale.window")
    hysteresis: Whole | None = to("precision.scale.hysteresis")
    min_loss_scale: NonNegativeFloat | None = to("precision.scale.minimum")
    auto_cast: bool = means("`zero.initialize`: false leaves floating-point inputs as they are, also in bf16", True)


class Bf16(Section):
    """Keys of `bf16`."""

    enabled: bool = means("`precision=bf16`", False)


class OffloadKeys(Section):
    """Keys of `offload_param` and `offload_optimizer`."""

    device: Literal["none", "cpu", "nvme"] | None = means("`offload.param`, `offload.optimizer`; gradients follow it")
    nvme_path: PlainText | None = means("`offload.path`")
    pin_memory: bool | None = means("`offload.pin`")


class LeafModule(Section):
    """Keys of `leaf_module`."""

    classes: Names = means("`zero.units`, with the default policy for the rest", ())


class ZeroOptimization(Section):
    """Keys of `zero_optimization`."""

    stage: Annotated[int, Field(ge=0, le=3)] = means("`zero.stage`", 0)
    offload_param: OffloadKeys = means("", OffloadKeys())
    offload_optimizer: OffloadKeys = means("", OffloadKeys())
    nvme_offload_path: PlainText | None = means("`offload.path`")
    offload_param_nvme: bool = means("`offload.param=nvme`, whatever `offload_param.device` is", False)
    offload_optimizer_nvme: bool = means("`offload.optimizer=nvme`, whatever `offload_optimizer.device` is", False)
    cpu_offload: bool = means("`offload.optimizer=cpu`", False)
    cpu_offload_param: bool = means("`offload.param=cpu`", False)
    leaf_module: LeafModule = means("", LeafModule())
    units: Names | None = to("zero.units")
    gather: PlainText | None = to("zero.gather")
    reduce: PlainText | None = to("zero.reduce")
    shard: PlainText | None = to("zero.shard")
    frozen: PlainText | None = to("precision.frozen")
    zero_quantized_nontrainable_weights: bool = means("`precision.frozen=int8`", False)


class Aio(Section):
    """Keys of `aio`."""

    intra_op_parallelism: Whole | None = to("offload.threads")
    thread_count: Whole | None = to("offload.threads")


class ActivationCheckpointing(Section):
    """Keys of `activation_checkpointing`, each of which turns on the recomputation of activations."""

    partition_activations: bool = means("`zero.activations=remat`", False)
    cpu_checkpointing: bool = means("`zero.activations=remat`", False)
    contiguous_memory_optimization: bool = means("`zero.activations=remat`", False)
    number_checkpoints: Whole | None = means("`zero.activations=remat`")


class WandbKeys(Section):
    """Keys of `wandb`."""

    enabled: bool = means("`tracker=wandb`", False)
    project: PlainText = means("`tracker.project`", "deepspeed")
    group: PlainText | None = means("`tracker.group`")
    team: PlainText | None = means("`tracker.entity`")


class Tensorboard(Section):
    """Keys of `tensorboard`."""

    enabled: bool = means("`tracker.tensorboard=true`", False)


class Named(Section):
    """Keys of `optimizer` and `scheduler`."""

    type: PlainText | None = means("`optim` or `schedule`")
    params: Any = means("`optim.*` with `optim.decay=all`, or `schedule.*`", {})


class Keys(Section):
    """All supported keys."""

    train_batch_size: Count = means("`batch.global`", "auto")
    train_micro_batch_size_per_gpu: Count = means("`batch.micro`", "auto")
    gradient_accumulation_steps: Count = means("`batch.accumulate`", "auto")
    managed_gradient_accumulation: bool = means("`zero.initialize`: false leaves it to the caller when to step", True)
    gradient_allreduce_op: Literal["mean", "avg"] = means("gradients are averaged", "mean")
    sequence_parallel_size: Literal[1] = means("only 1", 1)
    gradient_clipping: NonNegativeFloat | None = means(
        "`optim.clip`; 0 is `null`; 1.0 without the key, as in newest DeepSpeed"
    )
    optimizer: Named = means("", Named())
    scheduler: Named = means("", Named())
    steps_per_print: Every | None = to("tracker.every")
    dataloader_drop_last: bool = means(
        "`zero.initialize`: whether its loader leaves out the last, smaller batch", False
    )
    fp16: Fp16 = means("", Fp16())
    bf16: Bf16 = means("", Bf16())
    bfloat16: Bf16 = means("", Bf16())
    communication_data_type: Dtype | None = to("precision.reduce")
    zero_optimization: ZeroOptimization = means("", ZeroOptimization())
    aio: Aio = means("", Aio())
    activation_checkpointing: ActivationCheckpointing = means("", ActivationCheckpointing())
    wandb: WandbKeys = means("", WandbKeys())
    tensorboard: Tensorboard = means("", Tensorboard())
