"""Recipes of the field generation."""
