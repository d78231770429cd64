"""Run the demo, and record what it cost and gained.

    python benchmarks/demo.py

The README quotes these figures. Run it on an idle machine.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fpgm.utils.tables import markdown_table

HERE = Path(__file__).resolve()
RUNTIMES = {"eager": "PyTorch", "onnxruntime": "ONNX Runtime"}


def record(folder: Path, seconds: float) -> dict[str, Any]:
    """Collect the figures of a demo that wrote this folder."""
    results, bench = (
        json.loads((folder / name).read_text(encoding="utf-8"))
        for name in ("results.json", "bench.json")
    )
    return {
        "seconds": round(seconds, 1),
        "macs_removed": results["achieved"]["macs_removed"],
        "params_removed": results["achieved"]["params_removed"],
        "calibration_images": results["asked"]["images"],
        "recovered_by": results["recovery"]["kept"],
        "test_images": results["test_images"],
        "accuracy": results["accuracy"],
        "speedup": {
            RUNTIMES[row["backend"]]: round(row["figures"][1]["faster"], 3) for row in bench["rows"]
        },
        "batch": bench["rows"][0]["batch"],
        "threads": bench["rows"][0]["threads"],
        "busy": [row["crowd"] for row in bench["rows"] if row["crowd"]],
        "versions": results["versions"],
    }


def write(figures: dict[str, Any]) -> None:
    """Write the JSON file and the page."""
    HERE.with_suffix(".json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    before, after = (figures["accuracy"][name] for name in ("original", "recovered"))
    rows = [
        ("seconds, from the first command to the report", f"{figures['seconds']:.0f}"),
        ("MACs removed", f"{figures['macs_removed']:.1%}"),
        ("parameters removed", f"{figures['params_removed']:.1%}"),
        (f"accuracy on {figures['test_images']:,} test images", f"{before:.2%} → {after:.2%}"),
        *((f"times as fast in {name}", f"{x:.2f}") for name, x in figures["speedup"].items()),
    ]
    lines = [
        "# The demo",
        "",
        (
            "resnet11_wide, pruned and recovered on "
            f"{figures['calibration_images']:,} images without labels. "
            f"Times: batches of {figures['batch']}, threads: {figures['threads']}."
        ),
        *(f"\nThe machine was busy: {note}." for note in dict.fromkeys(figures["busy"])),
        "",
        markdown_table(("what", "measured"), rows),
        "",
        "`python benchmarks/demo.py` wrote this page.",
    ]
    HERE.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "demo"
        started = time.perf_counter()
        demo = HERE.parents[1] / "scripts" / "demo.py"
        subprocess.run([sys.executable, demo, "--out", folder], check=True)
        write(record(folder, time.perf_counter() - started))


if __name__ == "__main__":
    main()
