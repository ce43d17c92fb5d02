"""Scripts in the shape of public ones, which change one import: next to plain torch on the whole batch.

A causal language model, a classifier of images, a denoiser with EMA, a classifier of sequences, and a student of a
frozen teacher.
"""

import contextlib
import os
import shutil
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

os.environ.setdefault("HF_HUB_OFFLINE", "1")
accelerate = pytest.importorskip("accelerate")

import zero  # noqa: E402
from zero.errors import CheckpointError, ConfigError  # noqa: E402
from zero.integrations.accelerate import Accelerator  # noqa: E402
from zero.testing import run_processes  # noqa: E402

ROWS, BATCH, ACCUMULATE, CLIP = 48, 4, 3, 0.5


@pytest.fixture(autouse=True)
def _state():
    """Accelerate keeps one state in a process."""
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


class Words(nn.Module):
    def __init__(self, out: int = 19) -> None:
        super().__init__()
        self.embed = nn.Embedding(19, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU()) for _ in range(3))
        self.head = nn.Linear(32, out)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Images(nn.Module):
    def __init__(self, out: int = 10) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 3))
        self.head = nn.Linear(8, out)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))


class Ema:
    """An exponential mean of parameters, kept by the script, as in diffusers' examples."""

    def __init__(self, model) -> None:
        self.shadow = [parameter.detach().clone() for parameter in model.parameters()]

    def step(self, model) -> None:
        for shadow, parameter in zip(self.shadow, model.parameters(), strict=True):
            shadow.mul_(0.9).add_(parameter.detach(), alpha=0.1)


def causal(model, batch, teacher):
    tokens, _ = batch
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def classified(model, batch, teacher):
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


def denoised(model, batch, teacher):
    image, labels = batch
    return F.mse_loss(model(image), F.one_hot(labels, 10).float())


def of_sequence(model, batch, teacher):
    tokens, labels = batch
    return F.cross_entropy(model(tokens).mean(1), labels)


def distilled(model, batch, teacher):
    tokens, _ = batch
    with torch.no_grad():
        wanted = teacher(tokens).softmax(-1)
    return -(wanted * model(tokens).log_softmax(-1)).sum(-1).mean()


SCRIPTS: dict[str, tuple[Any, Any]] = {
    "causal language model": (Words, causal), "images": (Images, classified), "denoiser with EMA": (Images, denoised),
    "sequences": (Words, of_sequence), "teacher": (Words, distilled),
}  # fmt: skip


def data(kind) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    images = kind is Images
    inputs = (
        torch.randn(ROWS, 3, 8, 8, generator=generator)
        if images
        else torch.randint(0, 19, (ROWS, 12), generator=generator)
    )
    return TensorDataset(inputs, torch.randint(0, 10, (ROWS,), generator=generator))


