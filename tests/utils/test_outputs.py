"""Whatever a model returns: its heads are protected and compared, or it is refused by name."""

from __future__ import annotations

import weakref
from collections import OrderedDict, UserDict, UserList, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import fpgm
from fpgm.errors import ModelError
from fpgm.utils.example_inputs import tensors_in
from fpgm.utils.outputs import read_outputs

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


class Box(dict[str, Any]):
    """A dict with an attribute beside its items."""

    def __init__(self, items: dict[str, Any], **attributes: Any) -> None:
        super().__init__(items)
        self.__dict__.update(attributes)


class Row(list[Any]):
    pass


class Pair(tuple[Any, ...]):
    pass


class Slots:
    __slots__ = ("__hidden", "logits")

    def __init__(self, logits: Any) -> None:
        self.logits = logits
        self.__hidden = 1


class MoreSlots(Slots):
    __slots__ = ("extra",)


@dataclass(slots=True)
class Slotted:
    logits: Any
    other: Any = None


@dataclass(frozen=True)
class Plain:
    logits: Any


class AttributeDict(dict[str, Any]):
    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.__dict__ = self


Named = namedtuple("Named", ["logits", "name"])


def with_slot(logits: Tensor) -> MoreSlots:
    result = MoreSlots(None)
    result.extra = logits
    return result


def itself(logits: Tensor) -> list[Any]:
    result: list[Any] = [logits]
    result.append(result)
    return result


def in_array(logits: Tensor) -> Any:
    result = np.empty(2, dtype=object)
    result[0] = logits
    return result


def with_attribute(logits: Tensor) -> Tensor:
    result = torch.zeros(2)
    result.logits = logits  # type: ignore[attr-defined]
    return result


CONTAINERS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "tensor": (lambda y: y, "out"),
    "list": (lambda y: [y], "out[0]"),
    "dict subclass": (lambda y: Box({"logits": y}), "out['logits']"),
    "attribute of a dict": (lambda y: Box({}, logits=y), "out.logits"),
    "list subclass": (lambda y: Row([y]), "out[0]"),
    "tuple subclass": (lambda y: Pair([y]), "out[0]"),
    "deque": (lambda y: deque([y]), "out[0]"),
    "named tuple": (lambda y: Named(y, "a"), "out.logits"),
    "UserDict": (lambda y: UserDict(logits=y), "out['logits']"),
    "UserList": (lambda y: UserList([y]), "out[0]"),
    "OrderedDict": (lambda y: OrderedDict(logits=y), "out['logits']"),
    "attribute dict": (lambda y: AttributeDict(logits=y), "out['logits']"),
    "mapping proxy": (lambda y: MappingProxyType({"logits": y}), "out['logits']"),
    "slots": (Slots, "out.logits"),
    "inherited slots": (with_slot, "out.extra"),
    "slotted dataclass": (Slotted, "out.logits"),
    "frozen dataclass": (Plain, "out.logits"),
    "namespace": (lambda y: SimpleNamespace(logits=y), "out.logits"),
    "nested": (lambda y: {"a": (Slotted([Plain(y)]),)}, "out['a'][0].logits[0].logits"),
    "set of one": (lambda y: {y}, "out.pop()"),
    "frozen set of one": (lambda y: frozenset([y]), "out.pop()"),
    "key of a dict": (lambda y: {y: 1}, "out.keys()[0]"),
    "weak reference": (lambda y: (weakref.ref(holder := Plain(y)), holder), "out[0].logits"),
    "array of objects": (in_array, "out.flat[0]"),
    "exception": (ValueError, "out.args[0]"),
    "contains itself": (itself, "out[0]"),
    "distribution": (lambda y: torch.distributions.Normal(y, y.exp()), "out.loc"),
}


class Head(nn.Module):
    """A body of eight units and a head of ten classes, whose logits leave in some container."""

    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 10)
        self.wrap = [wrap]

    def forward(self, x: Tensor) -> Any:
        return self.wrap[0](self.head(self.body(x).relu()))


def test_a_head_in_an_attribute_of_a_tensor_keeps_its_classes() -> None:
    small = fpgm.prune(Head(with_attribute), X, rate=0.5, align=1)
    assert (small.body.out_features, small.head.out_features) == (4, 10)
    assert [leaf.path for leaf in read_outputs(small(X))] == ["out", "out.logits"]


@pytest.mark.parametrize("kind", CONTAINERS)
def test_a_head_keeps_its_classes_in_every_container(kind: str) -> None:
    wrap, path = CONTAINERS[kind]
    model = Head(wrap)
    small = fpgm.prune(model, X, rate=0.5, align=1)
    assert (small.body.out_features, small.head.out_features) == (4, 10)
    results = [leaf.path for leaf in read_outputs(small(X)) if leaf.is_tensor]
    assert results[0] == path
    assert len(tensors_in(small(X))) == len(results)


