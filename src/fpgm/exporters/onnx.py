"""Convert models to ONNX with PyTorch's exporter, build single layers, and run both."""

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
from fpgm.utils.default_device import users_default_device
from fpgm.utils.example_inputs import Example, batch_size
from fpgm.utils.text import full_reason
from fpgm.utils.thread_lock import suppress_warnings

if TYPE_CHECKING:
    from fpgm.tracing.layer_calls import LayerSpec

OPSET = 18
"""Recent runtimes read it, and the exporter writes it without a conversion."""


def install_hint(extra: str, *packages: str) -> str | None:
    """Return the command that installs an extra, or None if its packages are all installed."""
    missing = any(util.find_spec(name) is None for name in packages)
    return f'pip install "fpgm[{extra}]"' if missing else None


def to_onnx(
    model: nn.Module,
    example: Example,
    *,
    any_batch: bool = False,
    metadata: Mapping[str, str] | None = None,
) -> bytes:
    """Convert a model to ONNX as it runs on the example.

    Args:
        model: in eval mode.
        example: inputs to trace it with.
        any_batch: let the batch size vary.
        metadata: written into the file.
    """
    proto = _run_exporter(model, example, any_batch).model_proto
    for node in proto.graph.node:  # the exporter writes paths of the user's source files here
        del node.metadata_props[:]
    for key, value in (metadata or {}).items():
        proto.metadata_props.add(key=key, value=value)
    data: bytes = proto.SerializeToString()
    return data


def create_session(data: bytes, threads: int = 0, profile: str | None = None) -> Any:
    """Load a model in ONNX Runtime on the CPU.

    Args:
        data: the ONNX model.
        threads: 0 for as many as there are cores.
        profile: prefix of a file to write a profile to.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # Threads that spin after a run would take a core from the model that is timed next.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    if profile is not None:
        options.enable_profiling = True
        options.profile_file_prefix = profile
    return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])


class OnnxModule(nn.Module):
    """A model in ONNX Runtime, called as in PyTorch."""

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self._session = create_session(data, torch.get_num_threads())
        self._names = [value.name for value in self._session.get_inputs()]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; return a tensor, or a tuple of them."""
        outputs = [torch.from_numpy(y) for y in self._session.run(None, self._feed(args, kwargs))]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _feed(self, args: Any, kwargs: Any) -> dict[str, Any]:
        values = (t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor))
        return {name: t.detach().cpu().numpy() for name, t in zip(self._names, values, strict=True)}


def batch_dims(example: Example) -> Any:
    """Mark the batch dimension of every tensor as dynamic, in the form the exporters take."""
    batch, size = torch.export.Dim("batch"), batch_size(example)

    def dims(value: Any) -> Any:
        has_batch = isinstance(value, Tensor) and value.ndim and value.shape[0] == size
        return {0: batch} if has_batch else None

    return tuple(tree_map(dims, value) for value in (*example.args, *example.kwargs.values()))


def _run_exporter(model: nn.Module, example: Example, any_batch: bool) -> Any:
    """Run torch.onnx.export without its output."""
    quiet = contextlib.redirect_stdout(io.StringIO())
    with suppress_warnings(), quiet, torch.no_grad(), users_default_device():
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
                f"PyTorch cannot export this model to ONNX: {_root_cause(error)}."
            ).keep_full_message() from error


def input_arrays(data: bytes, example: Example) -> dict[str, Any]:
    """Return the example's tensors by the names of the ONNX model's inputs."""
    import onnx

    names = [value.name for value in onnx.load_from_string(data).graph.input]
    tensors = [
        t for t in tree_leaves((example.args, dict(example.kwargs))) if isinstance(t, Tensor)
    ]
    return {name: t.detach().cpu().numpy() for name, t in zip(names, tensors, strict=True)}


def layer_to_onnx(layer: LayerSpec) -> bytes:
    """Build an ONNX model of one layer with random weights; its input is `x`."""
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
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)])
    model.ir_version = 10
    data: bytes = model.SerializeToString()
    return data


def _root_cause(error: BaseException) -> str:
    """Describe the innermost error: the exporter wraps it in pages of advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    return full_reason(error)
