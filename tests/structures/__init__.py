"""Small networks of every family a user may bring, shared by tests and benchmarks.

Each is a class (or function) registered with `network`: its family, how its inputs are drawn, and
inputs of another size where its code accepts them. `NETWORKS` has them by name.
"""

from importlib import import_module

from .registry import NETWORKS, Network

FILES = (
    "attention",
    "audio",
    "classics",
    "computed_weights",
    "containers",
    "convolutions",
    "detectors",
    "flows",
    "generators",
    "graphs",
    "interleaving",
    "operators",
    "operators_space",
    "outputs",
    "parametrized",
    "quantized",
    "remembered",
    "segmentation",
    "sequences",
    "shuffles",
    "state",
    "train_only",
    "video",
)

for _file in FILES:
    import_module(f".{_file}", __name__)

__all__ = ["NETWORKS", "Network"]
