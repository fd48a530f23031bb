"""Systems of the field language."""
