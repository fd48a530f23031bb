"""Recipes of the field evaluation."""
