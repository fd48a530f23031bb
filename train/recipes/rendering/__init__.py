"""Recipes of the field rendering."""
