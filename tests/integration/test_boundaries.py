"""Which package may import which: the table in docs/architecture.md, held against the code."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
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


def imports(module: str) -> set[str]:
    """Modules that a file imports, in functions and for type checkers too."""
    results: set[str] = set()
    for node in ast.walk(ast.parse(FILES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            results |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            names = {f"{base}.{alias.name}" for alias in node.names}
            results |= {name if name in FILES else base for name in names}
    return results


def inside(module: str) -> set[str]:
    """Modules of this package that a file imports, without the package's name."""
    return {name.removeprefix("fpgm.") for name in imports(module) if name.startswith("fpgm.")}


def packages(module: str) -> set[str]:
    """First-level names of this package that a file imports."""
    return {name.split(".")[0] for name in inside(module)}


def outside(module: str) -> set[str]:
    """Packages that a file imports, neither this one nor the standard library's."""
    top = {name.partition(".")[0] for name in imports(module)}
    return top - {"fpgm"} - sys.stdlib_module_names


def under(name: str) -> list[str]:
    return [module for module in FILES if module == name or module.startswith(f"{name}.")]


def layers() -> list[list[str]]:
    """The lines of the architecture page's table, first to last, each with its packages."""
    page = ROOT.parents[1] / "docs" / "architecture.md"
    rows = re.findall(r"^\| ((?:`\w+` ?)+)\|", page.read_text(encoding="utf-8"), re.MULTILINE)
    return [re.findall(r"\w+", row) for row in rows]


def test_the_root_holds_errors_and_criteria_only() -> None:
    files = {path.name for path in ROOT.glob("*.py")}
    assert files == {"__init__.py", "__main__.py", "_version.py", "criteria.py", "errors.py"}


def test_the_architecture_page_has_every_package_once() -> None:
    named = [name for line in layers() for name in line]
    assert len(named) == len(set(named))
    first = {module.split(".")[1] for module in FILES if module != "fpgm"}
    assert set(named) == first - {"_version", "__main__"}


@pytest.mark.parametrize("module", [m for m in FILES if m not in ("fpgm", "fpgm.__main__")])
def test_imports_go_up_the_architecture_page(module: str) -> None:
    lines = [["_version"], *layers()]
    order = {name: number for number, line in enumerate(lines) for name in line}
    item = order.get(module.split(".")[1], 0)
    assert {name for name in packages(module) if order[name] > item} == set()


def test_no_package_has_the_name_of_a_public_function() -> None:
    first = {module.split(".")[1] for module in FILES if module != "fpgm"}
    assert first & set(fpgm.__all__) == set()


def test_a_class_name_has_one_meaning() -> None:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in FILES.values()]
    names = Counter(n.name for tree in trees for n in tree.body if isinstance(n, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize("package", [m for m in FILES if FILES[m].name == "__init__.py"])
def test_a_package_is_an_index_whose_names_hide_no_module(package: str) -> None:
    tree = ast.parse(FILES[package].read_text(encoding="utf-8"))
    assert ast.get_docstring(tree)
    assert not [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.ClassDef))]
    modules = {m.rpartition(".")[2] for m in FILES if m.rpartition(".")[0] == package}
    froms = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert not {alias.name for node in froms for alias in node.names} & modules


@pytest.mark.parametrize(
    "module",
    ["fpgm.errors", "fpgm.pruning.plan", "fpgm.planning.budget", "fpgm.pruning.plan_text"],
)
def test_values_need_the_standard_library_only(module: str) -> None:
    todo, recorded = [module], set()
    while todo:
        name = todo.pop()
        recorded.add(name)
        assert outside(name) == set(), name
        todo += [f"fpgm.{used}" for used in inside(name) if f"fpgm.{used}" not in recorded]


def test_criteria_are_maths() -> None:
    assert outside("fpgm.criteria") == outside("fpgm.utils.distances") == {"torch"}
    assert inside("fpgm.criteria") == {"errors", "utils.distances", "utils.text"}


@pytest.mark.parametrize("module", under("fpgm.tracing.ops"))
def test_operator_rules_know_labels_only(module: str) -> None:
    assert outside(module) <= {"torch"}
    allowed = {"tracing.labels", "tracing.trace_values", "utils.parameter_roles"}
    assert {used for used in inside(module) if not used.startswith("tracing.ops")} <= allowed


@pytest.mark.parametrize("module", under("fpgm.tracing"))
def test_tracing_decides_and_changes_nothing(module: str) -> None:
    assert not packages(module) & {"pruning", "planning"}


@pytest.mark.parametrize("module", under("fpgm.pruning"))
def test_a_plan_applies_without_tracing(module: str) -> None:
    assert "tracing" not in packages(module)


@pytest.mark.parametrize(
    "module", [m for m in FILES if m not in (*under("fpgm.cli"), "fpgm.__main__")]
)
def test_nothing_needs_the_command_line(module: str) -> None:
    assert "cli" not in packages(module)
    assert not outside(module) & {"rich", "typer"}


@pytest.mark.parametrize(
    "module", [m for m in FILES if m not in (*under("fpgm.cli"), *under("fpgm.paper"))]
)
def test_nothing_but_the_command_line_needs_the_paper(module: str) -> None:
    assert "paper" not in packages(module)


