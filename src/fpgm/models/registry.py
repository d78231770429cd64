"""Models by name, as the command line takes them.

    resnet56                    a built-in network
    torchvision:resnet50        from torchvision, weights fresh
    timm:convnext_tiny          from timm, weights fresh
    path/to/net.py:make         what `make()` in that file returns

Nothing is ever downloaded; trained weights come from a file, through `load_weights`.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from torch import nn

from fpgm.errors import RequestError
from fpgm.models.builtin import BUILTIN, build
from fpgm.models.torchvision_import import import_torchvision
from fpgm.utils.text import did_you_mean, reason
from fpgm.utils.thread_lock import GLOBAL_LOCK

IMAGENET_SHAPE = (1, 3, 224, 224)


def load_model(spec: str) -> nn.Module:
    """Build the model that a spec names, with random weights.

    >>> type(load_model("resnet20")).__name__
    'ResNet'
    """
    source, colon, name = spec.rpartition(":")
    if not colon:
        if spec.endswith(".py"):
            raise RequestError(f"{spec!r} does not name a factory: write '{spec}:make_model'.")
        if spec not in BUILTIN:
            _check_unprefixed(spec)
        return build(spec)
    if source == "torchvision":
        return _from_torchvision(name)
    if source == "timm":
        return _from_timm(name)
    if source.endswith(".py"):
        return _from_file(Path(source), name)
    raise RequestError(
        f"{spec!r} is not a model: use a built-in name, 'torchvision:NAME', 'timm:NAME' "
        "or 'path/to/file.py:factory'."
    )


def names_code(spec: str) -> bool:
    """Return whether a spec names a Python file, which building the model would run.

    >>> names_code("net.py:make"), names_code("torchvision:resnet50")
    (True, False)
    """
    return ".py:" in spec


def default_shape(spec: str) -> tuple[int, ...]:
    """Return the shape of one input for the model a spec names, batch dim included.

    >>> default_shape("resnet56"), default_shape("net.py:make")
    ((1, 3, 32, 32), (1, 3, 224, 224))
    """
    if spec in BUILTIN:
        return BUILTIN[spec].input_shape
    if spec.startswith("timm:"):
        name = spec.removeprefix("timm:")
        config = _import_timm(name).models.get_pretrained_cfg(name)
        if config is not None:
            return (1, *config.input_size)
    return IMAGENET_SHAPE


def has_guessed_shape(spec: str) -> bool:
    """Return whether a model's input shape is unknown, so that the default is a guess.

    >>> has_guessed_shape("net.py:make"), has_guessed_shape("resnet56")
    (True, False)
    """
    return spec not in BUILTIN and not spec.startswith("timm:")


def _check_unprefixed(name: str) -> None:
    """Refuse a folder, and the name of a torchvision or timm model without its prefix."""
    if Path(name).is_dir():
        raise RequestError(f"{name} is a folder: give a model, such as the one it was made from.")
    sources = [source for source in ("torchvision", "timm") if name in _list_models(source)]
    if sources:
        specs = " or ".join(repr(f"{source}:{name}") for source in sources)
        raise RequestError(f"There is no built-in model {name!r}: did you mean {specs}?")


def _list_models(source: str) -> list[str]:
    """List the models of torchvision or timm; none if it cannot be imported."""
    try:
        import_torchvision(source)
        package = importlib.import_module("torchvision.models" if source != "timm" else "timm")
    except (ImportError, RequestError):
        return []
    names: list[str] = package.list_models()
    return names


def _from_torchvision(name: str) -> nn.Module:
    import_torchvision(f"torchvision:{name}")
    models = importlib.import_module("torchvision.models")
    _check_name("torchvision", name, models.list_models())
    builder = models.get_model_builder(name)
    options: dict[str, Any] = {"weights": None}
    # Detection and segmentation models fetch a trained backbone unless told not to.
    if "weights_backbone" in inspect.signature(builder).parameters:
        options["weights_backbone"] = None
    with GLOBAL_LOCK, warnings.catch_warnings():
        # GoogLeNet and Inception warn about a change of their initialization.
        warnings.filterwarnings("ignore", "The default weight initialization", FutureWarning)
        model: nn.Module = builder(**options)
    return model


def _from_timm(name: str) -> nn.Module:
    model: nn.Module = _import_timm(name).create_model(name, pretrained=False)
    return model


def _import_timm(name: str) -> ModuleType:
    """Import timm, once it is sure to have the model."""
    import_torchvision(
        f"timm:{name}"
    )  # timm imports it, and only this way does that always succeed
    try:
        timm = importlib.import_module("timm")
    except ModuleNotFoundError as error:
        if error.name != "timm":
            raise
        raise RequestError(f'timm:{name} needs timm: pip install "fpgm[zoo]"') from None
    base, dot, _ = name.partition(".")
    _check_name("timm", base, timm.list_models())
    if dot:  # a name with the tag of its trained weights
        _check_name("timm", name, timm.list_models(f"{base}.*", pretrained=True))
    return timm


def _from_file(path: Path, name: str) -> nn.Module:
    if not path.is_file():
        raise RequestError(f"There is no file {str(path)!r} that could define {name!r}.")
    with _folder_on_path(path.parent):
        module = _import_file(path)
        public = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        target = getattr(module, name, None)
        if target is None:
            _check_name(str(path), name, public)
        if isinstance(target, nn.Module):
            return target
        if not callable(target):
            raise RequestError(
                f"{name!r} in {path} is not a factory but a {type(target).__name__}."
            )
        try:
            model = target()
        except Exception as error:
            raise RequestError(f"{name}() in {path} failed: {_describe(error)}.") from error
    if not isinstance(model, nn.Module):
        raise RequestError(
            f"{name}() in {path} returned {type(model).__name__}, not a torch.nn.Module."
        )
    return model


class _SourceLoader(SourceFileLoader):
    """Compile the file as it is now.

    Cached bytecode is found by size and second, so an edit right after a run would be missed.
    """

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        code: CodeType = self.source_to_code(self.get_data(path), path)
        return code


def _import_file(path: Path) -> ModuleType:
    # A unique name, so that a user's `utils.py` replaces no other module; registered, because
    # dataclasses and pickling look a class's module up by name.
    digest = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:12]
    name = f"_fpgm_user_{digest}"
    loader = _SourceLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    if spec is None or spec.loader is None:
        raise RequestError(f"{path} cannot be loaded as Python.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        try:
            spec.loader.exec_module(module)
        except RuntimeError as error:
            if "torchvision::nms" not in str(error):
                raise
            import_torchvision(
                str(path)
            )  # the file imports it, and only this way does that succeed
            spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[spec.name]
        raise RequestError(f"{path} failed to import: {_describe(error)}.") from error
    return module


@contextmanager
def _folder_on_path(folder: Path) -> Iterator[None]:
    """Let a file import modules in its folder, as when it is run as a script."""
    entry = str(folder.resolve())
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        sys.path.remove(entry)


def _check_name(source: str, name: str, known: Iterable[str]) -> None:
    known = list(known)
    if name not in known:
        hint = did_you_mean(name, known, most=3)
        raise RequestError(f"{source} has no {name!r}{': ' if hint else '.'}{hint}")


def _describe(error: Exception) -> str:
    kind, why = type(error).__name__, reason(error)
    return kind if why == kind else f"{kind}: {why}"
