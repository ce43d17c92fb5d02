"""Lightning's Trainer with ZeroStrategy: next to the same Trainer without it, with the same module, rows and arguments.

With one microbatch a step, without clipping and with the fused AdamW no bit of a parameter differs, where the size of
each is a multiple of 16: torch's kernel rounds the rest of a vector otherwise, and here parameters lie side by side.
Clipping divides by a number where torch multiplies, microbatches are divided after they are added, and ranks are added
in their order: 1e-6 of a loss.
"""

import contextlib
import errno
import functools
import inspect
import itertools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

lightning = pytest.importorskip("lightning.pytorch")

from lightning.pytorch.callbacks import (  # noqa: E402
    Callback,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger  # noqa: E402
from lightning.pytorch.plugins.io import AsyncCheckpointIO  # noqa: E402
from lightning.pytorch.plugins.precision import MixedPrecision  # noqa: E402

import zero  # noqa: E402
from tests.conftest import LONG_S  # noqa: E402
from tests.faults.crash import Killed, kill  # noqa: E402
from tests.simulation import simulated_gpu  # noqa: E402
from zero.checkpoint import Root  # noqa: E402
from zero.checkpoint.files.claim import Claim  # noqa: E402
from zero.checkpoint.files.disk import Disk  # noqa: E402
from zero.engine.meta import is_meta  # noqa: E402
from zero.errors import CheckpointError, ConfigError  # noqa: E402
from zero.integrations.foreign_loop import PLAN_SETTINGS  # noqa: E402
from zero.integrations.lightning import ZeroStrategy  # noqa: E402
from zero.platform.files import Files  # noqa: E402
from zero.testing import run_processes  # noqa: E402

CLOSE = 1e-6
pytestmark = [
    pytest.mark.filterwarnings("ignore:`isinstance\\(treespec, LeafSpec\\)` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`training_step` returned `None`"),
    pytest.mark.filterwarnings("ignore:The number of training batches .* is smaller than the logging interval"),
]


class Regression(lightning.LightningModule):
    """An ordinary module; layers are called through it, and by themselves."""

    def __init__(self, width=32, dropout=0.1, fused=True, interval="step"):
        super().__init__()
        self.save_hyperparameters()
        parts = nn.Linear(8, width), nn.LayerNorm(width), nn.Dropout(dropout), nn.Linear(width, width), nn.GELU()
        self.body = nn.Sequential(*parts)
        self.head = nn.Linear(width, 1, bias=False)
        self.register_buffer("calls", torch.zeros(()))
        self.losses, self.rates = [], []

    def forward(self, rows):
        return self.head(self.body(rows))

    def training_step(self, batch, number):
        rows, wanted = batch
        loss = nn.functional.mse_loss(self(rows) if number % 2 else self.head(self.body(rows)), wanted)
        self.losses.append(loss.item())
        self.rates.append(self.optimizers().param_groups[0]["lr"])
        self.calls += 1
        self.log("loss", loss)
        return {"loss": loss}

    def validation_step(self, batch, number):
        rows, wanted = batch
        self.log("val_loss", nn.functional.mse_loss(self(rows), wanted), sync_dist=True)

    def test_step(self, batch, number):
        self.validation_step(batch, number)

    def predict_step(self, batch, number):
        return self(batch[0])

    def configure_optimizers(self):
        decays = [parameter for parameter in self.parameters() if parameter.ndim > 1]
        others = [parameter for parameter in self.parameters() if parameter.ndim < 2]
        groups = [{"params": decays, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, fused=self.hparams.fused)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": self.hparams.interval}}


def rows(count=40):
    generator = torch.Generator().manual_seed(1)
    given = torch.randn(count, 8, generator=generator)
    return TensorDataset(given, given.sum(1, keepdim=True).sin())


def batches(shuffle=False):
    return DataLoader(rows(), 4, shuffle=shuffle)


def trainer(folder, settings=None, **changes):
    """With ZeroStrategy where there are `settings`; two epochs of ten batches."""
    strategy = (
        "ddp" if settings is None and "devices" in changes else "auto" if settings is None else ZeroStrategy(**settings)
    )
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    how = {"max_epochs": 2, "enable_checkpointing": False, "accelerator": "cpu", "devices": 1}
    return lightning.Trainer(strategy=strategy, default_root_dir=folder, **(quiet | how | changes))


def fitted(folder, settings=None, make=Regression, ckpt_path=None, shuffle=True, **changes):
    """A Trainer that has trained what `make` makes."""
    lightning.seed_everything(0, verbose=False)
    made = trainer(folder, settings, **changes)
    made.fit(make(), batches(shuffle), batches(), ckpt_path=ckpt_path)
    return made


def without_dropout():
    return Regression(dropout=0.0)


@functools.cache
def plain(make=Regression, **changes):
    """Train with Lightning's own strategy, and return the parameters."""
    with tempfile.TemporaryDirectory() as folder:
        return fitted(folder, None, make, **changes)


def losses(made):
    return made.lightning_module.losses


def logged(made):
    return {name: value.item() for name, value in made.callback_metrics.items()}


def values(made):
    if isinstance(made.strategy, ZeroStrategy):
        return made.strategy.engine.state_dict()
    return made.lightning_module.state_dict()


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


# -- next to the plain Trainer -----------------------------------------------------------------------------------------


def test_one_microbatch_without_clipping_has_every_bit_of_the_plain_trainer(tmp_path):
    """Dropout, the order of the rows, the schedule and logged values included."""
    ours = fitted(tmp_path, {"stage": 3})
    assert len(losses(ours)) == 20
    assert losses(ours) == losses(plain())
    assert ours.lightning_module.rates == plain().lightning_module.rates
    assert logged(ours) == logged(plain())
    assert same(values(ours), values(plain()))


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_accumulation_clipping_schedule_and_decay_groups_are_those_of_the_plain_trainer(interval, tmp_path):
    """Three microbatches a step, and one in the last of an epoch."""

    def make():
        return Regression(fused=False, interval=interval)

    how = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.3}
    expected = plain(make, **how)
    ours = fitted(tmp_path, {"stage": 2}, make, **how)
    assert ours.global_step == expected.global_step == 8
    assert ours.lightning_module.rates == expected.lightning_module.rates
    assert losses(ours) == pytest.approx(losses(expected), rel=CLOSE)
    assert logged(ours) == pytest.approx(logged(expected), rel=CLOSE)
    for name, value in values(expected).items():
        torch.testing.assert_close(values(ours)[name], value, rtol=1e-5, atol=1e-5)


def test_stages_and_tiers_change_no_bit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    how = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.3}
    first = fitted(tmp_path, {"stage": 2}, **how)
    for settings in (
        {"stage": 3, "offload": "nvme"},
        {"stage": 3, "offload": zero.Offload("infinity", page_bytes=4096)},
    ):
        ours = fitted(tmp_path, settings, **how)
        assert losses(ours) == losses(first), settings
        assert same(values(ours), values(first)), settings
        ours.strategy.engine.destroy()


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_bf16_computes_in_bf16_beside_an_fp32_master(precision, tmp_path):
    expected = plain(without_dropout, precision="bf16-mixed")
    ours = fitted(tmp_path, {"stage": 3}, without_dropout, precision=precision)
    assert ours.strategy.engine.plan.precision.compute == torch.bfloat16
    assert ours.lightning_module.head.weight.dtype == torch.bfloat16
    assert {value.dtype for value in values(ours).values()} == {torch.float32}
    assert losses(ours) == pytest.approx(losses(expected), abs=0.02)
    assert losses(ours) != losses(expected)


