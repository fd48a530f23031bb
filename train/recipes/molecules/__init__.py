"""Recipes of the field molecules."""
