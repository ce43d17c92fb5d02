"""One training step: units are gathered, run and released; gradients are reduced; pages are updated."""
