"""Systems of the field molecules."""
