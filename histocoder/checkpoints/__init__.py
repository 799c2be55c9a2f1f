"""Models, training states and run folders on disk, and models on the Hugging Face hub."""