@pytest.mark.parametrize("module", [*under("fpgm.models"), *under("fpgm.data")])
def test_networks_and_data_know_nothing_of_pruning(module: str) -> None:
    assert packages(module) <= {"data", "errors", "models", "utils"}


def test_every_import_of_the_core_is_a_declared_dependency() -> None:
    declared = {"torch", "safetensors", "numpy", "filelock", "rich", "typer"}
    types_only = {"typing_extensions"}
    extra = [under(f"fpgm.{name}") for name in ("exporters", "latency", "report", "training")]
    core = set(FILES) - set().union(*extra)
    assert set().union(*(outside(module) for module in core)) <= declared | types_only


@pytest.mark.parametrize("module", [*under("fpgm.exporters"), *under("fpgm.latency")])
def test_other_runtimes_are_needed_only_where_they_are_used(module: str) -> None:
    """Imported inside functions: `import fpgm` works without any of them."""
    assert outside(module) <= {"torch", "numpy", "onnx", "onnxruntime", "openvino"}
    top = ast.parse(FILES[module].read_text(encoding="utf-8")).body
    names = {alias.name for node in top if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in top if isinstance(node, ast.ImportFrom)}
    assert not {name.partition(".")[0] for name in names} & {"onnx", "onnxruntime", "openvino"}


def test_training_needs_its_extra() -> None:
    trainer = [m for m in under("fpgm.training") if m not in under("fpgm.training.callbacks")]
    used = set().union(*(outside(module) for module in trainer))
    assert used <= {"torch", "numpy", "accelerate", "tomli"}


@pytest.mark.parametrize(
    ("name", "library"), [("lightning", "lightning"), ("huggingface", "transformers")]
)
def test_a_callback_needs_its_own_library_and_nothing_needs_it(name: str, library: str) -> None:
    item = f"fpgm.training.callbacks.{name}"
    assert outside(item) == {"torch", library}
    others = [m for m in FILES if m not in under("fpgm.training.callbacks")]
    assert all(item not in imports(module) for module in others)


@pytest.mark.parametrize("module", [*under("fpgm.report.charts"), "fpgm.report.analysis.result"])
def test_charts_are_drawn_from_values(module: str) -> None:
    assert outside(module) <= {"altair", "numpy", "PIL"}
    assert packages(module) <= {"errors", "pruning", "report", "utils"}


@pytest.mark.parametrize(
    "module",
    [m for m in under("fpgm.report") if m not in under("fpgm.report.analysis")
     and m not in under("fpgm.report.charts")],
)  # fmt: skip
def test_a_page_reads_values_and_never_builds_a_model(module: str) -> None:
    assert outside(module) <= {"jinja2", "vl_convert"}
    assert packages(module) <= {"_version", "errors", "pruning", "report", "utils"}
    assert {u for u in inside(module) if u.startswith("pruning")} <= {"pruning.plan"}


HOOKS_WITHOUT_THE_MANAGER = {
    "tracing.tracer": {"_hook_all": "is passed the manager's list"},
    "pruning.masked_reference": {"_zero_scattered_": "the reference is a copy"},
    "pruning.masking": {
        "hold": "stays for as long as a SoftPruner holds units, which removes it",
        "_add_gradient_hook": "the same",
    },
    "recovery.staged_forward": {"__init__": "a pass has a copy of the model"},
    "recovery.data_free": {"_find_nonnegative_inputs": "the model is a copy"},
    "recovery.sensitivity.probes": {
        "register_": "the model is a copy",
        "_probe": "an activation of one pass",
    },
    "utils.channel_adapters": {"__init__": "part of a layer of our own"},
}
"""Functions that add hooks outside of `temporary_hooks`, each with the reason."""


def hooks_without_the_manager(tree: ast.AST, function: str = "") -> set[str]:
    """Functions with a call of `register_…hook` that is not inside `with temporary_hooks()`."""
    found = set()
    for node in ast.iter_child_nodes(tree):
        name = node.name if isinstance(node, ast.FunctionDef) else function
        if isinstance(node, ast.With) and "temporary_hooks()" in {
            ast.unparse(item.context_expr) for item in node.items
        }:
            continue
        if isinstance(node, ast.Attribute) and re.fullmatch(r"_?register_\w*hook", node.attr):
            found.add(name)
        found |= hooks_without_the_manager(node, name)
    return found


def test_hooks_are_removed_by_one_manager() -> None:
    found = {
        module.removeprefix("fpgm."): hooks_without_the_manager(ast.parse(path.read_text("utf-8")))
        for module, path in FILES.items()
    }
    allowed = {module: set(functions) for module, functions in HOOKS_WITHOUT_THE_MANAGER.items()}
    assert {module: functions for module, functions in found.items() if functions} == allowed


def test_the_helpers_of_this_file_work() -> None:
    managed = "with temporary_hooks() as h:\n    h.append(net.register_forward_hook(f))"
    assert not hooks_without_the_manager(ast.parse(managed))
    alone = "def run():\n    for m in net:\n        h += [m.register_forward_hook(f)]"
    assert hooks_without_the_manager(ast.parse(alone)) == {"run"}
    assert "tracing.grouping" in inside("fpgm.planning.planner")
    assert "torch" in outside("fpgm.pruning.compaction")