def script(accelerator, kind, loss_of, path=None) -> dict[str, Any]:
    """A script as people write it; only `Accelerator` is another one."""
    torch.manual_seed(0)
    model, teacher = kind(), kind().requires_grad_(False)
    ema = Ema(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    loader = DataLoader(data(kind), BATCH)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    optimizer, loader, model, schedule = accelerator.prepare(optimizer, loader, model, schedule)
    teacher = accelerator.prepare_model(teacher, evaluation_mode=True)
    losses, norms, rates = [], [], []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = loss_of(model, batch, teacher)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
        if accelerator.sync_gradients:
            ema.step(model)
            norms.append(float(norm))
            rates.append(schedule.get_last_lr()[0])
    right = []
    with torch.no_grad():
        for inputs, labels in loader:
            output = model(inputs)
            right.append(accelerator.gather_for_metrics((output.flatten(1).argmax(1), labels))[1])
    if path is not None:
        accelerator.save_state(str(path))
    values = accelerator.get_state_dict(model)
    rows = sum(map(len, right))
    return {"losses": losses, "norms": norms, "rates": rates, "values": values, "ema": ema.shadow, "rows": rows}


def close(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours["rates"] == theirs["rates"]
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-5)
    assert ours["norms"] == pytest.approx(theirs["norms"], rel=1e-5)
    for name, value in theirs["values"].items():
        torch.testing.assert_close(ours["values"][name], value, rtol=1e-5, atol=1e-5)
    for mine, shadow in zip(ours["ema"], theirs["ema"], strict=True):
        torch.testing.assert_close(mine, shadow, rtol=1e-5, atol=1e-5)
    assert ours["rows"] == theirs["rows"] == ROWS


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_that_changes_one_import_trains_the_same(name):
    kind, loss_of = SCRIPTS[name]
    how = {"cpu": True, "gradient_accumulation_steps": ACCUMULATE}
    theirs = script(accelerate.Accelerator(**how), kind, loss_of)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    close(script(Accelerator(**how), kind, loss_of), theirs)


def on_two(world: zero.World, name: str, ours: bool) -> dict[str, Any]:
    kind, loss_of = SCRIPTS[name]
    cls: Any = Accelerator if ours else accelerate.Accelerator
    result = script(cls(cpu=True, gradient_accumulation_steps=ACCUMULATE), kind, loss_of)
    return result | {"rank": world.rank}


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", ["causal language model", "teacher"])
def test_two_processes_train_as_ddp_does(name):
    ours, theirs = (run_processes(2, on_two, name, own)[0] for own in (True, False))
    close(ours, theirs)


# -- loops that say themselves what a microbatch is --------------------------------------------------------------------


def two_losses(accelerator, model, optimizer, batches):
    """Two forwards, then two backwards; and a second backward of one graph."""
    for batch in batches:
        with accelerator.accumulate(model):
            first, second = causal(model, batch, None), of_sequence(model, batch, None)
            accelerator.backward(first, retain_graph=True)
            accelerator.backward(second)
            accelerator.backward(0.5 * first)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()


def no_sync_by_hand(accelerator, model, optimizer, batches):
    """As in Accelerate's guide to accumulation without `accumulate`."""
    for number, batch in enumerate(batches, 1):
        with accelerator.no_sync(model) if number % ACCUMULATE else contextlib.nullcontext():
            accelerator.backward(causal(model, batch, None) / ACCUMULATE)
        if number % ACCUMULATE == 0:
            accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()


def left_out(accelerator, model, optimizer, batches):
    """Some microbatches have no loss."""
    for number, batch in enumerate(batches):
        with accelerator.accumulate(model):
            if number % 4 == 1:
                continue
            accelerator.backward(causal(model, batch, None))
            optimizer.step()
            optimizer.zero_grad()


LOOPS = {"two losses": two_losses, "no_sync": no_sync_by_hand, "left out": left_out}


def looped(cls: Any, name: str) -> dict[str, torch.Tensor]:
    how = {} if name == "no_sync" else {"gradient_accumulation_steps": ACCUMULATE}
    accelerator = cls(cpu=True, **how)
    torch.manual_seed(0)
    model = Words()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data(Words), BATCH))
    LOOPS[name](accelerator, model, optimizer, loader)
    return accelerator.get_state_dict(model)


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_may_say_itself_what_a_microbatch_is(name):
    theirs = looped(accelerate.Accelerator, name)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    ours = looped(Accelerator, name)
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-5, atol=1e-5)


def looped_on_two(world: zero.World, name: str, ours: bool) -> dict[str, torch.Tensor]:
    return looped(Accelerator if ours else accelerate.Accelerator, name)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", ["no_sync", "left out"])
def test_a_loop_on_two_processes_says_itself_what_a_microbatch_is(name):
    ours, theirs = (run_processes(2, looped_on_two, name, own)[0] for own in (True, False))
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-5, atol=1e-5)


# -- two models that train ---------------------------------------------------------------------------------------------


def layers(width: int, out: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, out))


def judged(discriminator, images, real: bool):
    scores = discriminator(images)
    return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, float(real)))


