"""The desk's cards, models and files: what a person does, without HTTP. It imports nothing of web."""
