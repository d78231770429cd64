"""The cache of the zoo: a long run resumes, and outdated results are recognized.

A record is what one tool did to one model: the model's key, the tool, a status and metrics. Records
are appended to a file, one per line; the latest of a model and a tool counts.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from zoo_models import Case

HERE = Path(__file__).resolve().parent
CACHE = HERE / ".cache" / "zoo.jsonl"
SOURCE = HERE.parent / "src" / "fpgm"

Record = dict[str, Any]


def read_cache(path: Path = CACHE) -> dict[tuple[str, str], Record]:
    """Read the latest record of every (model, tool)."""
    if not path.exists():
        return {}
    lines = (json.loads(line) for line in path.read_text().splitlines() if line.strip())
    return {(record["key"], record["tool"]): record for record in lines}


def append_cache(records: Iterable[Record], path: Path = CACHE) -> None:
    """Append records; the cache folder is excluded from version control."""
    path.parent.mkdir(parents=True, exist_ok=True)
    (path.parent / ".gitignore").write_text("*\n")
    with path.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def is_pending(
    case: Case,
    tools: Sequence[str],
    cache: Mapping[tuple[str, str], Record],
    options: argparse.Namespace,
) -> bool:
    """Tell whether a model has to run; results of older sources count only if accepted."""
    records = [cache.get((case.key, tool)) for tool in tools]
    if any(record is None for record in records):
        return True
    ours = cache.get((case.key, "ours"))
    if ours is None:
        return False
    if options.redo_failed and ours["status"] != "ok":
        return True
    return not options.accept_stale and ours.get("source") != source_digest()


def source_digest() -> str:
    """Hash the sources of the package, to recognize results of another version."""
    digest = hashlib.sha256()
    for path in sorted(SOURCE.rglob("*.py")):
        digest.update(path.relative_to(SOURCE).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]
