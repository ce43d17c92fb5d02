"""Prediction of a run's memory and time from shapes alone, and values for every setting that is auto."""

from zero.engine.whole import measured as measured
from zero.trainer.planning.choices import choices as choices, plan_of_run as plan_of_run
from zero.trainer.planning.machine import Machine as Machine, PaperWorld as PaperWorld
from zero.trainer.planning.predictor import predictor as predictor
from zero.trainer.planning.resolve_auto import resolve_auto as resolve_auto
from zero.trainer.planning.table import against_measured as against_measured, plan_text as plan_text
from zero.trainer.planning.traces.activations import ActivationTraces as ActivationTraces
from zero.trainer.planning.traces.tracing import trace as trace
