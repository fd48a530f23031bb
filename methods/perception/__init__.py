"""Systems of the field perception."""
