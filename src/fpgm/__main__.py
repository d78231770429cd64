"""`python -m fpgm`, for launchers such as torchrun."""

from fpgm.cli import app
from fpgm.utils.allocator import share_memory_among_threads

share_memory_among_threads()
app()
