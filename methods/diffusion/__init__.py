"""Paths between distributions and how to walk them."""
