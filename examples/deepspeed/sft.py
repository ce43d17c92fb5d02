#!/usr/bin/env python
"""Supervised fine-tuning in the shape of DeepSpeed-Chat's first step: perplexity, a folder for transformers at the end.

    examples/deepspeed/sft.py --zero_stage 3 --output_dir OUT
    torchrun --nproc-per-node 2 examples/deepspeed/sft.py --zero_stage 3 --output_dir OUT

It runs under DeepSpeed too: `import deepspeed` in place of the line that is marked. A small OPT learns drawn dialogues.
"""

import argparse
import json
import math
import os

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler, Sampler, SequentialSampler
from transformers import OPTConfig, OPTForCausalLM, default_data_collator, get_scheduler, set_seed

import zero.deepspeed as deepspeed  # the only change

VOCAB, LENGTH = 32, 24
NO_DECAY = ("bias", "layer_norm.weight")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fine-tunes a small OPT on drawn dialogues.")
    parser.add_argument("--per_device_train_batch_size", type=int, default=4)
    parser.add_argument("--per_device_eval_batch_size", type=int, default=8)
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--weight_decay", type=float, default=0.1)
    parser.add_argument("--num_train_epochs", type=int, default=2)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--lr_scheduler_type", default="cosine")
    parser.add_argument("--num_warmup_steps", type=int, default=4)
    parser.add_argument("--output_dir", help="where to leave the model for transformers")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--no_gradient_checkpointing", dest="gradient_checkpointing", action="store_false")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--dtype", choices=["fp32", "fp16", "bf16"], default="fp32")
    parser.add_argument("--offload", action="store_true", help="keep parameters and the optimizer in host memory")
    parser.add_argument("--zero_stage", type=int, default=1)
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


def get_train_ds_config(offload: bool, dtype: str, stage: int) -> dict:
    device = "cpu" if offload else "none"
    config = {
        "steps_per_print": 1000,
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": True,
            "offload_param": {"device": device},
            "offload_optimizer": {"device": device},
            "stage3_param_persistence_threshold": 1e4,
            "stage3_max_live_parameters": 3e7,
            "stage3_prefetch_bucket_size": 3e7,
            "memory_efficient_linear": False,
        },
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "wall_clock_breakdown": False,
        "hybrid_engine": {"enabled": False, "max_out_tokens": 512, "inference_tp_size": 1, "pin_parameters": True},
        "tensorboard": {"enabled": False, "output_path": "ds_tensorboard_logs/", "job_name": "sft_tensorboard"},
    }
    if dtype == "fp16":
        config["fp16"] = {"enabled": True, "loss_scale_window": 100}
    elif dtype == "bf16":
        config["bfloat16"] = {"enabled": True}
    return config


class Dialogues(Dataset):
    """Walks of equal steps through the vocabulary, of several lengths; the prompt and the padding have no loss."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows = [self._drawn(generator) for _ in range(count)]

    def _drawn(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        first, step, length = (int(torch.randint(*span, (1,), generator=generator)) for span in SPANS)
        place = torch.arange(LENGTH)
        tokens, mask = 3 + (first + step * place) % (VOCAB - 3), (place < length).long()
        tokens = torch.where(mask.bool(), tokens, 1)
        labels = torch.where(mask.bool() & (place >= 4), tokens, -100)
        return {"input_ids": tokens, "attention_mask": mask, "labels": labels}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.rows[index]


SPANS = ((0, VOCAB - 3), (1, 6), (LENGTH // 2, LENGTH + 1))


def create_model(dropout: float) -> OPTForCausalLM:
    config = OPTConfig(
        vocab_size=VOCAB, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=32, word_embed_proj_dim=32, dropout=dropout, pad_token_id=1,
    )  # fmt: skip
    return OPTForCausalLM(config)


def get_optimizer_grouped_parameters(model: torch.nn.Module, weight_decay: float) -> list[dict]:
    """Return two groups by names: parameters that decay, and biases and norms."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    rests = [any(part in name for part in NO_DECAY) for name, _ in named]
    return [
        {"params": [p for (_, p), no in zip(named, rests, strict=True) if not no], "weight_decay": weight_decay},
        {"params": [p for (_, p), no in zip(named, rests, strict=True) if no], "weight_decay": 0.0},
    ]


def loaders(args: argparse.Namespace) -> tuple[DataLoader, DataLoader]:
    train, held_out = Dialogues(64, seed=1), Dialogues(32, seed=2)
    samplers: tuple[Sampler, Sampler]
    if torch.distributed.get_world_size() == 1:
        samplers = RandomSampler(train), SequentialSampler(held_out)
    else:
        samplers = DistributedSampler(train), DistributedSampler(held_out)
    sizes = args.per_device_train_batch_size, args.per_device_eval_batch_size
    collated = [
        DataLoader(rows, collate_fn=default_data_collator, sampler=sampler, batch_size=size)
        for rows, sampler, size in zip((train, held_out), samplers, sizes, strict=True)
    ]
    return collated[0], collated[1]


def print_rank_0(message: object, rank: int = 0) -> None:
    if rank <= 0:
        print(message, flush=True)


def to_device(batch: dict, device: torch.device) -> dict:
    return {key: value.to(device) for key, value in batch.items()}


