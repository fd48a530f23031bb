"""Manifolds, cameras, rotations, superposition, neighbours."""
