"""Which batches errors are measured on, and which ones layers are solved with."""

import torch
from torch import nn

import fpgm
from fpgm.recovery.sensitivity.held_out import first_inputs, other_inputs
from fpgm.utils.calibration_data import Inputs
from fpgm.utils.distributed import Ranks
from fpgm.utils.example_inputs import Example


def inputs_of(*sizes: int, ranks: Ranks | None = None) -> Inputs:
    inputs = Inputs() if ranks is None else Inputs(ranks)
    for size in sizes:
        inputs.add(Example((torch.zeros(size, 3),), {}), size)
    return inputs


def sizes_of(inputs: Inputs, count: int) -> tuple[list[int], list[int]]:
    first = [len(example.args[0]) for example in first_inputs(inputs, count)]
    others = [size for _, _, size in other_inputs(inputs, count)]
    return first, others


def test_batches_are_divided_as_a_whole() -> None:
    assert sizes_of(inputs_of(8, 8, 8, 4), 7) == ([8], [8, 8, 4])
    assert sizes_of(inputs_of(8, 8, 8, 4), 8) == ([8], [8, 8, 4])
    assert sizes_of(inputs_of(8, 8, 8, 4), 9) == ([8, 8], [8, 4])


def test_without_held_out_inputs_all_are_solved_with() -> None:
    assert sizes_of(inputs_of(8, 4), 0) == ([], [8, 4])


def test_one_batch_remains_to_solve_with() -> None:
    assert sizes_of(inputs_of(8, 8), 16) == ([8], [8])


def test_a_single_batch_serves_both_purposes() -> None:
    assert sizes_of(inputs_of(8), 2) == ([8], [8])


class Experts(nn.Module):
    """Sends each input to one of two layers, by its sign; sometimes one of them gets none."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 16)
        self.experts = nn.ModuleList(nn.Linear(16, 5) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, positive = self.up(x).relu(), x[:, 0] > 0
        out = h.new_zeros(len(x), 5)
        out[positive] = self.experts[0](h[positive])
        out[~positive] = self.experts[1](h[~positive])
        return out


def test_a_layer_may_get_no_inputs_of_a_batch() -> None:
    torch.manual_seed(0)
    net, x = Experts().eval(), torch.randn(64, 6)
    mixed = [*x.split(16), torch.randn(16, 6).abs()]
    measured = fpgm.sensitivity(net, x[:16], mixed, rates=())
    plan = fpgm.plan(net, x[:16], rate=0.5, allocate=measured)
    small = fpgm.recover(net, plan, mixed)
    assert small.fpgm_recovery.after < small.fpgm_recovery.before


class Clips(nn.Module):
    """Reads the frames of a clip from the batch dimension, eight at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu().view(-1, 8, 16).mean(1))


def test_batches_that_cannot_be_cut_are_not() -> None:
    torch.manual_seed(0)
    net, x = Clips().eval(), torch.randn(40, 6)
    assert fpgm.sensitivity(net, x[:8], x.split(8), rates=()).groups
    assert fpgm.sensitivity(net, x[:8], [x[:8]], rates=()).groups
