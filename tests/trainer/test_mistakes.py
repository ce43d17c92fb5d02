"""Mistakes in Python against a small model: each raises one line with what to write."""

from pathlib import Path

import pytest
import torch
from torch import nn

import zero
from zero.formats import export_checkpoint, open_newest

ROOT = Path(__file__).resolve().parents[2]

SNIPPETS = [
    # a loss
    ('train(lambda model, batch: {"loss": loss_fn(model, batch)})', 'Write return outputs["loss"]'),
    ("train(lambda model, batch: loss_fn(model, batch).item())", "without .item()"),
    ("train(lambda model, batch: None)", "End it with return loss"),
    ("train(lambda model, batch: model(batch))", "Return a scalar"),
    ("train(lambda model, batch: loss_fn(model, batch).detach())", "without torch.no_grad() or .detach()"),
    ("train(lambda model, batch: (loss_fn(model, batch), batch))", "Write return loss, or return loss_sum, count"),
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
    ("make_plan(world=2)", "Make one with zero.open_world()"),
    ("make_plan(units='Linear')", "Pass a list: ['Linear']"),
    ("make_plan(activations='checkpoint')", "one of keep, selective, remat, offload"),
    ("make_plan(accumulate=0)", "1 or more"),
    ("zero.adamw(lr='fast')", "must be a number"),
    ("zero.Offload('nvme', pth='/mnt')", "Did you mean offload.path?"),
    # patterns
    ("zero.muon(0.1, exclude=None)", "optim.exclude=None: must be a list of names or patterns"),
    ("zero.muon(0.1, exclude=[3])", "an entry of optim.exclude is 3, but must be text"),
    ("make_plan(optimizer=zero.muon(0.1, exclude=['zz']))", "optim.exclude: no parameter matches 'zz'"),
    ("zero.muon(0.1, blocks={3: 2})", "a pattern of optim.blocks is 3, but must be text"),
    ("make_plan(optimizer=zero.muon(0.1, blocks={'w*': 2}, exclude=['*']))", "Take it out of optim.exclude"),
    ("make_plan(keep=None)", "zero.keep=None: must be a list of names or patterns"),
    ("make_plan(keep=[3])", "an entry of zero.keep is 3, but must be text"),
    ("make_plan(units=[3])", "an entry of zero.units is 3, but must be text"),
    ("make_plan(units=3)", "zero.units=3: must be a list of names or patterns"),
    ("make_plan(activations={3: 'remat'})", "an entry of zero.activations is 3, but must be text"),
    ("make_plan(activations={'*': ['remat']})", "zero.activations=['remat']: must be one of keep"),
    ("make_plan(replicated=[3])", "an entry of replicated is 3, but must be text"),
    ("make_plan(replicated=3)", "replicated=3: must be a list of names or patterns"),
    ("zero.Precision('bf16', frozen='nf4', coded=3)", "precision.coded=3: must be a list of names or patterns"),
    ("zero.Precision('bf16', frozen='nf4', coded=[3])", "an entry of precision.coded is 3, but must be text"),
    ("zero.Precision(['bf16'])", "precision.compute=['bf16']: must be one of fp32, bf16, fp16"),
    # numbers, and settings that are on or off
    ("make_plan(check_writes='no')", "zero.check_writes='no': must be True or False"),
    ("make_plan(prefetch='1')", "zero.prefetch='1': must be a number of units, 0 or more"),
    ("make_plan(activation_bytes='1GiB')", "activation_bytes='1GiB': must be a number of bytes, 0 or more"),
    ("zero.sgd(0.1, momentum=0.9, nesterov='no')", "optim.nesterov='no': must be True or False"),
    ("zero.muon(0.1, nesterov='no')", "optim.nesterov='no': must be True or False"),
    ("zero.adamw(torch.ones(2))", "optim.lr=tensor([1., 1.]): must be one number"),
    ("zero.with_ema(zero.with_ema(zero.adamw(0.1)))", "Call zero.with_ema once"),
    ("zero.with_ema(model)", "zero.with_ema takes an optimizer, not a Sequential"),
    ("zero.with_moments(0.1)", "zero.with_moments takes an optimizer, not a float"),
    ("zero.with_moments(zero.adamw(0.1), seed='3')", "seed of zero.with_moments='3': must be a whole number"),
    ("zero.init(plan, zero.open_store(plan), seed='3')", "seed='3': must be a whole number"),
    ("zero.init(plan, zero.open_store(plan), weights=3)", "weights is an int. Pass tensors by name, a path"),
    ("zero.make_step(plan, loss_fn, flag=lambda: 'stop')(state, [batch])", "the flag of a step='stop' is a str"),
    ("zero.make_step(plan, loss_fn, flag=1.0)", "flag is a float. Pass a function that returns a number"),
    # groups
    ("zero.adamw(0.1, groups=[['w*']])", "optim.groups[0] is a list. Write zero.Group(names, lr=1e-4)"),
    ("zero.Group([3])", "an entry of takes of a Group is 3, but must be text"),
    ("zero.Group(['*'], trains='yes')", "trains of a Group='yes': must be True or False"),
    ("zero.Group(['*'], live={'learning_rate': 0.1})", "live of a Group has 'learning_rate', which is not read"),
    ("train_with(zero.Group(['*'], live={'lr': torch.ones(2)}))", "lr at step 1=tensor([1., 1.]): must be one number"),
    ("train_with(zero.Group(['*'], live={'trains': 'yes'}))", "trains at step 1='yes': must be True or False"),
    ("train_with(zero.Group(['*'], betas=0.9))", "optim.groups[0].betas=0.9: must be a list of numbers"),
    # streams, and rows that a group shares
    ("zero.stream_weights(state, device='gpu')", "device='gpu': torch has no such device"),
    ("zero.stream_weights(state, keep='yes')", "keep='yes': must be True or False"),
    ("zero.stream_weights(state, changed_since='0')", "changed_since='0': must be a whole number, 0 or more"),
    ("zero.sequence.open_group(world, '2')", "size of a group='2': must be a whole number"),
    ("cut([batch])", "a batch is a list. Pass a dict of input_ids and labels"),
    ("cut({'input_ids': [[1, 2]], 'labels': [[1, 2]]})", "input_ids is a list. Pass a tensor, (rows, tokens)"),
    ("cut({'input_ids': rows[0], 'labels': rows[0]})", "input_ids has shape (4,). Pass (rows, tokens)"),
    ("cut({'input_ids': rows, 'labels': rows, 'position_ids': rows[:2]})", "position_ids has shape (2, 4), but"),
    ("attend(torch.ones(1, 2, 4))", "q, k and v have shapes (1, 2, 4), (1, 2, 4), (1, 2, 4). Pass (rows, heads,"),
    ("zero.sequence.open_group(3, 1)", "world is an int. Pass zero.open_world()"),
    ("zero.sequence.SequenceParallel(3)", "group is an int. Pass zero.sequence.open_group(world, 2)"),
    ("cut({'input_ids': rows[:, :0], 'labels': rows[:, :0]})", "rows of 0 tokens do not divide"),
    ("cut({'input_ids': batch, 'labels': rows})", "input_ids is torch.float32. Pass whole numbers: input_ids.long()"),
    ("cut({'input_ids': rows, 'labels': batch})", "labels is torch.float32. Pass whole numbers: labels.long()"),
    ("cut({'input_ids': rows, 'labels': rows, 3: rows})", "a batch with 3, input_ids, labels cannot be sliced"),
    ("mean(3.0, rows)", 'total is a float. Pass the sum of the losses, a tensor: reduction="sum"'),
    ("mean(torch.ones(()), 3)", "targets is an int. Pass the targets that slice returned"),
    ("mean(torch.ones(2), rows)", 'total has shape (2,). Pass the sum of the losses: reduction="sum"'),
    (
        "attend(heads(2), heads(2, 3))",
        "k and v have shapes (1, 2, 4, 2), (1, 2, 4, 3), (1, 2, 4, 3). Pass (rows, heads",
    ),
    ("attend(heads(3), heads(2))", "3 attention heads are no multiple of 2 heads of keys and values"),
    ("attend(heads(2), rows=world)", "rows is a World. Pass shared_rows of SequenceParallel.slice"),
    # worlds, plans and optimizers
    ("zero.World.solo('gpu')", "device='gpu': torch has no such device"),
    ("run(nn.Sequential(torch.compile(nn.Linear(4, 2), backend='eager')))", "torch.compile of the model or of a part"),
    ("make_plan(room=3)", "room is an int. Pass a Room, or None"),
    ("make_plan(precision=zero.Precision('fp16', scale=3))", "precision.scale is an int. Write zero.LossScaling"),
    ("zero.adamw(0.1, groups=3)", "optim.groups is an int. Pass a list: groups=[zero.Group(...)]"),
    ("zero.adamw(0.1, groups=zero.Group(['*']))", "optim.groups is a Group. Pass a list"),
    ("train_with(zero.Group(['*'], live={'weight_decay': None}))", "live of a Group has weight_decay=None. Write a"),
    ("zero.linear_warmup(0.1, 1, curve='zz')", "schedule.curve=zz: must be one of linear, log"),
    # other formats
    ("open_newest(3)", "path is an int. Pass the folder of a checkpoint"),
    ("open_newest('nowhere')", "nowhere"),
    ("export_checkpoint(3, 'hf', 'out')", "checkpoint is an int. Pass zero.formats.open_newest(folder)[0]"),
    ("export_checkpoint(saved(), 'hf', 3)", "out is an int. Pass the path of a new folder or file"),
    ("export_checkpoint(saved(), 'hf', 'out', dtype='bf16')", "dtype is a str. Pass torch.bfloat16"),
    ("zero.formats.from_bitsandbytes(3)", "model is an int. Pass a torch.nn.Module"),
    # DeepSpeed's names
    ("initialize(model=3)", "model is an int. Pass a torch.nn.Module"),
    ("initialize(config=3)", "ds_config is an int. Pass the path of a JSON file, a dict, or JSON"),
    ("initialize(world=3)", "world is an int. Pass zero.open_world(), or None"),
    ("initialize(optimizer=3)", "optimizer is an int. Pass torch's optimizer, or a function"),
    ("initialize(lr_scheduler=3)", "lr_scheduler is an int. Pass torch's scheduler, or a function"),
    ("initialize(tokens_per_row='x')", "tokens_per_row='x': must be a number of tokens, 1 or more"),
    ("zero.initialize(model=model, config={'train_batch_siz': 8})", "Did you mean train_batch_size?"),
]
"""Code, and a part of the message."""


