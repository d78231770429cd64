"""Source lines that messages quote are the user's own."""

from __future__ import annotations

import contextlib

import pytest
import torch

from fpgm.models import resnet_cifar
from fpgm.pruning import plan
from fpgm.utils.tracebacks import describe_error, user_file


@pytest.mark.parametrize("module", [torch, contextlib, plan])
def test_files_of_torch_python_and_ours_are_not_the_users(module: object) -> None:
    assert user_file(str(module.__file__)) is None  # type: ignore[attr-defined]


def test_models_and_installed_packages_are() -> None:
    assert user_file(__file__) == "test_tracebacks.py"
    assert user_file(str(resnet_cifar.__file__)) == "resnet_cifar.py"
    assert user_file(str(pytest.__file__)) == "__init__.py"
    assert user_file("<string>") is None


def test_an_error_inside_pythons_own_code_names_the_users_line() -> None:
    with pytest.raises(RuntimeError) as raised, contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.contextmanager(lambda: iter(()))())
    assert "in test_tracebacks.py:" in describe_error(raised.value)
