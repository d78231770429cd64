"""Compare Eq. 7 with the exact geometric median on every convolution of trained CIFAR ResNets.

Run: FPGM_WEIGHTS=path/to/weights python benchmarks/median_agreement.py      (a few seconds)
Out: benchmarks/median_agreement.json, benchmarks/median_agreement.md

The paper replaces the distance to the geometric median (Eq. 5) by the sum of distances to all
filters (Eq. 7). Here both select filters in the same trained layers, and so does the l2 norm.
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from fpgm import criteria
from trained import add_weights

HERE = Path(__file__).parent
MODELS = ("cifar10_resnet20", "cifar10_resnet32", "cifar10_resnet56")
RATES = (0.3, 0.4, 0.5)


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_weights(parser)
    weights = parser.parse_args().weights
    rows = []
    for model in MODELS:
        state = load_file(weights / f"{model}.safetensors")
        convs = [weight.flatten(1) for weight in state.values() if weight.ndim == 4]
        rows += [compare(model, convs, rate) for rate in RATES]
    command = "python benchmarks/median_agreement.py"
    record = {"command": command, "rows": rows}
    (HERE / "median_agreement.json").write_text(json.dumps(record, indent=2) + "\n")
    (HERE / "median_agreement.md").write_text(page(command, rows), encoding="utf-8")
    print(page(command, rows))


def compare(model: str, convs: list[Tensor], rate: float) -> dict[str, float | int | str]:
    chosen = same_as_exact = same_as_norm = exact_and_norm = identical = identical_to_norm = 0
    for filters in convs:
        count = round(len(filters) * rate)
        by_sum = set(criteria.lowest(criteria.fpgm(filters), count))
        by_median = set(criteria.lowest(criteria.exact(filters), count))
        by_norm = set(criteria.lowest(criteria.l2(filters), count))
        chosen += count
        same_as_exact += len(by_sum & by_median)
        same_as_norm += len(by_sum & by_norm)
        exact_and_norm += len(by_median & by_norm)
        identical += by_sum == by_median
        identical_to_norm += by_sum == by_norm
    return {
        "model": model,
        "rate": rate,
        "layers": len(convs),
        "filters_chosen": chosen,
        "eq7_also_by_exact_median": same_as_exact / chosen,
        "layers_identical": identical / len(convs),
        "eq7_also_by_l2_norm": same_as_norm / chosen,
        "layers_identical_to_l2_norm": identical_to_norm / len(convs),
        "exact_median_also_by_l2_norm": exact_and_norm / chosen,
    }


def page(command: str, rows: list[dict[str, float | int | str]]) -> str:
    lines = [
        "# Eq. 7 against the exact geometric median",
        "",
        f"    {command}",
        "",
        (
            "Every convolution of trained CIFAR-10 ResNets, each layer separately. Percentages "
            "are fractions of the filters that Eq. 7 selects."
        ),
        "",
        (
            "| model | rate | filters selected | also by exact median | layers with the same set "
            "| also by l2 norm | layers with the norm's set |"
        ),
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {row['model']} | {row['rate']} | {row['filters_chosen']} "
        f"| {row['eq7_also_by_exact_median']:.1%} | {row['layers_identical']:.1%} "
        f"| {row['eq7_also_by_l2_norm']:.1%} | {row['layers_identical_to_l2_norm']:.1%} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
