"""The public surface, name by name and signature by signature: changing it is a decision."""

from __future__ import annotations

import inspect

import fpgm

SIGNATURES = {
    "analyze": (
        "(model: 'nn.Module', example_inputs: 'Any', *, rate: 'float' = 0.4, "
        "residual: 'Residual' = 'coupled', ignore: 'Sequence[str]' = (), "
        "approximate: 'bool' = False) -> 'Analysis'"
    ),
    "bench": (
        "(models: 'Mapping[str, nn.Module] | Sequence[nn.Module]', example_inputs: 'Any', *, "
        "backends: 'Sequence[str] | None' = None, batches: 'Sequence[int] | None' = None, "
        "threads: 'Sequence[int] | None' = None, seconds: 'float' = 2.0, "
        "progress: 'Progress | None' = None) -> 'Bench'"
    ),
    "compact": (
        "(model: 'nn.Module', plan: 'Plan', *, "
        "optimizer: 'torch.optim.Optimizer | None' = None) -> 'nn.Module'"
    ),
    "export": (
        "(model: 'nn.Module', example_inputs: 'Any', path: 'str | Path', *, "
        "to: 'Format | None' = None, loader: 'Iterable[Any] | None' = None, images: 'int' = 64, "
        "any_batch: 'bool' = True, low_rank: 'float | None' = None, int8: 'bool' = False) "
        "-> 'Exported'"
    ),
    "load": "(path: 'str | Path', factory: 'Callable[[], nn.Module]') -> 'nn.Module'",
    "mask_": "(model: 'nn.Module', plan: 'Plan', *, readers: 'bool' = True) -> 'None'",
    "plan": (
        "(model: 'nn.Module', example_inputs: 'Any', *, rate: 'float | None' = None, "
        "macs: 'float | None' = None, params: 'float | None' = None, "
        "latency: 'float | None' = None, "
        "rates: 'Mapping[str, float] | None' = None, criterion: 'Criterion' = 'fpgm', "
        "distance: 'str' = 'l2', residual: 'Residual' = 'coupled', ignore: 'Sequence[str]' = (), "
        "align: \"int | Literal['auto']\" = 16, rounding: 'Rounding' = 'nearest', "
        "min_channels: 'int' = 1, "
        "approximate: 'bool' = False, keep_outputs: 'bool' = True, seed: 'int' = 0, "
        "allocate: 'Allocate' = 'uniform', loader: 'Iterable[Any] | None' = None, "
        "backend: 'str' = 'eager', threads: 'int | None' = None, "
        "progress: 'Progress | None' = None) -> 'Plan'"
    ),
    "recover": (
        "(model: 'nn.Module', plan: 'Plan', loader: 'Iterable[Any]', *, "
        "method: 'Method | None' = 'solve', images: 'int' = 1024, distil: 'float' = 0.0, "
        "start: 'nn.Module | None' = None, cache: 'str | Path | None' = None, "
        "progress: 'Progress | None' = None) -> 'nn.Module'"
    ),
    "sensitivity": (
        "(model: 'nn.Module', example_inputs: 'Any', loader: 'Iterable[Any]', *, "
        "images: 'int' = 512, rates: 'Sequence[float]' = (0.2, 0.4, 0.6, 0.8), "
        "cache: 'str | Path | None' = None, trials: 'bool' = True, "
        "progress: 'Progress | None' = None, **options: 'Unpack[PlanKeywords]') -> 'Sensitivity'"
    ),
    "save": "(model: 'nn.Module', path: 'str | Path') -> 'None'",
    "verify": (
        "(model: 'nn.Module', plan: 'Plan', example_inputs: 'Any', *, "
        "compacted: 'nn.Module | None' = None, inputs: 'int' = 2) -> 'Certificate'"
    ),
}

SIGNATURES["prune"] = SIGNATURES["plan"].replace("-> 'Plan'", "-> 'nn.Module'")

ERRORS = ["FileError", "FpgmError", "ModelError", "PlanError", "RequestError", "VerificationError"]


def test_public_names() -> None:
    assert fpgm.__all__ == [
        "Certificate",
        *ERRORS[:3],
        "Plan",
        *ERRORS[3:5],
        "Sensitivity",
        "SoftPruner",
        *ERRORS[5:],
        "__version__",
        "analyze",
        "bench",
        "compact",
        "export",
        "load",
        "mask_",
        "plan",
        "prune",
        "recover",
        "save",
        "sensitivity",
        "verify",
    ]
    assert fpgm.__all__ == sorted(fpgm.__all__)


def test_the_signatures() -> None:
    functions = {n: getattr(fpgm, n) for n in fpgm.__all__ if inspect.isfunction(getattr(fpgm, n))}
    assert {name: str(inspect.signature(f)) for name, f in functions.items()} == SIGNATURES


def test_the_signature_of_a_pruner() -> None:
    assert str(inspect.signature(fpgm.SoftPruner)) == (
        "(model: 'nn.Module', example_inputs: 'Any', *, rate: 'float | None' = None, "
        "macs: 'float | None' = None, params: 'float | None' = None, "
        "rates: 'Mapping[str, float] | None' = None, interval: 'int' = 1, start: 'int' = 1, "
        "end: 'int | None' = None, ramp: 'int' = 0, hold: 'int | None' = None, "
        "mode: 'Mode' = 'soft', optimizer: 'torch.optim.Optimizer | None' = None, "
        "**options: 'Unpack[PlanKeywords]') -> 'None'"
    )


def test_reprs_of_a_plan_and_a_certificate() -> None:
    output = {n for n in dir(fpgm.Plan) if not n.startswith("_")} | set(fpgm.Plan.__annotations__)
    assert output >= {
        "adapters", "asked", "attributes", "cuts", "exact", "fingerprint", "from_json", "frozen",
        "groups", "macs_after", "macs_before", "macs_removed", "notes", "params_after",
        "params_before", "params_removed", "to_json",
    }  # fmt: skip
    output = {n for n in dir(fpgm.Certificate) if not n.startswith("_")}
    assert output | set(fpgm.Certificate.__annotations__) >= {"check", "max_error", "moved", "ok"}


def test_everything_public_is_explained() -> None:
    for name in fpgm.__all__:
        if name != "__version__":
            assert inspect.getdoc(getattr(fpgm, name)), name
