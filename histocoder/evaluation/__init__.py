"""How right a model is: scores, baselines, the report, and which rows a person should check."""
