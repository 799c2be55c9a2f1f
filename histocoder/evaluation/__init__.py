"""Scores, baselines, the report, and the choice of rows for a person to check."""
