"""This machine: its devices, threads, files, clocks and memory readings."""
