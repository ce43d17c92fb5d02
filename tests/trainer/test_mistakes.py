"""Mistakes in Python against a small model: each raises one line with what to write."""

from pathlib import Path

import pytest
import torch
from torch import nn

import zero

ROOT = Path(__file__).resolve().parents[2]

SNIPPETS = [
    # a loss
    ('train(lambda model, batch: {"loss": loss_fn(model, batch)})', 'Write return outputs["loss"]'),
    ("train(lambda model, batch: loss_fn(model, batch).item())", "without .item()"),
    ("train(lambda model, batch: None)", "End it with return loss"),
    ("train(lambda model, batch: model(batch))", "Return a scalar"),
    ("train(lambda model, batch: loss_fn(model, batch).detach())", "without torch.no_grad() or .detach()"),
    ("train(lambda model, batch: (loss_fn(model, batch), batch))", "Write return loss, or return loss, {"),
    ("zero.make_step(plan, batch.mean())", "Pass a function that takes (model, microbatch)"),
    # microbatches
    ("step(state, batch)", "Pass a list of microbatches: step(state, [batch])"),
    ('step(state, {"x": batch})', "Pass a list of microbatches: step(state, [batch])"),
    ("step(state, (batch, batch))", "Pass one batch, also a tuple of tensors, as [batch]"),
    ("step(state, [batch, batch])", "Plan(accumulate=...)"),
    # states and plans
    ("step([batch])", "Write state, metrics = step(state, [batch])"),
    ("step(plan, [batch])", "a step takes a State, not a Plan"),
    ("step(step(state, [batch]), [batch])", "Write state, metrics = step(state, [batch])"),
    ("step(state, [batch]); step(state, [batch])", "keep the new one"),
    ("zero.make_step(state, loss_fn)", "zero.make_step takes a Plan, not a State"),
    ("zero.make_step(model, loss_fn)", "Write step = zero.make_step(plan, loss_fn)"),
    ("zero.open_store(state)", "zero.open_store takes a Plan, not a State"),
    ("zero.init(state)", "zero.init takes a Plan, not a State"),
    ("zero.init(plan)", "Write state = zero.init(plan, zero.open_store(plan))"),
    ("zero.init(plan, store)", "Open another one with zero.open_store(plan)"),
    ("zero.save(plan, 'checkpoints')", "zero.save takes a State, not a Plan. Write zero.save(state, folder)"),
    ("zero.load(state, 'checkpoints')", "zero.open_checkpoint(world, folder)"),
    ("zero.full_state_dict(state.model)", "Write zero.full_state_dict(state)"),
    ("zero.get_full(state, '0.weigth')", "Did you mean 0.weight?"),
    ("zero.set_full(state, '0.weight', batch)", "but must be (8, 4)"),
    ("state.model[0].weight.data.zero_()", "zero.gathered(state or engine, names, modify=True)"),
    ("zero.open_checkpoint(world, 'nowhere')", "Pass the folder itself"),
    # a plan
    ("make_plan(stage=4)", "a stage is 0, 1, 2 or 3"),
    ("make_plan(precision=torch.bfloat16)", "must be one of fp32, bf16, fp16"),
    ("make_plan(offload='disk')", "must be one of none, cpu, nvme, infinity, auto"),
    ("make_plan(optimizer=torch.optim.AdamW(model.parameters()))", "Make one with zero.adamw(lr)"),
    ("make_plan(world=2)", "Make one with zero.World.from_env()"),
    ("make_plan(units='Linear')", "Pass a list: ['Linear']"),
    ("make_plan(activations='checkpoint')", "one of keep, selective, remat, offload"),
    ("make_plan(accumulate=0)", "1 or more"),
    ("zero.adamw(lr='fast')", "must be a number"),
    ("zero.Offload('nvme', pth='/mnt')", "Did you mean offload.path?"),
    # DeepSpeed's names
    ("zero.initialize(model=model, config={'train_batch_siz': 8})", "Did you mean train_batch_size?"),
]
"""Code, and a part of the message."""


@pytest.fixture
def names(here):
    """What a script has at hand."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    needed = {"optimizer": zero.adamw(lr=1e-3), "world": zero.World.from_env()}
    plan = zero.Plan(model, **needed)
    store = zero.open_store(plan)
    state = zero.init(plan, store)
    batch = torch.ones(3, 4)

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()

    yield {
        "zero": zero,
        "torch": torch,
        "nn": nn,
        "model": model,
        "world": needed["world"],
        "plan": plan,
        "store": store,
        "state": state,
        "batch": batch,
        "loss_fn": loss_fn,
        "step": zero.make_step(plan, loss_fn),
        "train": lambda loss_fn: zero.make_step(plan, loss_fn)(state, [batch]),
        "make_plan": lambda **other: zero.Plan(nn.Linear(4, 8), **{**needed, **other}),
    }
    store.close()


@pytest.mark.parametrize(("code", "message"), SNIPPETS)
def test_a_mistake_raises_one_line_with_what_to_write(names, code, message):
    with pytest.raises(zero.ZeroError) as caught:
        exec(code, names)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