@pytest.mark.parametrize("kind", CONTAINERS)
def test_a_wrong_class_is_detected_in_every_container(kind: str) -> None:
    wrap, path = CONTAINERS[kind]
    model = Head(wrap)
    plan = fpgm.plan(model, X, rate=0.5, align=1)
    small = fpgm.compact(model, plan)
    with torch.no_grad():
        small.head.weight[7] *= 1.01
    certificate = fpgm.verify(model, plan, X, compacted=small)
    assert not certificate.ok
    assert certificate.worst.startswith(f"{path}, channel 7 of dim 1 ")


@pytest.mark.parametrize(
    "leave",
    [
        lambda y: y.detach().numpy(),
        lambda y: y.tolist(),
        lambda y: [float(v) for v in y.flatten()],
        lambda y: float(y[0, 7]),
        lambda y: {"best": y.argmax(1).tolist(), "score": y.max(1).values.tolist()},
        lambda y: np.float32(y[0, 7].item()),
        lambda y: y.to_sparse(),
    ],
    ids=["numpy", "tolist", "floats", "float", "best", "numpy scalar", "sparse"],
)
def test_numbers_without_labels_are_compared(leave: Callable[[Tensor], Any]) -> None:
    model = Head(leave)
    plan = fpgm.plan(model, X, rate=0.5, align=1, ignore=["head"])
    assert fpgm.verify(model, plan, X).ok
    small = fpgm.compact(model, plan)
    with torch.no_grad():
        small.head.bias[7] += 100
    assert not fpgm.verify(model, plan, X, compacted=small).ok


def test_text_is_compared() -> None:
    model = Head(lambda y: (y, f"best: {int(y[0].argmax())}"))
    plan = fpgm.plan(model, X, rate=0.5, align=1)
    assert fpgm.verify(model, plan, X).ok
    small = fpgm.compact(model, plan)
    small.wrap = [lambda y: (y, "best: -1")]
    certificate = fpgm.verify(model, plan, X, compacted=small)
    assert (certificate.ok, certificate.worst) == (False, "out[1] (not equal)")


REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "generator": (
        lambda y: {"x": (row for row in y)},
        "a generator at out['x'], which can be read only once: return a list instead.",
    ),
    "map": (
        lambda y: map(abs, y),
        "a map at out, which can be read only once: return a list instead.",
    ),
    "set": (lambda y: {y, y + 1}, "a set at out, which has no order: return a list instead."),
    "function": (
        lambda y: [lambda: y],
        "a function at out[0], which is a function: return what it computes instead.",
    ),
    "module": (
        lambda y: (y, nn.Linear(2, 2)),
        "a Linear at out[1], which is a module: return tensors instead.",
    ),
    "opaque": (
        lambda y: (y, object()),
        (
            "an object at out[1], whose contents cannot be read: return tensors in lists, dicts or "
            "dataclasses."
        ),
    ),
    "nested tensor": (
        lambda y: torch.nested.nested_tensor(list(y), layout=torch.jagged),
        (
            "a nested tensor at out, whose rows differ in size: return a list of tensors, or a "
            "padded tensor."
        ),
    ),
    "masked tensor": (
        lambda y: torch.masked.masked_tensor(y.detach(), y > 0),
        "a MaskedTensor at out, which few operators support: return its data and its mask.",
    ),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_read_is_refused_by_name(kind: str) -> None:
    wrap, message = REFUSED[kind]
    with pytest.raises(ModelError) as error:
        read_outputs(wrap(torch.ones(2, 3)))
    assert str(error.value) == f"The model returns {message}"


@pytest.mark.parametrize("kind", ["generator", "set", "function", "module", "opaque"])
def test_a_model_that_returns_such_a_thing_is_not_planned(kind: str) -> None:
    wrap, message = REFUSED[kind]
    with pytest.raises(ModelError) as error:
        fpgm.plan(Head(wrap), X, rate=0.5, align=1)
    assert str(error.value) == f"The model returns {message}"


def test_a_packed_sequence_is_read() -> None:
    packed = pack_padded_sequence(torch.ones(3, 2, 4), torch.tensor([3, 2]))
    assert [leaf.path for leaf in read_outputs(packed)][:2] == ["out.data", "out.batch_sizes"]


def test_a_transformers_output_counts_each_tensor_once() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    result = outputs.SequenceClassifierOutput(logits=torch.ones(2))
    assert [leaf.path for leaf in read_outputs(result) if leaf.is_tensor] == ["out['logits']"]


def test_a_tensor_returned_twice_counts_twice() -> None:
    assert len(tensors_in((X, [X]))) == 2


def test_inputs_that_are_no_output_are_skipped_quietly() -> None:
    assert tensors_in((X, object(), (n for n in range(2)))) == [X]


@pytest.mark.parametrize(
    "store",
    [
        lambda y: torch.quantize_per_tensor(y.float(), 0.01, 0, torch.qint8),
        lambda y: y.to_sparse(),
        lambda y: y.to_sparse_csr(),
    ],
    ids=["quantized", "sparse", "sparse rows"],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_outputs_that_are_not_stored_densely_are_certified(store: Callable[[Tensor], Any]) -> None:
    assert fpgm.prune(Head(store), X, rate=0.5, align=1).fpgm_plans
