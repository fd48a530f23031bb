"""Strongly convex sets on Riemannian manifolds and projection-free Frank-Wolfe over them (OpenReview 4sDszSYKP6)."""
