"""Systems of the field evaluation."""
