"""Clipped SGD whose last iterate converges with high probability under heavy-tailed noise (OpenReview 4sGEvpwyxN)."""
