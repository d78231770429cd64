"""Re-estimate batch-norm statistics: average them over the data that a changed model sees."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fpgm.utils.calibration_data import Inputs
from fpgm.utils.example_inputs import tensors_in
from fpgm.utils.modules import modules_by_path


@torch.no_grad()
def reestimate_batch_norms_(model: nn.Module, inputs: Inputs) -> list[str]:
    """Replace running statistics by the mean over all inputs; return the batch norms' names."""
    batch_norms = {
        path: module
        for path, module in modules_by_path(model).items()
        if isinstance(module, _BatchNorm) and module.running_mean is not None
    }
    if not batch_norms:
        return []
    modes = {module: module.training for module in model.modules()}
    momenta = {norm: norm.momentum for norm in batch_norms.values()}
    model.eval()
    try:
        for norm in batch_norms.values():
            norm.reset_running_stats()
            norm.train()
        total = 0
        for example in (inputs[number] for number in range(len(inputs))):
            count = tensors_in((example.args, dict(example.kwargs)))[0].shape[0]
            if count == 1 and inputs.count > len(inputs):
                continue  # a single input has no variance
            total += count
            for norm in batch_norms.values():
                norm.momentum = count / total  # every input has the same weight
            example.call(model)
    finally:
        for norm, momentum in momenta.items():
            norm.momentum = momentum
        for module, mode in modes.items():
            module.training = mode
    return list(batch_norms)
