"""The parts of `scripts/nodes` and `benchmarks/node_faults.py`: nodes, their wires, and torchrun on them."""
