"""Methods as pure functions: shared packages (floor 1) and, by field, the systems (floor 3)."""
