"""Export a model for other runtimes; the file is compared with PyTorch before it is written.

- `api`: `export` to ONNX, pt2 or TorchScript
- `onnx`: conversion with PyTorch's exporter, and ONNX Runtime sessions
- `int8`, `low_rank`: smaller exported models: quantization, factorized layers
- `bn_folding`, `scatter_folding`: batch norms and scatters folded into the layers before them
- `comparison`: output error and speedup between two ONNX models
- `comparison_inputs`: the inputs on which the file is compared with PyTorch
- `output_error`: relative difference between two outputs
"""

from fpgm.exporters.api import Exported, export
from fpgm.exporters.bn_folding import fold_batch_norms, simplify

__all__ = ["Exported", "export", "fold_batch_norms", "simplify"]
