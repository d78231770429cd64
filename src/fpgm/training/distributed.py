"""Sets up Accelerate for one process or several."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedDataParallelKwargs

from fpgm.errors import RequestError
from fpgm.utils.distributed import mark_initialized, store_after_restart, world_size
from fpgm.utils.text import reason


def make_accelerator(precision: str) -> Accelerator:
    """Create the Accelerator of this process."""
    # Without a GPU, Accelerate connects processes only if told to use the CPU.
    cpu = not (torch.cuda.is_available() or torch.backends.mps.is_available())
    if cpu:
        _join_after_restart()
    AcceleratorState._reset_state()  # an earlier run in this process may have used other options
    try:
        accelerator = Accelerator(mixed_precision=precision, cpu=cpu)
    except ValueError as error:
        prefix = f"run.precision is {precision!r}: " if "precision" in str(error) else ""
        raise RequestError(f"{prefix}{reason(error)}.") from error
    if accelerator.num_processes > 1:
        mark_initialized()
    # `accelerate launch` may set another number, by which every loss would be divided.
    accelerator.gradient_accumulation_steps = 1
    return accelerator


def allow_unused_parameters(accelerator: Accelerator) -> None:
    """Let DistributedDataParallel accept weights without a gradient, as of an unused head."""
    accelerator.ddp_handler = DistributedDataParallelKwargs(find_unused_parameters=True)


def destroy_process_group() -> None:
    """Wait for the other processes, if there are any, and destroy the process group.

    If it is not destroyed, a finished process may abort when the interpreter shuts down. Its
    threads may outlive it even so: call `os._exit` right after this.
    """
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def _join_after_restart() -> None:
    """Initialize the process group of this attempt, if torchrun has restarted the processes."""
    store = None if dist.is_initialized() else store_after_restart()
    if store is not None:
        rank, world = int(os.environ["RANK"]), world_size()
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
