"""Pruned models on disk: weights and plans in one safetensors file, never a pickle.

A file contains only tensors and text, so loading needs the user's own factory: the factory builds
the original, the plans in the file give it its smaller shape, and the weights are loaded strictly.
`models.checkpoint` reads other checkpoints.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from fpgm._version import __version__
from fpgm.errors import FileError, FpgmError, ModelError, PlanError, RequestError
from fpgm.pruning.compaction import PLANS, compact, fingerprint
from fpgm.pruning.plan import Cut, Plan
from fpgm.pruning.slicing import by_tensor
from fpgm.utils.atomic_io import atomic_write
from fpgm.utils.default_device import cpu_by_default, users_default_device
from fpgm.utils.modules import (
    module_at,
    modules_by_path,
    replace_module_,
    unwrap_model,
    update_digest,
)
from fpgm.utils.safetensors_io import (
    SHARED_KEY,
    add_shared_tensors,
    is_safetensors,
    read_head,
    read_tensors,
)
from fpgm.utils.text import format_shape, reason
from fpgm.utils.tracebacks import describe_error

FORMAT = 2
"""Version of the file's metadata; raised when an older fpgm would misread it. Since 2 it holds a
digest of all the rest, so that damage of any kind is noticed."""
DIGEST = "fpgm_sha256"
MAX_PLANS = 1000
"""Most plans in one file: each costs a copy of the model, even if it changes nothing."""

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
"""Interchangeable dtypes: a model may be saved in another precision."""

Plans = dict[str, tuple[Plan, ...]]
"""Plans by the path of the module they were applied to ("" is the model itself), oldest first."""


_PICKLE_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
"""Of files that others read with `torch.load`."""


@cpu_by_default()
def save(model: nn.Module, path: str | Path) -> None:
    """Write a model's weights and the plans that made it; the file is written atomically.

    Weights shared between modules are written once. Plans of submodules that were pruned separately
    are saved too. The class, hooks and optimizer are not: `load` gets the class from a factory.
    """
    model = unwrap_model(model)
    if (file := Path(path)).suffix in _PICKLE_SUFFIXES:
        warnings.warn(
            f"{file} is written in the safetensors format, which torch.load cannot read: name it "
            f"{file.with_suffix('.safetensors').name}, and read it with fpgm.load.",
            stacklevel=2,
        )
    tensors, shared = _storable(model)
    if (count := sum(len(_plans_of(module)) for module in model.modules())) > MAX_PLANS:
        raise ModelError(f"The model cannot be saved: it was pruned {count} times.")
    metadata = {
        "format": "pt",
        "fpgm_format": str(FORMAT),
        "fpgm_version": __version__,
        SHARED_KEY: json.dumps(shared),
        "fpgm_plans": plans_json(model),
    }
    metadata[DIGEST] = content_sha256(tensors, metadata)
    try:
        with atomic_write(Path(path)) as part:
            save_file(tensors, part, metadata)
    except (OSError, SafetensorError) as error:
        raise FileError(f"{path} cannot be written: {reason(error)}.") from error


def plans_json(model: nn.Module) -> str:
    """Return the plans of a model and of separately pruned submodules, as JSON."""
    plans = {name: _plans_of(module) for name, module in modules_by_path(model).items()}
    return json.dumps(
        {
            name: [json.loads(p.to_json()) for p in module_plans]
            for name, module_plans in plans.items()
            if module_plans
        }
    )


@cpu_by_default()
def load(path: str | Path, factory: Callable[[], nn.Module]) -> nn.Module:
    """Rebuild a saved model from a function that returns the original architecture.

    Device, train or eval mode and `requires_grad` come from the factory, dtypes from the file: if
    all its floating-point tensors have the same dtype, the whole model is converted, else each
    tensor separately.
    """
    if isinstance(factory, nn.Module) or not callable(factory):
        raise RequestError(
            f"factory is a {type(factory).__name__}: give a function that builds the original "
            "model, such as lambda: resnet(20)."
        )
    stored = _read(path)
    try:
        with users_default_device():
            model = factory()
    except FpgmError:
        raise
    except Exception as error:
        raise RequestError(f"factory() fails: {describe_error(error)}.") from error
    if not isinstance(model, nn.Module):
        raise RequestError(
            f"factory() returned {type(model).__name__}: it must return the original model."
        )
    if any(t.is_meta for t in model.state_dict().values()):
        raise RequestError("factory() returned a model on the meta device: give it real tensors.")
    original = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    try:
        model = _apply_plans(model, stored.plans)
    except PlanError as error:
        why = _difference(original, _original_shapes(stored)) or str(error)
        raise FileError(f"{path} does not fit the model that factory() returns: {why}") from None
    shapes = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    problem = _difference(shapes, stored.shapes()) or _other_kind(model, stored.tensors)
    if problem:
        raise FileError(f"{path} does not fit the model that factory() returns: {problem}")
    _match_dtypes_(model, stored.tensors)
    model.load_state_dict(stored.tensors)
    return model


def read_plans(path: str | Path) -> Plans:
    """Read the plans in a saved file, by module path, without building any model."""
    return _read(path).plans


@dataclass(frozen=True)
class _StoredModel:
    tensors: dict[str, Tensor]
    plans: Plans

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(t.shape) for name, t in self.tensors.items()}


def _plans_of(module: nn.Module) -> tuple[Plan, ...]:
    plans: tuple[Plan, ...] = vars(module).get(PLANS, ())
    return plans


def _storable(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return contiguous, unshared tensors for safetensors, and the names that share one."""
    tensors: dict[str, Tensor] = {}
    shared: dict[str, str] = {}
    first: dict[object, str] = {}
    memory: set[int] = set()
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise ModelError(
                f"The model cannot be saved: its state '{name}' is a {type(value).__name__}, "
                "not a tensor."
            )
        if value.layout != torch.strided:
            layout = str(value.layout).removeprefix("torch.")
            raise ModelError(
                f"The model cannot be saved: its state '{name}' is stored as {layout}. "
                "Store it dense, or register it with persistent=False."
            )
        storage = value.untyped_storage().data_ptr() if value.numel() else 0
        place = (storage, value.storage_offset(), value.shape, value.stride(), value.dtype)
        if storage and place in first:
            shared[name] = first[place]
            continue
        first[place] = name
        plain = value.detach().contiguous()
        overlaps = storage in memory and plain.data_ptr() == value.data_ptr()
        tensors[name] = plain.clone() if overlaps else plain
        memory.add(storage)
    return tensors, shared


