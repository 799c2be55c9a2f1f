"""Training of a model: settings, data, the loop, strategies, losses, validation, output and
logs.
"""
