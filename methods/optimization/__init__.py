"""Systems of the field optimization."""
