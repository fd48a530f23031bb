"""Real data: where it lies, what it is, and one reader a format."""
