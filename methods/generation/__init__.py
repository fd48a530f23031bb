"""Systems of the field generation."""
