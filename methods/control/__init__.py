"""Systems of the field control."""
