"""The desk: code descriptions, check codes and train on them in a browser; `histocoder serve`."""
