"""The desk: code descriptions, check codes and train on them in a browser; `histocoder serve`.

`domain` knows cards, models and files; `web`, which alone knows HTTP, imports from it.
"""
