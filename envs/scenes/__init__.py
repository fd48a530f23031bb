"""Analytic scenes: exact pictures, depths and labels of simple bodies, for any camera."""
