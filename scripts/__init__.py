"""The command line (floor 5)."""
