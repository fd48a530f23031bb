"""One file a system: what ties a method to its world, data and baselines."""
