"""The version of histocoder."""

__version__ = "1.0.0"
