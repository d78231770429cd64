"""Re-estimate batch-norm statistics: average them over the data that a changed model sees."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fpgm.errors import ModelError
from fpgm.utils.calibration_data import Inputs
from fpgm.utils.distributed import Ranks
from fpgm.utils.example_inputs import tensors_in
from fpgm.utils.hooks import temporary_hooks
from fpgm.utils.modules import modules_by_path
from fpgm.utils.text import reason


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
    failure: Exception | None = None
    seen: dict[_BatchNorm, int] = {}
    try:
        seen = _average_statistics_(model, batch_norms.values(), inputs)
    except Exception as error:  # the model's own code may raise anything
        failure = error
    finally:
        for norm, momentum in momenta.items():
            norm.momentum = momentum
        for module, mode in modes.items():
            module.training = mode
    failures = inputs.ranks.gather(None if failure is None else reason(failure))
    if failure is not None:
        raise failure
    if any(failures):
        raise ModelError(next(filter(None, failures)))
    _average_over_ranks_(seen, inputs.ranks)
    return list(batch_norms)


def _average_statistics_(
    model: nn.Module, batch_norms: Collection[_BatchNorm], inputs: Inputs
) -> dict[_BatchNorm, int]:
    """Average over this rank's batches; return how many inputs each average is over."""
    seen, total = dict.fromkeys(batch_norms, 0), 0
    for norm in batch_norms:
        norm.reset_running_stats()
        norm.train()

    def weigh(norm: Any, _: Any) -> None:
        seen[norm] += count
        norm.momentum = count / seen[norm]  # every input has the same weight

    with temporary_hooks() as handles:
        handles += [norm.register_forward_pre_hook(weigh) for norm in batch_norms]
        for example in (inputs[number] for number in range(len(inputs))):
            count = tensors_in((example.args, dict(example.kwargs)))[0].shape[0]
            if count == 1 and inputs.count > inputs.batches:
                continue  # a single input has no variance
            total += count
            for norm in batch_norms:
                norm.momentum = count / total  # of those that run without their own forward
            example.call(model)
    for norm, count in seen.items():
        assert norm.running_mean is not None
        if not count and bool(norm.running_mean.any()):
            seen[norm] = total  # it ran without its own forward
    return seen


def _average_over_ranks_(seen: dict[_BatchNorm, int], ranks: Ranks) -> None:
    """Replace every rank's statistics by their average over all ranks."""
    if ranks.size == 1:
        return
    counts = torch.tensor(list(seen.values()), dtype=torch.float64)
    sums = [
        [statistic.double() * count for statistic in _statistics(norm)]
        for norm, count in seen.items()
    ]
    tracked = [norm.num_batches_tracked for norm in seen if norm.num_batches_tracked is not None]
    ranks.sum_(counts, *tracked, *(value for own in sums for value in own))
    for norm, count, own in zip(seen, counts.tolist(), sums, strict=True):
        for statistic, value in zip(_statistics(norm), own, strict=True):
            if count:
                statistic.copy_(value / count)


def _statistics(norm: _BatchNorm) -> list[Tensor]:
    """Return the running mean and variance."""
    return [b for b in (norm.running_mean, norm.running_var) if b is not None]
