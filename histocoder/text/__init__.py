"""Descriptions as text: tokenizers, normalisation, characters, languages; knows no codes."""
