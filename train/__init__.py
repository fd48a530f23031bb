"""Everything with time and side effects: loop, items, checkpoints, data, reports, recipes (floor 4)."""
