"""Callbacks that run Algorithm 1 in other training frameworks, one module per framework.

- `lightning`: `PruneCallback`, for PyTorch Lightning
- `huggingface`: `TrainerPruneCallback`, for the Trainer of Transformers

Import the module that you need: each requires its framework.
"""
