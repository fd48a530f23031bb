"""Scores, detections, rankings, intervals."""
