"""Recipes of the field agents."""
