#!/usr/bin/env python
"""DeepSpeed's tutorial HelloDeepSpeed in its own shape: a masked language model that is saved, built anew and resumed.

    examples/deepspeed/bert.py --zero_stage 1 --checkpoint_dir EXPERIMENTS

It runs under DeepSpeed too: `import deepspeed` in place of the line that is marked. A small RoBERTa learns drawn
sentences: half of the iterations, then an engine of its own goes on from the checkpoint of the first one.
"""

import argparse
import json
import logging
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers.models.roberta import RobertaConfig, RobertaModel
from transformers.models.roberta.modeling_roberta import RobertaLMHead, RobertaPreTrainedModel

import zero.deepspeed as deepspeed  # the only change

log = logging.getLogger(__name__)
BEGIN, PAD, END, MASK, FIRST_WORD, VOCAB = 0, 1, 2, 3, 4, 40


def is_rank_0() -> bool:
    return int(os.environ.get("RANK", "0")) == 0


def log_dist(message: str) -> None:
    if is_rank_0():
        log.info("%s", message)


class Sentences(Dataset):
    """Sentences in which each word follows from the word before; chosen words are masked, replaced, or kept.

    An item is (tokens, labels). The label of a word that was not chosen is the padding's number.
    """

    def __init__(self, count: int, mask_prob: float, random_replace_prob: float, unmask_replace_prob: float) -> None:
        self.count, self.mask_prob = count, mask_prob
        self.random_replace_prob, self.unmask_replace_prob = random_replace_prob, unmask_replace_prob

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[list[int], list[int]]:
        generator = torch.Generator().manual_seed(index)
        words, length = VOCAB - FIRST_WORD, int(torch.randint(8, 17, (1,), generator=generator))
        first = int(torch.randint(words, (1,), generator=generator))
        tokens = torch.tensor([BEGIN, *(FIRST_WORD + (first + 5 * place) % words for place in range(length)), END])
        chosen = torch.rand(length + 2, generator=generator) < self.mask_prob
        chosen[1 + index % length] = True
        chosen[[0, -1]] = False
        labels = torch.where(chosen, tokens, PAD)
        fate, strangers = (
            torch.rand(length + 2, generator=generator),
            torch.randint(FIRST_WORD, VOCAB, (length + 2,), generator=generator),
        )
        replaced = torch.where(fate < self.random_replace_prob, strangers, MASK)
        kept = fate > 1 - self.unmask_replace_prob
        return torch.where(chosen & ~kept, replaced, tokens).tolist(), labels.tolist()


def collate_function(batch: list[tuple[list[int], list[int]]], pad_token_id: int) -> dict[str, torch.Tensor]:
    """Pad all rows to the length of the longest row."""
    longest = max(len(tokens) for tokens, _ in batch)
    padded = [[row + [pad_token_id] * (longest - len(row)) for row in column] for column in zip(*batch, strict=True)]
    src_tokens, tgt_tokens = (torch.tensor(column) for column in padded)
    attention_mask = src_tokens.ne(pad_token_id).type_as(src_tokens)
    return {"src_tokens": src_tokens, "tgt_tokens": tgt_tokens, "attention_mask": attention_mask}


def create_data_iterator(batch_size: int, **masking: float) -> Iterator[dict[str, torch.Tensor]]:
    """Yield batches without an end."""
    collate = partial(collate_function, pad_token_id=PAD)
    loader = DataLoader(Sentences(256, **masking), batch_size=batch_size, shuffle=True, collate_fn=collate)
    while True:
        yield from loader


class LMHeadWithMaskedPredict(RobertaLMHead):
    """Scores of the chosen tokens alone, by the embedding's own weight."""

    def __init__(self, config: RobertaConfig, embedding_weight: nn.Parameter) -> None:
        super().__init__(config)
        self.decoder.weight = embedding_weight

    def forward(self, features: torch.Tensor, masked_token_indices: torch.Tensor) -> torch.Tensor:
        return super().forward(features.view(-1, features.shape[-1]).index_select(0, masked_token_indices))


class RobertaMLMModel(RobertaPreTrainedModel):
    def __init__(self, config: RobertaConfig, encoder: RobertaModel) -> None:
        super().__init__(config)
        self.encoder = encoder
        self.lm_head = LMHeadWithMaskedPredict(config, encoder.embeddings.word_embeddings.weight)
        self.lm_head.apply(self._init_weights)

    def forward(self, src_tokens: torch.Tensor, attention_mask: torch.Tensor, tgt_tokens: torch.Tensor) -> torch.Tensor:
        output, *_ = self.encoder(input_ids=src_tokens, attention_mask=attention_mask, return_dict=False)
        chosen = torch.nonzero((tgt_tokens != self.config.pad_token_id).view(-1)).view(-1)
        scores = self.lm_head(output, chosen)
        return nn.functional.cross_entropy(scores, tgt_tokens.view(-1).index_select(0, chosen))


