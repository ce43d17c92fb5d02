"""The plan of a run: the size and tier of everything that each rank will hold, checked before it is allocated.

A `Plan` has no tensors. It consists of `Facts` (the consequences of stage, precision and tiers), a `PageTable` (the
pages of the store) and the placement of these pages on tiers, from `placing`. Printing a plan shows the bytes that
`init` will allocate.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from zero.core import checks
from zero.core.activations import Activations
from zero.core.activations.rows import ALL_ROWS, check_recomputes
from zero.core.offload import Offload
from zero.core.optim import Transform
from zero.core.placement import Room, Tier
from zero.core.precision import Precision
from zero.core.stage import Stage
from zero.distributed.world import World
from zero.engine.model import Backend, Splitting, UnitSpec
from zero.engine.plan.beside import Beside, check_matrices, placements, replicated_names, worlds_beside
from zero.engine.plan.facts import Facts, Scope, facts_of
from zero.engine.plan.held import between_steps, held_bytes, kind_of, table_text, tier_of
from zero.engine.plan.page_table import PageTable
from zero.engine.plan.passes import Passes
from zero.engine.plan.placing import auto_page_bytes, free_room, lowest_tiers, place_pages
from zero.engine.plan.settings import (
    Arrangement,
    Bucket,
    Comparisons,
    Origin,
    Update,
    activations_of,
    check_settings,
    kept_units,
    policies_of,
    refuse_strangers,
    split_for,
)
from zero.engine.plan.sizes import Sizes
from zero.errors import ConfigError, PlanError
from zero.store import Page


class Plan:
    """The settings of a run, and the size and tier of everything that each rank will hold.

    Args:
        model: a model on any device, best built under `zero.empty()`. The plan does not change it; `zero.init` does. A
            model without a trainable parameter, such as a teacher in distillation, can be run but not trained.
        optimizer: from `zero.adamw`, `zero.sgd` and the like.
        world: the ranks, from `zero.open_world()`.
        stage: 0 to 3, or a `zero.Stage`: the parts of the state that are sharded over the ranks.
        precision: "fp32", "bf16" or "fp16", or a `zero.Precision`.
        offload: the tiers of offloaded state: a `zero.Offload`, or the name of one of its presets, such as "nvme"; None
            to offload nothing.
        units: classes, or their names, whose instances are units (gathered and released together). None: each element
            of an outermost `ModuleList` or `Sequential`, see `zero.engine.model.split`.
        bucket: bytes of parameters up to which small units that follow each other in the module tree are merged, which
            sends fewer messages; 0: none. A merged unit is named "blocks.0 to blocks.3". "auto": 4 MiB and at most a
            quarter of the model; 0 with one rank or with `units`.
        prefetch: the number of units that are gathered ahead, in forward and in backward; 0 or more.
        keep: patterns of the names of units, also of merged ones, that stay gathered between forward and backward at
            stage 3, which saves a gather; ["*"] is `reshard_after_forward=False` of FSDP2.
        activations: "keep"; "remat" to recompute each unit's activations in backward; "selective" to recompute all but
            the results of matrix products and of attention without dropout; or "offload" to keep them in host memory.
            "selective" raises in a backward through units that change activations in place, and in a second backward
            through one graph (`retain_graph`): use "remat" for these.
            Or a mapping from patterns of module names to one of these, such as {"blocks.[0-7]": "remat"}: the first
            pattern that matches a unit counts, and a unit without a match keeps its activations. A module that contains
            other units keeps its own instead of recomputing them, so nothing is recomputed twice.
        compile: True, the name of a backend, or a mapping of arguments of `torch.compile` (backend, mode, dynamic,
            fullgraph), to run each unit's forward through it.
        update: "lazy" applies each unit's update just before its next gather, which hides it; "serial" applies all
            updates right after backward. Both give the same bits.
        accumulate: the number of microbatches of a step, 1 or more.
        check_writes: for debugging: compare each unit's parameters before and after every call, and raise
            StaleStateError with the parameter's name if a forward writes into it.
        rows: rows of a chunk in which recomputed units of lists run, forward and backward, 1 or more; 0: all at once.
            See `zero.engine.forward.rows` for the bits and for the errors.
        check_rows: compare the first call of each unit that runs in chunks with one on other rows.
        gather: how parameters are sent between nodes; the bits are the same. "world": each rank receives from every
            other rank. "node": parameters cross nodes once per update, because at stage 3 each node keeps all of them
            in secondary shards, 1 / ranks per node on each rank. These are on the device, or in host memory unless
            `offload.param` is none. "auto" is "node" if secondary shards fit, but keeps none if parameters may be on a
            disk.
        reduce: how gradients are added. "exact": in the order of ranks, in fp32. "node": first within each node and
            then across nodes, which sends fewer bytes between nodes. "native": by the backend, such as NCCL, which
            sends and adds in `precision.reduce` and needs no memory for received gradients. Each way has its own order
            of additions, so the last bits differ. "auto": "node" on several nodes, else "exact".
        shard: "node" keeps a copy of the state on each node, sharded over its ranks, as hybrid sharding does. Gradients
            are then reduced by node. Parameters never cross nodes, sums cross them twice. `gather="node"` with
            `reduce="node"` sends as few bytes between nodes, with one copy of the state.
        norm_groups: process groups of torch, or meshes of one dimension, beside the world's, whose ranks hold different
            parts of the model: tensor parallelism, experts. The gradient norm is over all groups; skipped steps, the
            loss, flags and failures are the same on all ranks. Groups are exchanged one after the other.
        replicated: patterns of the names of parameters that are equal on all ranks of `norm_groups`, and count once in
            the norm. A DTensor's placements tell it for its own mesh. None: none, or in a model with DTensors all.
        room: bytes that this rank may use on each tier; None: the bytes that are free now.
        activation_bytes: bytes to count for activations on the device; they are not allocated.
        host_activation_bytes: bytes to count for activations that units offload to host memory.
        splitting: the result of `split_for` with these settings, if the model has been split already.

    Attributes:
        origin: what this plan shares with the plans that `moved` makes of it, and with no other plan.
        arrangement: the settings that `zero.move` may change.
        facts: the consequences of stage, precision and tiers.
        pages: the pages of the store.
        beside: the norm groups, and what their ranks share.
        activations: the policy of each site, by its name.
        placement: the tier of parameters, of gradients, and of every page of master and moments.
        slots: the memory for pages on their way.

    Raises:
        PlanError: a setting has an unknown value or contradicts another one; or the model cannot be split, or an
            earlier `zero.init` has taken it over.
        DoesNotFit: the state does not fit in the bytes that this rank may use.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: Transform,
        world: World,
        stage: Stage | int = 3,
        precision: Precision | str = "fp32",
        offload: Offload | str | None = None,
        units: Sequence[str | type[nn.Module]] | None = None,
        bucket: Bucket = "auto",
        prefetch: int = 1,
        keep: Sequence[str] = (),
        activations: Activations | Mapping[str, Activations] = "keep",
        compile: Backend = False,
        update: Update = "lazy",
        accumulate: int = 1,
        check_writes: bool = False,
        rows: int = ALL_ROWS,
        check_rows: bool = False,
        gather: str = "auto",
        reduce: str = "auto",
        shard: Scope = "world",
        norm_groups: Sequence[object] = (),
        replicated: Sequence[str] | None = None,
        room: Room | None = None,
        activation_bytes: int = 0,
        host_activation_bytes: int = 0,
        splitting: Splitting | None = None,
    ) -> None:
        refuse_strangers(model, optimizer, world)
        checks.instance("room", room, Room | None, "Pass a Room, or None for the bytes that are free.", PlanError)
        comparisons = Comparisons(check_writes, check_rows)
        check_settings(
            comparisons=comparisons, update=update, gather=gather, reduce=reduce, shard=shard, prefetch=prefetch,
            bucket=0 if bucket == "auto" else bucket, accumulate=accumulate, rows=rows,
            activation_bytes=activation_bytes, host_activation_bytes=host_activation_bytes,
        )  # fmt: skip
        self.model, self.bucket, self.compile, self.comparisons = model, bucket, compile, comparisons
        self.update, self.activation_bytes, self.host_activation_bytes = update, activation_bytes, host_activation_bytes
        precision = precision if isinstance(precision, Precision) else Precision(precision)
        arrangement = Arrangement(
            stage=stage if isinstance(stage, Stage) else Stage(stage),
            offload=offload if isinstance(offload, Offload) else Offload(offload or "none"),
            activations=policies_of(activations, compile),
            keep=checks.patterns("zero.keep", keep, PlanError),
            prefetch=prefetch,
            gather=gather,
            accumulate=accumulate,
            rows=rows,
        )
        groups = worlds_beside(world, norm_groups)
        placed = placements(model, world, groups)
        if compile and placed:
            raise PlanError("zero.compile does not compile modules with DTensors. Set zero.compile=false.")
        check_recomputes(rows, arrangement.activations.values())
        splitting = splitting or split_for(
            model, optimizer, world, precision=precision, units=units, bucket=bucket, shard=shard
        )
        optimizer.check_groups(splitting.shapes())
        check_matrices(splitting, optimizer, placed)
        self.beside = Beside(groups, placed, replicated_names(splitting, placed, groups, replicated))
        self.origin = Origin(splitting, room, partial(
            facts_of, splitting=splitting, world=world, precision=precision, optimizer=optimizer, reduce=reduce,
            shard=shard,
        ))  # fmt: skip
        self._arrange(arrangement, {}, room)

    def moved(self, arrangement: Arrangement, room: Room | None = None) -> "Plan":
        """Return the plan of the same state with other settings, for the memory that is free without this plan's.

        Args:
            room: bytes that this rank may use; None: as `room` of the first plan, or the bytes that are free.
        """
        plan = copy(self)
        if arrangement._replace(activations=self.arrangement.activations) == self.arrangement and room is None:
            plan.arrangement = arrangement
            plan.activations = activations_of(self.facts.splitting, arrangement.activations)
            return plan
        plan._arrange(arrangement, between_steps(self.bytes), room)
        return plan

    def _arrange(self, arrangement: Arrangement, held: Mapping[str, int], room: Room | None) -> None:
        """Set the facts, the pages and their placement.

        Args:
            held: bytes on each tier that an earlier plan holds.
            room: bytes that this rank may use; None: those that are free.
        """
        self.arrangement, splitting = arrangement, self.origin.splitting
        self.offload = arrangement.offload.at(parameters_sharded=arrangement.stage.parameters)
        self.activations = activations_of(splitting, arrangement.activations)
        _, param_tier, grad_tier = lowest_tiers(self.offload)
        facts = self.origin.facts(
            stage=arrangement.stage,
            prefetch=arrangement.prefetch,
            kept_units=kept_units(splitting, arrangement.keep),
            param_tier=param_tier,
            grad_tier=grad_tier,
            gather=arrangement.gather,
            accumulate=arrangement.accumulate,
        )
        self._place(facts, held, room or self.origin.room, may_drop_secondary=arrangement.gather == "auto")

    def _place(self, facts: Facts, held: Mapping[str, int], room: Room | None, *, may_drop_secondary: bool) -> None:
        """Set the size of pages, their table, their placement and the slots, for the room or the memory that is free.

        Args:
            held, room: as in `_arrange`.
        """
        shared = may_drop_secondary and facts.keeps_secondary
        room = free_room(facts, self.offload, held, shared=shared) if room is None else room
        page_bytes = self.offload.page_bytes or auto_page_bytes(facts, self.offload, room)
        self.offload = self.offload.model_copy(update={"page_bytes": page_bytes})
        kept = self.arrangement.offload.model_copy(update={"page_bytes": page_bytes})  # else a move would cut anew
        self.arrangement = self.arrangement._replace(offload=kept)
        place = partial(
            place_pages,
            offload=self.offload,
            room=room,
            buffer_bytes=self.model_buffer_bytes,
            activation_bytes=self.activation_bytes,
            host_activation_bytes=self.host_activation_bytes,
        )
        table = PageTable(facts, page_bytes // 4)
        try:
            self.placement, self.slots = place(table)
        except ConfigError:
            if not shared:
                raise
            table = PageTable(replace(facts, secondary=None), page_bytes // 4)
            self.placement, self.slots = place(table)
        param, grad = self.placement.param, self.placement.grad
        if (param, grad) != (facts.param_tier, facts.grad_tier):
            table = PageTable(replace(table.facts, param_tier=param, grad_tier=grad), page_bytes // 4)
        self.pages = table
        self.slots = self.slots._replace(nbytes=self.pages.slot_bytes)  # faster tiers have fewer pages

    @property
    def facts(self) -> Facts:
        return self.pages.facts

    @property
    def world(self) -> World:
        return self.facts.world

    @property
    def units(self) -> tuple[UnitSpec, ...]:
        return self.facts.units

    @property
    def rank(self) -> int:
        """The index of this rank among the ranks that share its copy of the state."""
        return self.facts.rank

    @property
    def optimizer(self) -> Transform:
        return self.facts.optimizer

    @property
    def precision(self) -> Precision:
        return self.facts.precision

    @property
    def accumulate(self) -> int:
        """The number of microbatches of a step."""
        return self.facts.accumulate

    @property
    def sizes(self) -> Sizes:
        """The sizes of buffers and flats."""
        return self.pages.sizes

    @property
    def passes(self) -> Passes:
        """The passes of an update over its pages."""
        return self.pages.passes

    def tier(self, page: Page) -> Tier:
        """Return the tier of a page."""
        return tier_of(page, self.pages, self.placement)

    def kind(self, page: Page) -> str:
        """Return the kind under which `bytes` counts a page."""
        return kind_of(page, self.pages)

    @property
    def arena_bytes(self) -> int:
        """Bytes of the arena, the host memory through which pages are read and written, with the bounce buffers."""
        return self.slots.arena_bytes

    @property
    def numel(self) -> int:
        """The number of elements of all parameters of the model; a tied parameter counts once."""
        return self.facts.splitting.numel

    @property
    def model_buffer_bytes(self) -> int:
        """Bytes of the model's own buffers."""
        return sum(_nbytes(buffer) for buffer in self.model.buffers())

    @property
    def bytes(self) -> dict[str, dict[str, int]]:
        """Bytes on this rank as a dict from tier to kind to bytes, without temporaries of a few MiB."""
        fixed = {
            "device": {"buffers": self.model_buffer_bytes, "activations": self.activation_bytes},
            "host": {"activations": self.host_activation_bytes},
        }
        return held_bytes(self.pages, self.placement, self.slots, fixed)

    def __str__(self) -> str:
        facts = self.facts
        heading = (
            f"stage {facts.stage.level}, {self.world.size} rank{'s' * (self.world.size > 1)}, "
            f"{str(self.precision.compute).removeprefix('torch.')} compute, "
            f"{f'update {self.update}' if facts.trains else 'nothing to train'}, "
            f"{facts.splitting.count_text()} in {len(self.units)} units"
        )
        return f"{heading}\n{table_text(self.bytes)}"


def _nbytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor; for a sparse tensor those of its values and indices."""
    if tensor.layout is torch.strided:
        return tensor.nbytes
    return tensor._nnz() * (tensor.element_size() + 8 * tensor.ndim)
