"""Systems of the field rendering."""
