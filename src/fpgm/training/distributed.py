"""One process or many: Accelerate finds out, and this makes it find out right."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedDataParallelKwargs
from torch._C._distributed_c10d import PrefixStore, TCPStore

from fpgm.errors import RequestError
from fpgm.utils.distributed import meet
from fpgm.utils.text import reason


def make_accelerator(precision: str) -> Accelerator:
    """Accelerate's view of this process and its neighbours."""
    # Without a GPU, Accelerate joins processes only if told that the CPU is meant.
    cpu = not (torch.cuda.is_available() or torch.backends.mps.is_available())
    if cpu:
        _join_after_restart()
    AcceleratorState._reset_state()  # an earlier run in this process may have had other options
    try:
        accelerator = Accelerator(mixed_precision=precision, cpu=cpu)
    except ValueError as error:
        about = f"run.precision is {precision!r}: " if "precision" in str(error) else ""
        raise RequestError(f"{about}{reason(error)}.") from error
    if accelerator.num_processes > 1:
        meet()
    # `accelerate launch` may hand in another number, by which every loss would be divided.
    accelerator.gradient_accumulation_steps = 1
    return accelerator


def expect_unreached(accelerator: Accelerator) -> None:
    """Processes need not wait for gradients of weights that have none: a head that is not used."""
    accelerator.ddp_handler = DistributedDataParallelKwargs(find_unused_parameters=True)


def part() -> None:
    """Take leave of the other processes, if there are any: the last thing they do together.

    A group that nobody leaves may abort a process whose work is done when the interpreter ends.
    Its threads may outlive it, though: right behind this, a process ends best with `os._exit`.
    """
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def _join_after_restart() -> None:
    """Meet the other processes of this attempt.

    torchrun's store still holds the addresses of the attempt that died, and gloo would try to reach
    those; under a prefix of its own each attempt meets itself.
    """
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if not attempt or dist.is_initialized():
        return
    world = int(os.environ["WORLD_SIZE"])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, world, is_master=False)
    dist.init_process_group(
        "gloo",
        store=PrefixStore(f"attempt {attempt}", store),
        rank=int(os.environ["RANK"]),
        world_size=world,
    )
