"""The parts of `scripts/nodes` and `scripts/node_faults`: nodes, their wires, and torchrun on them."""