def _read(path: str | Path) -> _StoredModel:
    file = Path(path)
    if not is_safetensors(read_head(file)):
        raise FileError(f"{file} is not a safetensors file.")
    tensors, metadata = read_tensors(file)
    has_digest = _format_of(file, metadata) > 1 or DIGEST in metadata  # the first format had none
    if has_digest and metadata.get(DIGEST) != content_sha256(tensors, metadata):
        raise FileError(f"{file} is damaged: its contents are not what was saved (sha256 differs).")
    try:
        raw = json.loads(metadata["fpgm_plans"])
        plans = {
            name: tuple(Plan.from_json(json.dumps(plan)) for plan in module_plans)
            for name, module_plans in raw.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FileError(f"{path} holds plans that cannot be read: {reason(error)}.") from error
    if (count := sum(map(len, plans.values()))) > MAX_PLANS:
        raise FileError(f"{path} holds {count:,} plans: at most {MAX_PLANS:,} are allowed.")
    return _StoredModel(add_shared_tensors(file, tensors, metadata), plans)


def content_sha256(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """Hash the content of a file, except the digest itself."""
    hashed = {key: value for key, value in metadata.items() if key != DIGEST}
    digest = hashlib.sha256(json.dumps(hashed, sort_keys=True).encode())
    update_digest(digest, tensors)
    return digest.hexdigest()


def _format_of(file: Path, metadata: Mapping[str, str]) -> int:
    version = metadata.get("fpgm_format", "")
    if not version.isdecimal() or len(version) > 9 or int(version) < 1:
        raise FileError(
            f"{file} was not written by fpgm.save: read plain weights with "
            "fpgm.models.checkpoint.load_weights."
        )
    if int(version) > FORMAT:
        by = metadata.get("fpgm_version", "a later version")
        raise FileError(
            f"{file} was written by fpgm {by} in format {version}; fpgm {__version__} reads "
            f"format {FORMAT}: update fpgm."
        )
    return int(version)


def _apply_plans(model: nn.Module, plans: Plans) -> nn.Module:
    """Apply every plan in the order it was made.

    The order between a module and one inside it is not stored, but it can be found: a later plan
    does not fit before an earlier one. So the outermost plan that fits is applied first.
    """
    pending = {
        name: list(module_plans) for name, module_plans in sorted(plans.items()) if module_plans
    }
    while pending:
        fitting = [
            name
            for name, module_plans in pending.items()
            if (part := _submodule(model, name)) is not None
            and fingerprint(part) == module_plans[0].fingerprint
        ]
        name = fitting[0] if fitting else next(iter(pending))
        part = _submodule(model, name)
        if part is None:
            raise PlanError(
                f"The plan was made for another model: this one has no module '{name}'."
            )
        small = compact(part, pending[name].pop(0))
        if not pending[name]:
            del pending[name]
        if model is part:
            model = small
        else:
            replace_module_(model, part, small)
    return model


def _submodule(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return module_at(model, name)
    except AttributeError:
        return None


def _original_shapes(stored: _StoredModel) -> dict[str, tuple[int, ...]]:
    """Compute the shapes before the plans, backwards from the cuts."""
    shapes = stored.shapes()
    for prefix, plans in stored.plans.items():
        for plan in reversed(plans):
            for name, cuts in by_tensor(plan.cuts).items():
                full = f"{prefix}.{name}" if prefix else name
                if full in shapes:
                    shapes[full] = _shape_before(shapes[full], cuts)
    return shapes


def _shape_before(shape: tuple[int, ...], cuts: list[Cut]) -> tuple[int, ...]:
    sizes = {c.dim: c.size for c in cuts}
    return tuple(sizes.get(dim, size) for dim, size in enumerate(shape))


def _difference(
    model: Mapping[str, tuple[int, ...]], file: Mapping[str, tuple[int, ...]]
) -> str | None:
    """Describe the first tensor that differs, in the model's order."""
    for name, shape in model.items():
        if name not in file:
            return f"the file has no '{name}'."
        if file[name] != shape:
            return (
                f"its '{name}' is {format_shape(shape)}, the file's was {format_shape(file[name])}."
            )
    missing = next((name for name in file if name not in model), None)
    return f"it has no '{missing}'." if missing is not None else None


def _other_kind(model: nn.Module, tensors: Mapping[str, Tensor]) -> str | None:
    """Describe the first tensor whose kind of dtype differs from the model's."""
    for name, tensor in model.state_dict().items():
        dtype = tensors[name].dtype
        floats = tensor.dtype in FLOATS and dtype in FLOATS
        if dtype != tensor.dtype and not floats:
            return f"its '{name}' is {tensor.dtype}, the file's {dtype}."
    return None


def _match_dtypes_(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    floating = {t.dtype for t in tensors.values() if t.is_floating_point()}
    if len(floating) == 1:
        model.to(dtype=floating.pop())
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.dtype != tensors[name].dtype:
            tensor.data = tensor.data.to(tensors[name].dtype)
