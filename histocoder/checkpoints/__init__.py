"""What is kept on disk: models, training states and a run's folder; and models on the Hugging Face hub."""
