"""Recipes of the field language."""
