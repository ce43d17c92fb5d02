"""A Llama of transformers on long rows: two ranks share each row, and hold half of its tokens each.

    torchrun --nproc-per-node 2 examples/long_rows.py
    torchrun --nproc-per-node 4 examples/long_rows.py   # two groups of two ranks

Parameters stay sharded over all ranks. Documents are packed into rows, and tokens attend within their document only.
"""

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

import zero


def main(steps: int = 30, length: int = 512) -> None:
    world = zero.open_world()
    group = zero.sequence.open_group(world, min(2, world.size))  # this rank and its neighbour
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    with zero.empty():  # parameters take no memory yet
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=256, pad_token_id=None))
    parallel = zero.sequence_parallel(model, group)

    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Any:
        inputs, targets = parallel.slice(batch)  # this rank's tokens, positions and labels of the next tokens
        logits = model(**inputs).logits
        total = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
        return parallel.loss(total, targets)  # the mean over all tokens of the group's rows

    plan = zero.Plan(model, optimizer=zero.adamw(lr=3e-3, clip=1.0), stage=3, world=world)
    store = zero.open_store(plan)
    state = zero.init(plan, store, seed=0)
    step = zero.make_step(plan, loss_fn)

    text = torch.tensor(list(Path(F.__file__).read_bytes()))  # the source of torch.nn.functional
    draw = torch.Generator().manual_seed(world.rank // group.size)  # ranks of a group have the same rows
    tokens = torch.arange(length, device=world.device)
    documents = tokens.remainder(length // 4).unsqueeze(0)  # four in a row: positions begin anew
    for number in range(1, steps + 1):
        starts = torch.randint(len(text) - length, (1, 1), generator=draw)
        rows = text[starts + torch.arange(length)].to(world.device)
        batch = {"input_ids": rows, "labels": rows.where(documents > 0, -100), "position_ids": documents}
        state, metrics = step(state, [batch])
        if world.rank == 0 and number % 10 == 0:
            print(f"step {number}  loss {metrics.loss:.3f}  gradient norm {metrics.grad_norm:.3f}")
    store.close()


if __name__ == "__main__":
    main()
