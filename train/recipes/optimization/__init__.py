"""Recipes of the field optimization."""