def gan(
    cls: Any, accumulate: int = 1, folder: Any = None, start: int = 0, ranks: int = 0, **how: Any
) -> dict[str, Any]:
    """A script in the shape of DCGAN's: the discriminator's step, then the generator's through the discriminator.

    Args:
        ranks: have the rows of so many ranks; 0: those of this rank.
    """
    accelerator = cls(cpu=True, gradient_accumulation_steps=accumulate, **how)
    torch.manual_seed(0)
    generator, discriminator = layers(4, 6), layers(6, 1)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (generator, discriminator)]
    (for_g, discriminator, generator, for_d) = accelerator.prepare(
        optimizers[0], discriminator, generator, optimizers[1]
    )
    if start:
        accelerator.load_state(str(folder))
    seeds = range(ranks) if ranks else [accelerator.process_index]
    sources, losses = [torch.Generator().manual_seed(seed) for seed in seeds], []
    for step in range(8):
        real, noise = (torch.cat([torch.randn(BATCH, n, generator=each) for each in sources]) for n in (6, 4))
        if step < start:
            continue
        with accelerator.accumulate(generator, discriminator):
            fake = generator(noise)
            on_real, on_fake = judged(discriminator, real, True), judged(discriminator, fake.detach(), False)
            accelerator.backward(on_real)
            accelerator.backward(on_fake)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(discriminator.parameters(), CLIP)
            for_d.step()
            for_d.zero_grad()
            cheated = judged(discriminator, fake, True)
            accelerator.backward(cheated)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(generator.parameters(), CLIP)
            for_g.step()
            for_g.zero_grad()
            for_d.zero_grad()
        losses.append([float(loss.detach()) for loss in (on_real, on_fake, cheated)])
        if folder is not None and step == 3 and not start:
            accelerator.save_state(str(folder))
    values = [accelerator.get_state_dict(model) for model in (generator, discriminator)]
    return {"losses": losses, "values": values}


