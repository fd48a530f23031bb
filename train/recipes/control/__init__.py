"""Recipes of the field control."""
