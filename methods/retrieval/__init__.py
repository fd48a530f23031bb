"""Systems of the field retrieval."""
