"""What `scripts/gpu` runs: a file for each part, the doors to what computes, who runs them, and the page."""
