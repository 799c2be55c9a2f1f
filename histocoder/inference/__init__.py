"""Coding of descriptions: the public `Coder`, whole files, the modes of decoding, and
confidence.
"""
