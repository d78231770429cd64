"""ONNX from PyTorch's own exporter, and single layers written down directly."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from importlib import util
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from fpgm.errors import ModelError
from fpgm.utils.example_inputs import Example, batch_of
from fpgm.utils.locking import quietly
from fpgm.utils.text import reason

if TYPE_CHECKING:
    from fpgm.tracing.layer_calls import Layer

OPSET = 18
"""What runtimes of the last years read, and the exporter writes without a conversion."""


def uninstalled(extra: str, *packages: str) -> str | None:
    """How to install the extra that brings these packages, if one of them is not there."""
    missing = any(util.find_spec(name) is None for name in packages)
    return f'pip install "fpgm[{extra}]"' if missing else None


def to_onnx(
    model: nn.Module,
    example: Example,
    *,
    any_batch: bool = False,
    told: Mapping[str, str] | None = None,
) -> bytes:
    """The model in ONNX as it runs on the example: norms folded, of any batch size if wanted.

    What is `told` goes into the file's own description.
    """
    proto = _exported(model, example, any_batch).model_proto
    for node in proto.graph.node:  # where in whose source it came from is nobody else's business
        del node.metadata_props[:]
    for key, value in (told or {}).items():
        proto.metadata_props.add(key=key, value=value)
    data: bytes = proto.SerializeToString()
    return data


def session_of(data: bytes, threads: int = 0, profile: str | None = None) -> Any:
    """The model in ONNX Runtime on the processor; as many threads as cores if none are named."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # Threads that go on waiting after a run take a core from whatever is timed next to it.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    if profile is not None:
        options.enable_profiling = True
        options.profile_file_prefix = profile
    return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])


class OnnxModule(nn.Module):
    """A model in ONNX Runtime, called as in PyTorch."""

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self._session = session_of(data)
        self._names = [value.name for value in self._session.get_inputs()]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What comes out: a tensor, or a tuple of them."""
        found = [torch.from_numpy(y) for y in self._session.run(None, self._feed(args, kwargs))]
        return found[0] if len(found) == 1 else tuple(found)

    def _feed(self, args: Any, kwargs: Any) -> dict[str, Any]:
        values = (t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor))
        return {name: t.detach().cpu().numpy() for name, t in zip(self._names, values, strict=True)}


def batch_dims(example: Example) -> Any:
    """The first size of every tensor, which may change, as the exporters want to be told."""
    batch, size = torch.export.Dim("batch"), batch_of(example)

    def dims(value: Any) -> Any:
        counts = isinstance(value, Tensor) and value.ndim and value.shape[0] == size
        return {0: batch} if counts else None

    return tuple(tree_map(dims, value) for value in (*example.args, *example.kwargs.values()))


def _exported(model: nn.Module, example: Example, any_batch: bool) -> Any:
    """What torch.onnx.export makes of it, quietly."""
    quiet = contextlib.redirect_stdout(io.StringIO())
    with quietly(), quiet, torch.no_grad():
        try:
            return torch.onnx.export(
                model,
                tuple(example.args),
                kwargs=dict(example.kwargs),
                dynamo=True,
                verbose=False,
                opset_version=OPSET,
                dynamic_shapes=batch_dims(example) if any_batch else None,
            )
        except Exception as error:
            raise ModelError(
                f"PyTorch cannot export this model to ONNX: {_cause(error)}."
            ) from error


def input_arrays(data: bytes, example: Example) -> dict[str, Any]:
    """The example's tensors under the names the exported model gives its inputs."""
    import onnx

    names = [value.name for value in onnx.load_from_string(data).graph.input]
    tensors = [
        t for t in tree_leaves((example.args, dict(example.kwargs))) if isinstance(t, Tensor)
    ]
    return {name: t.detach().cpu().numpy() for name, t in zip(names, tensors, strict=True)}


def layer_to_onnx(layer: Layer) -> bytes:
    """One layer with random weights; its input is `x`."""
    from onnx import helper, numpy_helper

    module = layer.module()
    weight = module.weight
    assert isinstance(weight, Tensor)
    initial = [numpy_helper.from_array(weight.detach().numpy(), "w")]
    names = ["x", "w"]
    if isinstance(module.bias, Tensor):
        initial.append(numpy_helper.from_array(module.bias.detach().numpy(), "b"))
        names.append("b")
    if layer.kind == "linear":
        node = helper.make_node("Gemm", names, ["y"], transB=1)
    else:
        options: dict[str, Any] = {
            "kernel_shape": layer.kernel,
            "strides": layer.stride,
            "dilations": layer.dilation,
            "group": layer.groups,
        }
        if isinstance(layer.padding, str):
            options["auto_pad"] = {"same": "SAME_UPPER", "valid": "VALID"}[layer.padding]
        else:
            options["pads"] = [*layer.padding, *layer.padding]
        if layer.kind == "transposed":
            options["output_padding"] = layer.output_padding
        node = helper.make_node(
            "ConvTranspose" if layer.kind == "transposed" else "Conv", names, ["y"], **options
        )
    graph = helper.make_graph(
        [node],
        "layer",
        [helper.make_tensor_value_info("x", initial[0].data_type, list(layer.input().shape))],
        [helper.make_tensor_value_info("y", initial[0].data_type, None)],
        initial,
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)])
    made.ir_version = 10
    data: bytes = made.SerializeToString()
    return data


def _cause(error: BaseException) -> str:
    """The innermost reason: the exporter wraps it in pages of advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    return reason(error)