@pytest.mark.parametrize("power", [10, 24])
def test_fp16_scales_its_losses_and_skips_what_overflows(power, tmp_path):
    scaling = zero.LossScaling(initial=2.0**power, maximum=2.0**power, hysteresis=1)
    settings = {"stage": 3, "precision": zero.Precision("fp16", scale=scaling)}
    plugin = MixedPrecision("16-mixed", "cpu")  # precision="16-mixed" is bf16 on a CPU
    ours = fitted(tmp_path, settings, without_dropout, plugins=[plugin])
    skipped = 20 - ours.strategy.engine.state.step
    assert ours.strategy.engine.loss_scale == 2.0 ** (power - skipped)
    if power == 10:
        assert losses(ours) == pytest.approx(losses(plain(without_dropout)), abs=0.01)
    assert 0 < skipped < 20 or power == 10


def test_callbacks_and_hooks_are_called_as_by_the_plain_trainer(tmp_path):
    class Watch(Callback):
        def __init__(self):
            self.seen = []

        def on_before_backward(self, trainer, module, loss):
            self.seen.append(loss.item())

        def on_before_optimizer_step(self, trainer, module, optimizer):
            self.seen.append(float(module.head.weight.grad.norm()))

        def on_train_batch_end(self, trainer, module, outputs, batch, number):
            self.seen.append(outputs["loss"].item())

    def run(settings):
        watch, stop = Watch(), EarlyStopping("val_loss", patience=0, min_delta=10.0)
        accumulate = GradientAccumulationScheduler({0: 1, 1: 4})
        rates, logger = LearningRateMonitor(), CSVLogger(tmp_path)
        how = {"callbacks": [watch, stop, accumulate, rates], "logger": logger, "max_epochs": 5, "log_every_n_steps": 1}
        made = fitted(tmp_path, settings, val_check_interval=0.5, **how)
        written = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
        return watch.seen, made.global_step, [line.split(",")[:2] for line in written]

    ours, expected = run({"stage": 1}), run(None)
    assert ours[0] == pytest.approx(expected[0], rel=1e-5)
    assert ours[1:] == expected[1:]


