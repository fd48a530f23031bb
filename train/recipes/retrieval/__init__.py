"""Recipes of the field retrieval."""
