"""The Trainer of transformers, with ZeRO stage 3 and the optimizer's state in a file.

python examples/hf_trainer.py
torchrun --nproc-per-node 2 examples/hf_trainer.py
"""

from pathlib import Path

import torch
import transformers

from zero.integrations.transformers import Trainer  # was: from transformers import Trainer


def main() -> None:
    transformers.set_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=256, pad_token_id=None))
    text = torch.tensor(list(Path(torch.nn.functional.__file__).read_bytes()))
    rows = [{"input_ids": row, "labels": row} for row in text.unfold(0, 64, 64)]  # of 64 bytes
    optimizer = {"learning_rate": 1e-2, "weight_decay": 0.1, "lr_scheduler_type": "cosine", "warmup_steps": 3}
    batch = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 30}
    device = {"use_cpu": not torch.cuda.is_available()}  # needed with several processes
    logs = {"logging_steps": 10, "eval_strategy": "steps", "eval_steps": 15, "save_steps": 15, "report_to": "none"}
    args = transformers.TrainingArguments("runs/hf_trainer", **optimizer, **batch, **logs, **device)
    settings = {"stage": 3, "offload": "nvme", "precision": "bf16"}  # new
    trainer = Trainer(model=model, args=args, train_dataset=rows[20:], eval_dataset=rows[:20], zero=settings)
    trainer.train()  # or trainer.train(resume_from_checkpoint=True)
    trainer.save_model("runs/hf_trainer/trained")  # on every rank; from_pretrained loads it
    if trainer.is_world_process_zero():
        for row in trainer.state.log_history[:-1]:  # the last one is of the whole run
            print("step", row["step"], *(f"{key} {row[key]:.3f}" for key in ("loss", "eval_loss") if key in row))


if __name__ == "__main__":
    main()
