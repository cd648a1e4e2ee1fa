"""What a demonstration needs without a GPU or a model: a tiny model, and a real server for it."""