def test_a_warm_up_in_the_modules_own_optimizer_step_is_kept(tmp_path):
    class Warm(Regression):
        def optimizer_step(self, epoch, number, optimizer, optimizer_closure=None):
            optimizer.step(closure=optimizer_closure)
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * (self.trainer.global_step + 1)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)

    ours = fitted(tmp_path, {"stage": 3}, Warm)
    assert losses(ours) == losses(plain(Warm))
    assert ours.lightning_module.rates == plain(Warm).lightning_module.rates


def test_a_step_whose_gradient_is_not_finite_changes_nothing_and_is_counted(tmp_path):
    class Once(Regression):
        def training_step(self, batch, number):
            result = super().training_step(batch, number)
            return {"loss": result["loss"] * float("nan")} if len(self.losses) == 20 else result

    def make():
        return Once(dropout=0.0)

    ours, shorter = fitted(tmp_path, {"stage": 3}, make), fitted(tmp_path, {"stage": 3}, make, max_steps=19)
    assert (ours.global_step, ours.strategy.engine.skipped_steps) == (20, 1)
    assert all(torch.equal(value, values(shorter)[name]) for name, value in values(ours).items() if name != "calls")


class NoneAtTheEnd(Regression):
    """Of each window of three, the last microbatch has no loss: the gradients of the others are used."""

    def training_step(self, batch, number):
        result = super().training_step(batch, number)
        return None if number % 3 == 2 else result


class EverySecond(Regression):
    """Steps with every second batch; Lightning drops the gradients of the others."""

    def optimizer_step(self, epoch, number, optimizer, closure):
        optimizer.step(closure=closure) if number % 2 else closure()


