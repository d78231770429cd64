"""Write a model for other runtimes, and compare the file with PyTorch before it is left."""
