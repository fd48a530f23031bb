"""Systems of the field agents."""