def get_all_reduce_mean(tensor: torch.Tensor) -> torch.Tensor:
    torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.SUM)
    return tensor / torch.distributed.get_world_size()


def evaluation(model: torch.nn.Module, batches: DataLoader, device: torch.device) -> tuple[float, float]:
    """Return the perplexity over all ranks, and the mean loss of this rank."""
    model.eval()
    losses = torch.zeros((), device=device)
    for batch in batches:
        with torch.no_grad():
            losses += model(**to_device(batch, device)).loss.float()
    losses = losses / len(batches)
    return get_all_reduce_mean(torch.exp(losses)).item(), losses.item()


def save_hf_format(model: torch.nn.Module, rank: int, folder: str) -> None:
    """Write a folder that `from_pretrained` reads.

    DeepSpeed-Chat calls this on rank 0 alone. Here every rank calls it and rank 0 writes: at stage 3 `state_dict()`
    gathers the shards of all ranks; DeepSpeed's `state_dict()` has empty tensors there.
    """
    model_to_save = model.module if hasattr(model, "module") else model
    save_dict = model_to_save.state_dict()
    if rank != 0:
        return
    os.makedirs(folder, exist_ok=True)
    for key in [key for key in save_dict if "lora" in key]:
        del save_dict[key]
    torch.save(save_dict, os.path.join(folder, "pytorch_model.bin"))
    model_to_save.config.to_json_file(os.path.join(folder, "config.json"))


def save_zero_three_model(model: torch.nn.Module, rank: int, folder: str) -> None:
    """Write the same file at stage 3, where each rank has a part of the model: gather parameters one by one."""
    model_to_save = model.module if hasattr(model, "module") else model
    output_state_dict = {}
    for name, p in model_to_save.named_parameters():
        with deepspeed.zero.GatheredParameters([p]):
            value = p.data.cpu().clone()
        if rank == 0 and "lora" not in name:
            output_state_dict[name] = value
    if rank == 0:
        torch.save(output_state_dict, os.path.join(folder, "pytorch_model.bin"))


def main() -> None:
    args = parse_args()
    deepspeed.init_distributed()
    accelerator = deepspeed.accelerator.get_accelerator()
    device = torch.device(accelerator.device_name(), int(os.environ.get("LOCAL_RANK", max(args.local_rank, 0))))
    args.global_rank = torch.distributed.get_rank()

    ds_config = get_train_ds_config(args.offload, args.dtype, args.zero_stage)
    ds_config["train_micro_batch_size_per_gpu"] = args.per_device_train_batch_size
    ds_config["train_batch_size"] = (
        args.per_device_train_batch_size * torch.distributed.get_world_size() * args.gradient_accumulation_steps
    )
    set_seed(args.seed)
    torch.distributed.barrier()
    model = create_model(args.dropout)
    train_dataloader, eval_dataloader = loaders(args)

    AdamOptimizer = deepspeed.ops.adam.DeepSpeedCPUAdam if args.offload else deepspeed.ops.adam.FusedAdam
    optimizer = AdamOptimizer(
        get_optimizer_grouped_parameters(model, args.weight_decay), lr=args.learning_rate, betas=(0.9, 0.95)
    )
    updates = args.num_train_epochs * math.ceil(len(train_dataloader) / args.gradient_accumulation_steps)
    lr_scheduler = get_scheduler(
        name=args.lr_scheduler_type,
        optimizer=optimizer,
        num_warmup_steps=args.num_warmup_steps,
        num_training_steps=updates,
    )
    model, optimizer, _, lr_scheduler = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        args=args,
        config=ds_config,
        lr_scheduler=lr_scheduler,
        dist_init_required=True,
    )
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable()

    losses, rates = [], []
    perplexity, eval_loss = evaluation(model, eval_dataloader, device)
    print_rank_0(f"ppl: {perplexity}, loss: {eval_loss}", args.global_rank)
    eval_losses = [eval_loss]
    for epoch in range(args.num_train_epochs):
        model.train()
        for batch in train_dataloader:
            loss = model(**to_device(batch, device), use_cache=False).loss
            model.backward(loss)
            model.step()
            losses.append(loss.item())
            rates.append(lr_scheduler.get_last_lr()[0])
        perplexity, eval_loss = evaluation(model, eval_dataloader, device)
        print_rank_0(f"epoch {epoch + 1} ppl: {perplexity}, loss: {eval_loss}", args.global_rank)
        eval_losses.append(eval_loss)
        model.tput_timer.update_epoch_count()

    results = {"losses": losses, "rates": rates, "eval_losses": eval_losses}
    if args.output_dir is not None:
        save_hf_format(model, args.global_rank, args.output_dir)
        if args.zero_stage == 3:
            save_zero_three_model(model, args.global_rank, args.output_dir)
        if args.global_rank == 0:
            saved = OPTForCausalLM.from_pretrained(args.output_dir).to(device)
            batch = to_device(next(iter(eval_dataloader)), device)
            with torch.no_grad():
                results["saved"] = saved.eval()(**batch).loss.item()
    print_rank_0(json.dumps(results), args.global_rank)


if __name__ == "__main__":
    main()
