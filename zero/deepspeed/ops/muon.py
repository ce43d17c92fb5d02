"""Muon for matrices and AdamW for other parameters, by the groups of Keller Jordan's class, which DeepSpeed has too."""

from collections.abc import Iterable
from typing import Any

from zero.errors import ConfigError
from zero.user_loop.optimizers import Optimizer


class MuonWithAuxAdam(Optimizer):
    """Muon (Jordan et al. 2024) for groups with `use_muon=True`, AdamW for those with `use_muon=False`.

        matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
        MuonWithAuxAdam([{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}])

    Args:
        param_groups: dicts with `params`, `use_muon`, and settings that replace the defaults: for Muon lr (0.02) and
            momentum (0.95), for AdamW lr (3e-4) and betas (0.9, 0.95), for both weight_decay (0).

    Raises:
        ConfigError: a group lacks `use_muon`.
    """

    def __init__(self, param_groups: Iterable[dict[str, Any]]) -> None:
        groups = [*param_groups]
        for number, group in enumerate(groups):
            if "use_muon" not in group:
                raise ConfigError(f"optimizer group {number} lacks use_muon. Set it to True for matrices, or False.")
        own: dict[bool, dict[str, Any]] = {
            True: {"lr": 0.02, "momentum": 0.95},
            False: {"lr": 3e-4, "betas": (0.9, 0.95)},
        }
        defaults = {"weight_decay": 0.0, "nesterov": True, "eps": 1e-10}
        super().__init__([own[bool(group["use_muon"])] | group for group in groups], defaults, "muon")