class Guarded(Regression):
    """Drops gradients that somebody does not like: what is left of them is used, and without any nothing is updated."""

    def on_after_backward(self):
        if len(self.losses) % 5 == 3:
            self.zero_grad()
        elif len(self.losses) % 5 == 4:
            self.optimizers().zero_grad()


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step\\(\\)` before")  # the plain Trainer's, too
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("model", [NoneAtTheEnd, EverySecond, Guarded])
def test_gradients_are_kept_and_dropped_where_the_plain_trainer_keeps_and_drops_them(model, count, tmp_path):
    def make():
        return model(dropout=0.0, fused=False)

    expected = plain(make, accumulate_grad_batches=count)
    ours = fitted(tmp_path, {"stage": 3}, make, accumulate_grad_batches=count)
    assert losses(ours) == pytest.approx(losses(expected), rel=1e-5)
    assert logged(ours) == pytest.approx(logged(expected), rel=1e-5)


def test_testing_and_predicting_without_fit_have_no_optimizer(tmp_path):
    results = []
    for settings in (None, {"stage": 3}):
        lightning.seed_everything(0, verbose=False)
        made, model = trainer(tmp_path, settings), Regression()
        metrics = made.test(model, batches(), verbose=False)
        results.append((metrics, torch.cat(made.predict(model, batches()))))
        fitted_too = fitted(tmp_path, settings)
        metrics = fitted_too.test(verbose=False, dataloaders=batches(), model=fitted_too.lightning_module)
        results[-1] += (metrics, torch.cat(fitted_too.predict(fitted_too.lightning_module, batches())))
    assert not made.strategy.engine.plan.facts.trains
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])
    assert results[0][2] == results[1][2]
    assert torch.equal(results[0][3], results[1][3])


def test_a_model_made_without_memory_gets_its_values_from_weights(tmp_path):
    class Lazily(Regression):
        def configure_model(self):
            if "body" not in self._modules:
                with zero.empty():
                    made = Regression()
                self.body, self.head = made.body, made.head

        def __init__(self):
            super().__init__()
            del self.body, self.head

    lightning.seed_everything(0, verbose=False)
    weights = {name: weight.detach() for name, weight in Regression().named_parameters()}
    ours = fitted(tmp_path, {"stage": 3, "weights": weights}, Lazily)
    assert losses(ours) == losses(plain())
    with trainer(tmp_path, {"stage": 3}).init_module(empty_init=True):
        assert all(is_meta(parameter) for parameter in Regression().parameters())


# -- out of memory -----------------------------------------------------------------------------------------------------


class Short(Regression):
    """Out of memory in a batch until the optimizer's state is in host memory."""

    short_in = -1

    def training_step(self, batch, number):
        result = super().training_step(batch, number)
        if number == self.short_in and self.trainer.strategy.engine.plan.offload.optimizer == "none":
            self.losses.pop()
            raise torch.OutOfMemoryError("CUDA out of memory")
        return result


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("short_in", [0, 3])
def test_a_step_out_of_memory_is_made_again_lower(tmp_path, short_in):
    """Random numbers and buffers included; with several microbatches a step there is only advice."""
    short = functools.partial(type("Short", (Short,), {"short_in": short_in}))
    with simulated_gpu(limited=True, fused=True):
        expected, made = (fitted(tmp_path, {"stage": 3}, make) for make in (Short, short))
        assert losses(made) == losses(expected)
        assert same(values(made), values(expected))
        assert made.strategy.engine.plan.offload.optimizer != "none"
        with pytest.raises(torch.OutOfMemoryError) as raised:
            fitted(tmp_path, {"stage": 3}, short, accumulate_grad_batches=2)
    assert bool(getattr(raised.value, "__notes__", ())) == short_in % 2, "advice where the step ends"


# -- checkpoints -------------------------------------------------------------------------------------------------------


def saving(folder, **changes):
    return {"callbacks": [ModelCheckpoint(folder, **({"save_top_k": -1} | changes))], "enable_checkpointing": True}


def test_a_resumed_run_ends_as_one_that_never_stopped(tmp_path, monkeypatch):
    """Bit by bit, though it goes on at another stage."""
    monkeypatch.chdir(tmp_path)
    how = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3, "max_epochs": 3}

    def run(name, settings, ckpt_path=None, **changes):
        more = saving(tmp_path / name, filename="{step}")  # Lightning keeps no state of a generator
        return fitted(tmp_path, settings, without_dropout, ckpt_path, shuffle=False, **(how | more | changes))

    whole = run("whole", {"stage": 3, "offload": "nvme"})
    run("run", {"stage": 3, "offload": "nvme"}, max_epochs=2)
    checkpoints = sorted((tmp_path / "run").iterdir(), key=lambda path: int(path.stem.split("=")[1]))
    assert {entry.name for entry in checkpoints[0].iterdir()} == {"zero", "lightning.ckpt"}
    resumed = run("run", {"stage": 1}, checkpoints[0])
    assert resumed.global_step == whole.global_step == 15
    count = len(losses(resumed))
    assert 0 < count < 30
    assert losses(resumed) == losses(whole)[-count:]
    assert resumed.lightning_module.rates == whole.lightning_module.rates[-count:]
    assert logged(resumed) == logged(whole)
    assert same(values(resumed), values(whole))


def test_the_best_checkpoint_is_tested_and_the_worse_ones_are_removed(tmp_path):
    how = saving(tmp_path / "kept", monitor="val_loss", save_top_k=1, save_last=True, filename="{epoch}")
    ours = fitted(tmp_path, {"stage": 3}, max_epochs=3, **how)
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {"epoch=2.ckpt", "last.ckpt"}
    (metrics,) = ours.test(ckpt_path="best", dataloaders=batches(), verbose=False)
    assert metrics["val_loss"] == ours.checkpoint_callback.best_model_score
    again = trainer(tmp_path, {"stage": 0}, **how)
    (loaded,) = again.test(Regression(), batches(), ckpt_path=tmp_path / "kept/last.ckpt", verbose=False)
    assert loaded["val_loss"] == pytest.approx(metrics["val_loss"], rel=CLOSE)


def test_a_checkpoint_is_replaced_by_one_of_fewer_steps_once_that_is_whole(tmp_path, monkeypatch):
    path = tmp_path / "last.ckpt"
    fitted(tmp_path, {"stage": 3}).save_checkpoint(path)
    ours = fitted(tmp_path, {"stage": 3}, max_epochs=1)
    with monkeypatch.context() as broken:
        broken.setattr("torch.save", lambda *_: (_ for _ in ()).throw(OSError("the disk is full")))
        with pytest.raises(OSError, match="the disk is full"):
            ours.save_checkpoint(path)
    assert fitted(tmp_path, {"stage": 3}, ckpt_path=path, max_epochs=3).global_step == 30
    ours.save_checkpoint(path)
    assert fitted(tmp_path, {"stage": 3}, ckpt_path=path, max_epochs=3).strategy.engine.state.step == 30
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.ckpt"]


@pytest.mark.parametrize("at", ["loop", "state", "removal"])
def test_a_save_that_is_killed_leaves_the_checkpoint_of_before_or_its_own(at, tmp_path, monkeypatch):
    """With the part that Lightning writes and the training state of the same step."""
    path = tmp_path / "last.ckpt"
    fitted(tmp_path, {"stage": 3}, max_epochs=2).save_checkpoint(path)
    ours = fitted(tmp_path, {"stage": 3}, max_epochs=1)
    places = {"loop": (Root, "begin"), "state": (Root, "publish"), "removal": (Path, "unlink")}
    with monkeypatch.context() as broken:
        broken.setattr(*places[at], lambda *_, **__: kill(at))
        with pytest.raises(Killed):
            ours.save_checkpoint(path)
    again = fitted(tmp_path, {"stage": 3}, ckpt_path=path, max_epochs=1 if at == "removal" else 2)
    assert again.global_step == again.strategy.engine.state.step == (10 if at == "removal" else 20)
    ours.save_checkpoint(path)
    assert len([*path.iterdir()]) == len(["zero", "the file of Lightning's part"])


def kill_beside_a_change(monkeypatch, number):
    """Kill before or after one of the calls that change names; `number` counts from 0."""
    count = itertools.count()

    def killing(call):
        def called(*arguments, **keywords):
            kill(call) if next(count) == number else None
            call(*arguments, **keywords)
            kill(call) if next(count) == number else None

        return called

    for name in ("rename", "replace", "unlink"):
        monkeypatch.setattr(os, name, killing(getattr(os, name)))
    monkeypatch.setattr(Files, "exchange", killing(Files.exchange))


@pytest.mark.parametrize("is_link", [True, False])
def test_a_save_that_is_killed_loses_no_file_or_link_that_it_replaces(is_link, tmp_path, monkeypatch):
    ours, weights = fitted(tmp_path, {"stage": 3}, max_epochs=1), tmp_path / "weights"
    for number in range(50):
        path = tmp_path / str(number) / "last.ckpt"
        path.parent.mkdir()
        weights.write_text("weights")
        path.symlink_to(weights) if is_link else weights.rename(path)
        with monkeypatch.context() as broken, contextlib.suppress(Killed):
            kill_beside_a_change(broken, number)
            ours.save_checkpoint(path)
            break
        if not path.is_dir():
            assert path.read_text() == "weights"
        assert path.is_symlink() == (is_link and not path.is_dir())
        ours.save_checkpoint(path)
        assert fitted(tmp_path, {"stage": 3}, ckpt_path=path, max_epochs=1).global_step == 10
        assert os.listdir(path.parent) == ["last.ckpt"], "an unfinished folder or an old file is left"
    assert 4 < number < 49
    assert os.listdir(path.parent) == ["last.ckpt"]


def test_a_file_is_replaced_where_names_cannot_be_exchanged(tmp_path, monkeypatch):
    ours, path = fitted(tmp_path, {"stage": 3}, max_epochs=1), tmp_path / "last.ckpt"
    path.touch()
    monkeypatch.setattr(Files, "exchange", lambda *_: (_ for _ in ()).throw(OSError(errno.EINVAL, "as NFS")))
    ours.save_checkpoint(path)
    assert fitted(tmp_path, {"stage": 3}, ckpt_path=path, max_epochs=1).global_step == 10
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_the_file_that_a_training_state_names_is_durable_before_the_state(tmp_path, monkeypatch):
    path, calls = tmp_path / "last.ckpt", []
    fitted(tmp_path, {"stage": 3}, max_epochs=2).save_checkpoint(path)
    ours, sync_folder, publish = fitted(tmp_path, {"stage": 3}, max_epochs=1), Files.fsync_folder, Root.publish
    monkeypatch.setattr(Files, "fsync_folder", lambda *call: (calls.append(call[1]), sync_folder(*call)))
    monkeypatch.setattr(Root, "publish", lambda *call: (calls.append("publish"), publish(*call))[1])
    ours.save_checkpoint(path)
    assert path in calls[: calls.index("publish")]


def test_a_folder_that_is_no_checkpoint_is_not_replaced(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "thesis.tex").touch()
    ours = fitted(tmp_path, {"stage": 3}, max_epochs=1)
    with pytest.raises(CheckpointError, match="models: is a folder, but no checkpoint"):
        ours.save_checkpoint(tmp_path / "models")
    (tmp_path / "link").symlink_to("models")
    ours.save_checkpoint(tmp_path / "link")
    assert not (tmp_path / "link").is_symlink()
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["thesis.tex"]


def test_a_checkpoint_of_weights_is_a_file_that_lightning_loads_and_is_written_anywhere(tmp_path, monkeypatch):
    """A training state is written to a disk."""
    monkeypatch.chdir(tmp_path)
    ours = fitted(tmp_path, {"stage": 3})
    with pytest.raises(CheckpointError, match=r"memory://kept/a.ckpt: the training state needs a folder on a disk"):
        ours.save_checkpoint("memory://kept/a.ckpt")
    wanted = ours.test(ours.lightning_module, batches(), verbose=False)
    for place in ("memory://kept/weights.ckpt", tmp_path / "weights.ckpt"):
        ours.save_checkpoint(place, weights_only=True)
        again = trainer(tmp_path, {"stage": 3})
        assert again.test(Regression(), batches(), ckpt_path=place, verbose=False) == wanted
    loaded = Regression.load_from_checkpoint(tmp_path / "weights.ckpt")
    assert same(loaded.state_dict(), values(ours))
    assert loaded.hparams == ours.lightning_module.hparams
    assert trainer(tmp_path).test(loaded, batches(), verbose=False) == wanted
    assert [path.name for path in tmp_path.iterdir()] == ["weights.ckpt"]


def test_a_checkpoint_of_another_strategy_is_tested_and_not_trained_on(tmp_path):
    plain = fitted(tmp_path)
    plain.save_checkpoint(tmp_path / "plain.ckpt")
    wanted = plain.test(plain.lightning_module, batches(), verbose=False)
    again = trainer(tmp_path, {"stage": 3})
    assert again.test(Regression(), batches(), ckpt_path=tmp_path / "plain.ckpt", verbose=False) == wanted
    with pytest.raises(CheckpointError, match=r"another strategy wrote.*load_from_checkpoint"):
        fitted(tmp_path, {"stage": 3}, ckpt_path=tmp_path / "plain.ckpt", max_epochs=3)
    (tmp_path / "empty.ckpt").mkdir()
    with pytest.raises(CheckpointError, match="so ZeroStrategy did not write it"):
        fitted(tmp_path, {"stage": 3}, ckpt_path=tmp_path / "empty.ckpt")


# -- what is refused ---------------------------------------------------------------------------------------------------


class Manual(Regression):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class LBFGS(Regression):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


class ByEpoch(Regression):
    def __init__(self):
        super().__init__(interval="epoch")


class Backward(Regression):
    def backward(self, loss):
        loss.backward()


class Clipping(Regression):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, 0.25, "norm")


class ClippingLater(Regression):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        if self.trainer.global_step > 3:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)


class Keeping(Regression):
    def optimizer_zero_grad(self, epoch, number, optimizer):
        pass


CLIPPED = {"gradient_clip_val": 0.3}
AVERAGED = {"callbacks": [StochasticWeightAveraging(1e-3)]}
REFUSED = [
    (
        Regression,
        {"precision": "64-true"},
        r"precision='64-true'\), DoublePrecision, .* Choose from 32-true, bf16-mixed",
    ),
    (Regression, {"precision": "16-true"}, r"precision='16-true'\), HalfPrecision, .*16-mixed\.$"),
    (Regression, {"sync_batchnorm": True}, r"sync_batchnorm=True\): .*Leave it out"),
    (ByEpoch, AVERAGED, r"StochasticWeightAveraging.*Leave the callback out"),
    (Regression, CLIPPED | {"gradient_clip_algorithm": "value"}, "only clipping by norm is supported. Leave it out"),
    (Manual, {}, "automatic_optimization=False is not supported. Return the loss from training_step"),
    (LBFGS, {}, "optimizer=LBFGS is not supported. Use torch.optim.Adagrad,"),
    (Backward, {}, "LightningModule.backward is overridden. Leave it out"),
    (Clipping, {}, r"clip_gradients\(0.25, 'norm'\): .*Write Trainer\(gradient_clip_val=0.25\)"),
    (ClippingLater, CLIPPED, r"did not call clip_gradients: each step clips by the norm 0.3"),
    (Keeping, {}, r"optimizer_zero_grad is overridden and did not call optimizer.zero_grad\(\)"),
    (Regression, {"plugins": [AsyncCheckpointIO()]}, "AsyncCheckpointIO would write only weights"),
    (lambda: torch.compile(Regression()), {}, r"Leave out torch.compile, .*ZeroStrategy\(compile=True\)"),
]


@pytest.mark.parametrize(("model", "changes", "line"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_kept_is_refused_in_one_line(model, changes, line, tmp_path):
    with pytest.raises(ConfigError, match=line) as caught:
        fitted(tmp_path, {}, model, **changes)
    assert "\n" not in str(caught.value)


def test_two_precisions_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"'fp16'.*Leave out one of them"):
        fitted(tmp_path, {"precision": "fp16"}, precision="bf16-mixed")


def test_a_model_has_one_engine(tmp_path):
    ours = fitted(tmp_path, {"stage": 3})
    with pytest.raises(ConfigError, match=r"can fit a model once.*fit\(ckpt_path=...\)"):
        ours.fit(ours.lightning_module, batches(), batches())
    with pytest.raises(ConfigError, match="the model belongs to another Trainer"):
        trainer(tmp_path, {"stage": 3}).test(ours.lightning_module, batches(), verbose=False)


# -- two processes -----------------------------------------------------------------------------------------------------


def on_two_ranks(world, folder):
    """Losses and metrics of DDP and of ours; of ours resumed; predictions, and what was saved."""
    os.chdir(folder)
    how = {"devices": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.3, "max_epochs": 2}

    def run(settings, name, ckpt_path=None):
        more = saving(folder / name, filename="{epoch}")
        return fitted(folder, settings, without_dropout, ckpt_path, **(how | more))

    trainers = {"ddp": run(None, "ddp"), "infinity": run({"stage": 3, "offload": "infinity"}, "infinity")}
    trainers["resumed"] = run({"stage": 2}, "infinity", folder / "infinity/epoch=0.ckpt")
    trainers["infinity"].save_checkpoint(folder / "weights.ckpt", weights_only=True)
    metrics = {name: logged(made) for name, made in trainers.items()}
    kept = values(trainers["infinity"])
    predicted = trainers["infinity"].predict(trainers["infinity"].lightning_module, batches())
    return {name: losses(made) for name, made in trainers.items()}, metrics, kept, torch.cat(predicted)


@pytest.mark.process
def test_two_processes_learn_what_ddp_learns_in_two(tmp_path):
    (losses_0, metrics, kept, first), (losses_1, _, also, second) = run_processes(2, on_two_ranks, tmp_path)
    for rank_losses in (losses_0, losses_1):
        assert len(rank_losses["ddp"]) == 10
        assert rank_losses["infinity"] == pytest.approx(rank_losses["ddp"], rel=CLOSE)
        assert rank_losses["resumed"] == pytest.approx(rank_losses["infinity"][5:], rel=CLOSE)
    assert losses_0["infinity"] != losses_1["infinity"], "each rank has rows of its own"
    assert metrics["infinity"] == pytest.approx(metrics["ddp"], rel=CLOSE)
    loaded = Regression.load_from_checkpoint(tmp_path / "weights.ckpt")
    assert same(dict(loaded.named_parameters()), {name: kept[name] for name, _ in loaded.named_parameters()})
    assert same(kept, also)
    with torch.no_grad():
        wanted = loaded.eval()(rows()[:][0])
    torch.testing.assert_close(torch.stack([first, second], 1).flatten(0, 1), wanted, rtol=1e-5, atol=1e-6)


# LightningCLI reads signatures


def test_every_setting_of_the_engine_is_a_named_argument():
    of_plan, of_strategy = (inspect.signature(made).parameters for made in (zero.Plan, ZeroStrategy))
    settings = set(PLAN_SETTINGS) - {"precision", "weights"}
    assert settings | {"precision", "weights", "timeout"} == set(of_strategy)
    assert {name: of_strategy[name].default for name in settings} == {name: of_plan[name].default for name in settings}


@pytest.mark.usefixtures("here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_lightning_cli_makes_the_strategy():
    pytest.importorskip("jsonargparse")
    from lightning.pytorch.cli import LightningCLI
    from lightning.pytorch.demos.boring_classes import BoringModel

    quiet = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False, "fast_dev_run": 1}
    words = ["fit", "--trainer.strategy", "ZeroStrategy", "--trainer.strategy.stage", "2"]
    how = {"trainer_defaults": quiet, "save_config_callback": None, "seed_everything_default": 0}
    made = LightningCLI(BoringModel, args=words, **how)
    assert made.trainer.strategy.engine.plan.facts.stage == zero.Stage(2)


KILLED = """
import os, sys
from unittest import mock
from tests.integrations.test_lightning import fitted
from zero.checkpoint import Root
from zero.integrations import lightning_folder

path, at = sys.argv[1:]
made = fitted(os.path.dirname(path), {"stage": 3}, max_epochs=1)
place = (Root, "publish") if at == "state" else (lightning_folder, "give_name")
with mock.patch.object(*place, lambda *_: os._exit(7)):
    made.save_checkpoint(path)
"""


@pytest.mark.parametrize("at", ["state", "name"])
def test_a_save_removes_what_a_killed_one_of_another_name_left_and_nothing_else(at, tmp_path):
    line = [sys.executable, "-c", KILLED, tmp_path / "epoch=0.ckpt", at]
    assert subprocess.run(line, timeout=LONG_S, check=False).returncode == 7
    (left,) = tmp_path.iterdir()
    assert left.suffix == ".part"
    others = [tmp_path / "thesis.part", tmp_path / f"epoch=0.ckpt.{'0' * 16}.part"]
    for other in others:
        other.mkdir()
    ours = fitted(tmp_path, {"stage": 3}, max_epochs=1)
    under_way = Claim(tmp_path, Disk())
    ours.save_checkpoint(tmp_path / "epoch=1.ckpt")
    assert left.is_dir()  # for all that is known it is of the save that holds the claim
    under_way.release()
    ours.save_checkpoint(tmp_path / "epoch=2.ckpt")
    assert {path.name for path in tmp_path.iterdir()} == {
        "epoch=1.ckpt",
        "epoch=2.ckpt",
        *(other.name for other in others),
    }
