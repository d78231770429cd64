"""The code that a report gives to use a model: it runs as it is, and holds names as data only."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.report_pages import Parts
from tests.helpers.shell import run

from fpgm.pruning.plan import Plan
from fpgm.report.page import render_page
from fpgm.report.records import ResultsRecord, decode
from fpgm.report.run import Run, read_run
from fpgm.report.usage import snippets


def test_the_code_runs_as_it_is(
    real_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the folder of the run, in PyTorch and ONNX Runtime, with equal outputs."""
    python, onnx = snippets(read_run(real_run))
    run("export", real_run, "--out", tmp_path / "small.onnx")
    monkeypatch.chdir(real_run)
    names: dict[str, Any] = {}
    exec(python.parts[0], names)
    model = names["model"]
    assert not model.training
    assert model.conv1.out_channels == 10

    assert onnx.parts[0] == "fpgm export ."
    monkeypatch.chdir(tmp_path)
    exec(onnx.parts[1], names)
    expected = model(torch.zeros(1, 3, 32, 32))
    torch.testing.assert_close(
        torch.from_numpy(names["outputs"][0]), expected, rtol=1e-3, atol=1e-3
    )


def test_it_is_on_the_page(real_run: Path) -> None:
    loaded_run = read_run(real_run)
    words = Parts(render_page(loaded_run)).words
    for snippet in snippets(loaded_run):
        assert set(snippet.parts) <= set(words)


def of_model(name: str) -> Run:
    results = decode(ResultsRecord, {"model": name, "input": [1, 3, 8, 8]})
    return Run("a", results, Plan("", {}, ()))


@pytest.mark.parametrize("name", ['"); import os; ("', "a\nimport os", "net's.py:make", "\u2028"])
def test_a_name_is_never_code(name: str) -> None:
    python, _ = snippets(of_model(name))
    tree = ast.parse(python.parts[0])
    imported = [node for node in ast.walk(tree) if isinstance(node, ast.Import)]
    assert len(imported) == 1  # fpgm
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    assert set(texts) == {name, "small.safetensors"}


def test_code_is_named_to_be_trusted() -> None:
    _, onnx = snippets(of_model("my net.py:make"))
    assert onnx.parts[0] == "fpgm export . --model 'my net.py:make'"


def test_without_a_pruned_model_there_is_none() -> None:
    assert snippets(Run("a", decode(ResultsRecord, {"model": "resnet20"}))) == []
    assert snippets(Run("a", plan=Plan("", {}, ()))) == []


def test_a_training_run_has_no_shape_to_export() -> None:
    trained = Run("a", plan=Plan("", {}, ()), recipe={"model.name": "digits"})
    assert [snippet.title for snippet in snippets(trained)] == ["In PyTorch"]
