"""Recipes of the field perception."""