def again() -> None:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def close_gans(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    torch.testing.assert_close(torch.tensor(ours["losses"]), torch.tensor(theirs["losses"]), rtol=1e-5, atol=1e-5)
    for mine, wanted in zip(ours["values"], theirs["values"], strict=True):
        for name, value in wanted.items():
            torch.testing.assert_close(mine[name], value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("settings", [{"stage": 3, "offload": "cpu"}, {"stage": 0}], ids=str)
def test_a_gan_trains_two_models_in_turns(accumulate, settings):
    theirs = gan(accelerate.Accelerator, accumulate)
    again()
    close_gans(gan(Accelerator, accumulate, zero=settings), theirs)


def test_a_saved_gan_goes_on(tmp_path):
    whole = gan(Accelerator, folder=tmp_path / "state")
    assert {"zero", "zero-1"} <= {path.name for path in (tmp_path / "state").iterdir()}
    again()
    rest = gan(Accelerator, folder=tmp_path / "state", start=4)
    assert rest["losses"] == whole["losses"][4:]


def gan_on_two(world: zero.World) -> dict[str, Any]:
    return gan(Accelerator, 2, zero={"stage": 3})


@pytest.mark.slow
def test_a_gan_on_two_processes_trains_as_on_the_rows_of_both():
    """DDP does not reduce the second of two backwards that follow two forwards, so it is no reference."""
    first, second = run_processes(2, gan_on_two)
    losses = (torch.tensor(first["losses"]) + torch.tensor(second["losses"])) / 2
    close_gans(first | {"losses": losses.tolist()}, gan(accelerate.Accelerator, 2, ranks=2))


def test_fp16_is_scaled_and_a_step_that_overflows_leaves_the_schedule():
    kind, loss_of = SCRIPTS["causal language model"]
    scaling = zero.LossScaling(initial=2.0**40, maximum=2.0**40, hysteresis=1)
    settings = {"precision": zero.Precision("fp16", scale=scaling), "stage": 3}
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", zero=settings)
    torch.manual_seed(0)
    model = kind()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    batch, rates, losses, skipped = data(kind)[:BATCH], [], [], 0
    for _ in range(40):
        loss = loss_of(model, batch, None)
        accelerator.backward(loss)
        accelerator.unscale_gradients()
        norm = accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        skipped += accelerator.optimizer_step_was_skipped
        assert accelerator.optimizer_step_was_skipped == (not norm.isfinite())
        rates.append(schedule.get_last_lr()[0])
        losses.append(float(loss.detach()))
    assert accelerator.engine.plan.precision.compute == torch.float16
    assert 0 < skipped < 40
    assert rates[: skipped + 1] == [1e-2] * skipped + [5e-3]
    assert losses[:skipped] == [losses[0]] * skipped
    assert losses[-1] < losses[0]


def test_a_saved_state_goes_on(tmp_path):
    """The state has moments, schedule and generators. A folder without it raises an error."""
    kind, loss_of = SCRIPTS["causal language model"]

    def steps(accelerator, parts, count):
        model, optimizer, schedule = parts
        losses = []
        for number in range(count):
            loss = loss_of(model, [torch.full((2, 12), number % 19), None], None)
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def made():
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator(cpu=True, zero={"stage": 3, "offload": "cpu"})
        torch.manual_seed(0)
        model = kind()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        return accelerator, accelerator.prepare(model, optimizer, schedule)

    accelerator, parts = made()
    steps(accelerator, parts, 3)
    folder = accelerator.save_state(str(tmp_path / "state"))
    assert not [*(tmp_path / "state").glob("*.safetensors")], "no whole model is written"
    expected = steps(accelerator, parts, 3)
    accelerator.engine.destroy()
    again, parts = made()
    again.load_state(folder)
    assert steps(again, parts, 3) == expected
    with pytest.raises(ConfigError, match="needs the folder"):
        again.load_state()
    shutil.rmtree(tmp_path / "state" / "zero")
    with pytest.raises(CheckpointError, match="holds no training state"):
        again.load_state(folder)


def test_a_model_of_transformers_is_saved_as_scripts_save_it(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=19, n_embd=32, n_layer=2, n_head=2, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    accelerator = Accelerator(cpu=True, zero={"stage": 3})
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    tokens = torch.arange(12).view(1, 12)
    accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
    optimizer.step()
    whole = accelerator.get_state_dict(model)
    accelerator.unwrap_model(model).save_pretrained(
        tmp_path, is_main_process=accelerator.is_main_process, save_function=accelerator.save, state_dict=whole
    )
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits)


def test_what_is_not_supported_is_said_in_one_line():
    with pytest.raises(ConfigError, match=r"zero=\{'stag': \.\.\.\} is not a setting.*stage"):
        Accelerator(cpu=True, zero={"stag": 3})
    accelerator = Accelerator(cpu=True)
    model = Words()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ConfigError, match="before its model"):
        accelerator.prepare(optimizer)
    accelerator.prepare(model)
    accelerator.prepare(optimizer)
    other = accelerator.prepare(Words())
    both = [*model.parameters(), *other.parameters()]
    with pytest.raises(ConfigError, match="over the parameters of 2 models: make an optimizer for each"):
        accelerator.prepare(torch.optim.AdamW(both))
    with pytest.raises(ConfigError, match="over parameters of 2 models that train: call it for each"):
        accelerator.clip_grad_norm_(both, 1.0)
    with pytest.raises(ConfigError, match="gradients are in shards"):
        accelerator.clip_grad_value_(model.parameters(), 1.0)
    again()
    halves = Accelerator(cpu=True, mixed_precision="fp16")
    model, other = halves.prepare(Words(), Words())
    halves.prepare(torch.optim.AdamW(model.parameters()))
    with pytest.raises(ConfigError, match="several models that train in fp16: a loss has one scale"):
        halves.prepare(torch.optim.AdamW(other.parameters()))
