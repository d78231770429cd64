"""Who may import whom: values know nothing of torch, rules nothing of choices, no one the CLI."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

import fpgm

ROOT = Path(fpgm.__file__).parent
FILES = {
    ".".join(("fpgm", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): path
    for path in sorted(ROOT.rglob("*.py"))
}
ACTION = {"balance", "cli", "compact", "draft", "masking", "planner", "planning", "replay",
          "select", "store", "verify"}  # fmt: skip
ANALYSIS = {"coupling", "labels", "rules", "watch"}


def imports(module: str, *, typing_too: bool = False) -> set[str]:
    """Modules a file imports; those only for type checkers are left out unless asked for."""
    found: set[str] = set()
    todo: list[ast.AST] = [ast.parse(FILES[module].read_text(encoding="utf-8"))]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and not typing_too and "TYPE_CHECKING" in ast.dump(node.test):
            todo += node.orelse
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            names = {f"{base}.{alias.name}" for alias in node.names}
            found |= {name if name in FILES else base for name in names}
        todo += ast.iter_child_nodes(node)
    return found


def own(module: str) -> set[str]:
    """First-level names of this package that a file imports."""
    inside = {name for name in imports(module) if name.startswith("fpgm.")}
    return {name.split(".")[1] for name in inside}


def outside(module: str) -> set[str]:
    """Packages a file imports that are neither this one nor the standard library's."""
    top = {name.partition(".")[0] for name in imports(module)}
    return top - {"fpgm"} - sys.stdlib_module_names


def under(name: str) -> list[str]:
    return [module for module in FILES if module == name or module.startswith(f"{name}.")]


@pytest.mark.parametrize(
    "module",
    [
        "fpgm.errors",
        "fpgm.plan",
        "fpgm.budget",
        "fpgm.plan_text",
        "fpgm.typed_json",
        "fpgm.wording",
    ],
)
def test_values_need_the_standard_library_and_each_other(module: str) -> None:
    assert outside(module) == set()
    assert own(module) <= {"errors", "plan", "plan_text", "budget", "typed_json", "wording"}


def test_criteria_are_maths() -> None:
    assert outside("fpgm.criteria") == outside("fpgm.distances") == {"torch"}
    assert own("fpgm.criteria") == {"distances", "errors", "wording"}
    assert own("fpgm.distances") == {"precision"}


@pytest.mark.parametrize("module", under("fpgm.rules"))
def test_rules_know_labels_only(module: str) -> None:
    assert outside(module) <= {"torch"}
    assert own(module) <= {"labels", "rules"}


@pytest.mark.parametrize("module", ["fpgm.watch", "fpgm.coupling", "fpgm.labels"])
def test_analysis_decides_and_changes_nothing(module: str) -> None:
    assert not own(module) & ACTION


@pytest.mark.parametrize("module", ["fpgm.compact", "fpgm.masking", "fpgm.store", "fpgm.adapters"])
def test_a_plan_applies_without_analysis(module: str) -> None:
    assert not own(module) & (ANALYSIS | {"planner", "planning", "select", "draft", "replay"})


@pytest.mark.parametrize(
    "module", [m for m in FILES if m not in (*under("fpgm.cli"), "fpgm.__main__")]
)
def test_nothing_needs_the_command_line(module: str) -> None:
    assert "cli" not in own(module)
    assert not outside(module) & {"rich", "typer"}


@pytest.mark.parametrize("module", under("fpgm.models"))
def test_networks_know_nothing_of_pruning(module: str) -> None:
    values = {"assets", "errors", "reading", "tensorfile", "turns", "wording"}
    assert own(module) <= {"models"} | values


def test_every_import_of_the_core_is_a_declared_dependency() -> None:
    declared = {"torch", "safetensors", "numpy", "rich", "typer"}
    extras = ("export", "figures", "integrations", "latency", "report", "train")
    extra = [under(f"fpgm.{name}") for name in extras]
    core = set(FILES) - set().union(*extra)
    assert set().union(*(outside(module) for module in core)) <= declared


@pytest.mark.parametrize("module", [*under("fpgm.export"), *under("fpgm.latency")])
def test_other_runtimes_are_needed_only_where_they_are_used(module: str) -> None:
    """Imported inside functions: `import fpgm` works without any of them."""
    assert outside(module) <= {"torch", "numpy", "onnx", "onnxruntime", "openvino"}
    top = ast.parse(FILES[module].read_text(encoding="utf-8")).body
    names = {alias.name for node in top if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in top if isinstance(node, ast.ImportFrom)}
    assert not {name.partition(".")[0] for name in names} & {"onnx", "onnxruntime", "openvino"}


def test_training_needs_its_extra_and_only_the_command_line_needs_training() -> None:
    used = set().union(*(outside(module) for module in under("fpgm.train")))
    assert used <= {"torch", "numpy", "accelerate", "tomli"}
    users = ("fpgm.cli.train", *under("fpgm.reproduce"))
    others = [m for m in FILES if m not in (*under("fpgm.train"), *users)]
    assert all("train" not in own(module) for module in others)


@pytest.mark.parametrize("module", under("fpgm.data"))
def test_data_knows_nothing_of_pruning(module: str) -> None:
    values = {"assets", "errors", "files", "progress", "reading", "turns", "wording"}
    assert own(module) <= {"data", "models"} | values


@pytest.mark.parametrize(
    ("name", "library"), [("lightning", "lightning"), ("huggingface", "transformers")]
)
def test_an_integration_needs_its_own_library_and_nothing_needs_it(name: str, library: str) -> None:
    assert outside(f"fpgm.integrations.{name}") == {"torch", library}
    assert all("integrations" not in own(m) for m in FILES if m not in under("fpgm.integrations"))


def test_this_file_can_tell() -> None:
    assert "watch" in own("fpgm.planner")
    assert "torch" in outside("fpgm.compact")
    assert "fpgm.tracer" in imports("fpgm.rules", typing_too=True) - imports("fpgm.rules")


@pytest.mark.parametrize("module", [*under("fpgm.figures"), "fpgm.analysis.result"])
def test_figures_are_drawn_from_values(module: str) -> None:
    assert outside(module) <= {"altair", "numpy", "PIL"}
    assert own(module) <= {"analysis", "errors", "figures", "files", "plan", "progress"}


@pytest.mark.parametrize("module", under("fpgm.report"))
def test_a_report_reads_values_and_never_builds_a_model(module: str) -> None:
    assert outside(module) <= {"jinja2", "vl_convert"}
    values = {"_version", "errors", "files", "plain", "plan", "reading", "wording"}
    assert own(module) <= {"figures", "report"} | values


def layers() -> list[set[str]]:
    """The lines of the architecture page's table, first to last."""
    page = ROOT.parents[1] / "docs" / "architecture.md"
    rows = [line.split("|") for line in page.read_text(encoding="utf-8").splitlines()]
    return [set(re.findall(r"`(\w+)`", row[2])) for row in rows if len(row) == 5 and "`" in row[2]]


def test_the_architecture_page_has_every_module_once() -> None:
    named = [name for layer in layers() for name in layer]
    assert len(named) == len(set(named))
    assert set(named) == {module.split(".")[1] for module in FILES if module != "fpgm"}


@pytest.mark.parametrize("module", [module for module in FILES if module != "fpgm"])
def test_imports_go_up_the_architecture_page(module: str) -> None:
    order = {name: number for number, layer in enumerate(layers()) for name in layer}
    below = {name for name in own(module) if order[name] > order[module.split(".")[1]]}
    assert below == set()
