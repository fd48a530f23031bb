"""Pretrained weights: opening the files they are published in."""