@pytest.fixture
def names(here):
    """The names that a script has."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    needed = {"optimizer": zero.adamw(lr=1e-3), "world": zero.open_world()}
    plan = zero.Plan(model, **needed)
    store = zero.open_store(plan)
    state = zero.init(plan, store)
    batch, shared = torch.ones(3, 4), zero.sequence.SharedRows(needed["world"])

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()

    def run(model: nn.Module) -> object:
        plan = zero.Plan(model, **needed)
        return zero.make_step(plan, loss_fn)(zero.init(plan, zero.open_store(plan)), [batch])

    def attend(q: torch.Tensor, k: torch.Tensor | None = None, rows: object = shared) -> torch.Tensor:
        k = q if k is None else k
        return zero.sequence.attention(q, k, k, rows)

    def initialize(**changed: object) -> object:
        config = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
        return zero.initialize(**{"model": nn.Linear(4, 8), "config": config, **changed})

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
        "rows": torch.ones(3, 4, dtype=torch.int64),
        "cut": zero.sequence.SequenceParallel(needed["world"]).slice,
        "mean": zero.sequence.SequenceParallel(needed["world"]).loss,
        "heads": lambda count, channels=2: torch.ones(1, count, 4, channels),
        "attend": attend,
        "run": run,
        "open_newest": open_newest,
        "export_checkpoint": export_checkpoint,
        "saved": lambda: zero.open_checkpoint(needed["world"], zero.save(state, here)),
        "initialize": initialize,
        "train_with": lambda group: zero.adamw(0.1, groups=[group]).hyper_at(1, 1.0),
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
