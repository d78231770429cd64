"""Export a model for other runtimes; the file is compared with PyTorch before it is written."""