def create_model(num_layers: int, num_heads: int, ff_dim: int, h_dim: int, dropout: float) -> RobertaMLMModel:
    config = RobertaConfig(
        vocab_size=VOCAB, num_hidden_layers=num_layers, num_attention_heads=num_heads, intermediate_size=ff_dim,
        hidden_size=h_dim, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
        max_position_embeddings=32, type_vocab_size=1, bos_token_id=BEGIN, pad_token_id=PAD, eos_token_id=END,
    )  # fmt: skip
    return RobertaMLMModel(config, RobertaModel(config))


def create_experiment_dir(checkpoint_dir: Path, hparams: dict) -> Path:
    exp_dir = checkpoint_dir / "bert_pretrain"
    if is_rank_0():
        exp_dir.mkdir(parents=True)
        (exp_dir / "hparams.json").write_text(json.dumps(hparams, indent=2))
    return exp_dir


def get_ds_config(batch_size: int, zero_stage: int) -> dict:
    return {
        "train_micro_batch_size_per_gpu": batch_size,
        "steps_per_print": 1000,
        "optimizer": {"type": "Adam", "params": {"lr": 2e-3, "betas": [0.9, 0.98], "weight_decay": 0.01}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": zero_stage, "offload_optimizer": {"device": "cpu"}},
    }


def train(
    checkpoint_dir: Path | None = None,
    load_checkpoint_dir: Path | None = None,
    mask_prob: float = 0.15,
    random_replace_prob: float = 0.1,
    unmask_replace_prob: float = 0.1,
    num_layers: int = 2,
    num_heads: int = 4,
    ff_dim: int = 64,
    h_dim: int = 32,
    dropout: float = 0.1,
    batch_size: int = 8,
    num_iterations: int = 20,
    checkpoint_every: int = 10,
    log_every: int = 5,
    zero_stage: int = 1,
) -> tuple[Path, list[float]]:
    """Begin an experiment in `checkpoint_dir`, or resume that of `load_checkpoint_dir`; return folder and losses."""
    shape = {"num_layers": num_layers, "num_heads": num_heads, "ff_dim": ff_dim, "h_dim": h_dim, "dropout": dropout}
    if load_checkpoint_dir is not None:
        exp_dir = load_checkpoint_dir
        shape = json.loads((exp_dir / "hparams.json").read_text())
    else:
        assert checkpoint_dir is not None
        exp_dir = create_experiment_dir(checkpoint_dir, shape)
    device = torch.device(deepspeed.accelerator.get_accelerator().current_device_name())
    batches = create_data_iterator(
        batch_size,
        mask_prob=mask_prob,
        random_replace_prob=random_replace_prob,
        unmask_replace_prob=unmask_replace_prob,
    )
    model = create_model(**shape)
    model, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=get_ds_config(batch_size, zero_stage)
    )
    start_step = 1
    if load_checkpoint_dir is not None:
        _, client_state = model.load_checkpoint(load_dir=load_checkpoint_dir)
        start_step = client_state["checkpoint_step"] + 1
        torch.manual_seed(start_step)  # zero brings back the random numbers of the save, DeepSpeed does not
    log_dist(f"Total number of model parameters: {sum(p.numel() for p in model.parameters()):,d}")

    model.train()
    losses: list[float] = []
    for step in range(start_step, num_iterations + 1):
        batch = {key: value.to(device) for key, value in next(batches).items()}
        loss = model(**batch)
        model.backward(loss)
        model.step()
        losses.append(loss.item())
        if step % log_every == 0:
            log_dist(f"Loss: {sum(losses) / len(losses):.4f}")
        if step % checkpoint_every == 0 or step == num_iterations:
            model.save_checkpoint(save_dir=exp_dir, client_state={"checkpoint_step": step})
            log_dist(f"Saved model to {exp_dir}")
    return exp_dir, losses


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a small RoBERTa, twice half of the way.")
    parser.add_argument("--checkpoint_dir", type=Path, required=True, help="where to begin an experiment")
    parser.add_argument("--num_iterations", type=int, default=40)
    parser.add_argument("--zero_stage", type=int, default=1)
    parser.add_argument("--local_rank", type=int, default=-1)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    torch.manual_seed(42)
    half = args.num_iterations // 2
    exp_dir, losses = train(checkpoint_dir=args.checkpoint_dir, num_iterations=half, zero_stage=args.zero_stage)
    _, resumed = train(load_checkpoint_dir=exp_dir, num_iterations=args.num_iterations, zero_stage=args.zero_stage)
    if is_rank_0():
        print(json.dumps({"losses": losses, "resumed": resumed}))


if __name__ == "__main__":
    main()
