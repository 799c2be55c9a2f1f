"""Fits a model: settings, data, steps, strategies over processes, losses, validation, and what a run says and logs."""
