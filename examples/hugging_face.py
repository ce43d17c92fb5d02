"""A Llama of transformers: its weights are read into shards, trained, and written back as transformers has them.

    python examples/hugging_face.py                 # a small Llama with random weights
    python examples/hugging_face.py path/to/llama   # any folder that from_pretrained reads
    torchrun --nproc-per-node 2 examples/hugging_face.py

The optimizer's state is in a file, and the whole model is never in memory.
"""

import sys
from datetime import datetime
from pathlib import Path

import torch
import transformers

import zero
from zero.formats import export_checkpoint, open_newest
from zero.trainer.models import hf


def small_llama(folder: Path) -> None:
    """Write a folder as of a download: config.json and weights in safetensors."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, vocab_size=256, pad_token_id=None)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def main() -> None:
    world = zero.open_world()  # the ranks that torchrun started, or this process alone
    out = Path(world.share(f"runs/{datetime.now():%Y-%m-%d/%H-%M-%S}"))  # rank 0's path, on every rank
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else out / "given"
    if world.rank == 0:
        out.mkdir(parents=True)
        if not folder.exists():
            small_llama(folder)
    world.barrier()
    model = hf.build(folder)  # transformers' own class; parameters take no memory yet
    offload = zero.Offload("nvme", path=".")  # master weights and moments in a file of this folder
    plan = zero.Plan(model, optimizer=zero.adamw(lr=1e-3, clip=1.0), stage=3, world=world, offload=offload)
    store = zero.open_store(plan)
    state = zero.init(plan, store, weights=hf.weights(model, folder))
    step = zero.make_step(plan, hf.loss)  # the mean cross entropy of each next token
    rows = torch.randint(model.config.vocab_size, (world.size, 2, 33), generator=torch.Generator().manual_seed(0))
    for number in range(1, 21):
        state, metrics = step(state, [rows[world.rank].to(world.device)])  # (2, 33) tokens of this rank
        if world.rank == 0 and number % 5 == 0:
            print(f"step {number}  loss {metrics.loss:.3f}  gradient norm {metrics.grad_norm:.3f}")
    checkpoint = zero.save(state, out / "checkpoints")
    store.close()
    if world.rank == 0:  # one process writes, and transformers reads
        export_checkpoint(open_newest(checkpoint)[0], "hf", out / "trained")
        hf.write_settings(folder, out / "trained")
        trained = transformers.AutoModelForCausalLM.from_pretrained(out / "trained")
        print(f"transformers has {trained.num_parameters():,} trained parameters from {out / 'trained'}")


if __name__ == "__main__":
    main()
