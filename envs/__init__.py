"""The worlds that methods act in or are judged by (floor 2)."""
