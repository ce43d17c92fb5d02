"""Arithmetic: what a stage, a layout, a dtype and an optimizer mean. No ranks, no files, no clock."""
