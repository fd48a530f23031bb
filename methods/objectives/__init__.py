"""Losses and targets that several systems share."""
