"""Parameters that the optimizer updates per second, measured on the device and in the store's threads on the host."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch

from zero.core.fused import numbers, tables
from zero.core.kept import Kept
from zero.core.layout import Layout
from zero.core.optim import Hyper, Transform
from zero.core.updates import GroupSettings, PageBatch, PageUpdate
from zero.engine.plan import thread_count
from zero.engine.update import Piece, run_kernel
from zero.platform.device import Device
from zero.platform.host_rule import update_on_host
from zero.settings.build import build_optimizer, build_precision
from zero.trainer.config import Config
from zero.trainer.planning.timed import fastest_s

NUMEL = 4 * 2**20
LAYOUT = Layout.of({"probe": (NUMEL,)}, world_size=1)


class _Probed(NamedTuple):
    """An optimizer with the settings of one group, and `NUMEL` parameters with their state and gradients."""

    optimizer: Transform
    kept: Kept
    now: GroupSettings
    whole: Piece

    @classmethod
    def on(cls, config: Config, device: Device) -> "_Probed":
        optimizer, precision = build_optimizer(config), build_precision(config)
        now = optimizer.groups[-1](1)._replace(lr=0.0, weight_decay=0.0)  # the last group has no matrices
        kept = Kept(precision.master, optimizer.forms(optimizer.moments))
        param = torch.zeros(NUMEL, dtype=precision.compute, device=device.device)
        state = [device.zeros(kept.numel(kind, NUMEL), dtype) for kind, dtype in kept.dtypes.items()]
        return cls(optimizer, kept, now, Piece(0, param, state, torch.zeros(NUMEL, device=device.device)))

    def pieces(self, numel: int) -> Iterator[Piece]:
        return (self.whole.cut(start, min(NUMEL, start + numel)) for start in range(0, NUMEL, numel))

    def update(self, piece: Piece, rule: PageUpdate) -> None:
        """Update a piece by operators."""
        places = [LAYOUT.pieces(*piece.range)] * self.kept.draws
        with self.kept.opened([piece.param_K], [piece.kept], places, 1) as (masters, *moments):
            rule(PageBatch(list(masters), [piece.grad_K], tuple(map(list, moments)), self.now, 1.0))


def update_numel(config: Config, device: Device, limit_s: float) -> float:
    """Measure the parameters updated per second, including the norm of their gradient, in pieces as in the engine."""
    probed = _Probed.on(config, device)
    if device.tile_numel and (fused := probed.optimizer.fused) is not None:
        hyper = Hyper(1, 1.0, (probed.now,))
        hyper = hyper._replace(table=device.upload(numbers(fused, hyper)))
        rows = tuple(device.upload(table) for table in tables(LAYOUT, 0, NUMEL, device.tile_numel))
        whole = probed.whole._replace(tables=rows)

        def launch() -> None:
            device.sum_of_squares(whole.grad_K)
            run_kernel(fused, probed.kept, hyper, device, whole)

        return NUMEL / fastest_s([launch], device, limit_s)[0]

    def work(piece: Piece) -> None:
        device.sum_of_squares(piece.grad_K)
        probed.update(piece, probed.optimizer.update)

    works = [partial(work, piece) for piece in probed.pieces(device.piece_numel)]
    return NUMEL / sum(fastest_s(works, device, limit_s))


def host_update_numel(config: Config, device: Device, limit_s: float) -> float:
    """Measure the parameters that the store's threads update per second beside a GPU."""
    probed = _Probed.on(config, device.host)
    rule = probed.optimizer.update
    if device.tile_numel and probed.optimizer.fused is not None:
        rule = partial(update_on_host, probed.optimizer.fused)
    pieces = [*probed.pieces(device.host.piece_numel)]
    with ThreadPoolExecutor(thread_count(config.offload), initializer=device.prepare_thread) as threads:

        def work() -> None:
            for done in [threads.submit(probed.update, piece, rule) for piece in pieces]:
                done.result()

        return NUMEL / fastest_s([work], device.host, limit_s)[0]
