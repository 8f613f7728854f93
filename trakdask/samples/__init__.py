"""Create lazy Datasets of samples: model inputs as variables, metadata as coords."""
