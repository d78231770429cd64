"""Passes that stop where a layer is to be solved for, and go on with its new weights.

A layer is solved with what the layers before it, already solved, feed it. To run the model anew for
each would take the square of its depth, so a pass waits at its stop, in a thread of its own.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fpgm.recovery.solvable_layers import Site, is_sum
from fpgm.recovery.unfold import read
from fpgm.utils.calibration_data import Inputs
from fpgm.utils.copying import shadow
from fpgm.utils.example_inputs import Example
from fpgm.utils.modules import module_at


@dataclass
class Seen:
    """What a layer read and wrote at each call, and the sum behind it, with the other operand."""

    inputs: list[Tensor] = field(default_factory=list)
    others: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    """What else the layer was given at each call."""
    outputs: list[Tensor] = field(default_factory=list)
    total: Tensor | None = None
    other: Tensor | None = None


class _LeftError(BaseException):
    """Nobody waits for this pass any more. No `Exception`: a model's own code may catch those."""


class Walk:
    """One pass over one batch, from stop to stop."""

    def __init__(
        self,
        model: nn.Module,
        sites: Sequence[Site],
        example: Example,
        *,
        first: int = 0,
        renew: bool = False,
    ) -> None:
        """Stops at the sites from number `first` on.

        With `renew` what a layer wrote is written anew when the pass goes on: its weights have
        changed.
        """
        self._model = shadow(model)  # the same weights, but passes do not share attributes
        self._sites, self._example, self._renew = sites, example, renew
        self._calls: Counter[str] = Counter()
        self._seen: dict[int, Seen] = {}
        self._at: int | None = None
        self._error: BaseException | None = None
        self._done = self._left = False
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._sums: dict[int, list[int]] = {}
        for number, site in list(enumerate(sites))[first:]:
            # Before any adapter has placed or picked channels of the output.
            layer = module_at(self._model, site.layer)
            layer.register_forward_hook(self._hook(number), prepend=True, with_kwargs=True)
            if site.sum is not None:
                self._sums.setdefault(site.sum.number, []).append(number)

    def to(self, number: int) -> Seen | None:
        """Go on to a stop; None if this pass does not come by there."""
        while not self._done and (self._at is None or self._at < number):
            self._resume()
        if self._error is not None:
            raise self._error
        return self._seen[number] if self._at == number else None

    def close(self) -> None:
        """Leave the pass where it is."""
        self._left = True
        if self._thread.ident is not None and not self._done:
            self._resume()
        self._seen.clear()

    def _resume(self) -> None:
        self._seen.pop(-1 if self._at is None else self._at, None)
        self._at = None
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._go.release()
        self._stopped.acquire()

    def _run(self) -> None:
        try:
            with torch.no_grad(), _Sums(self._sum):
                self._example.call(self._model)
        except _LeftError:
            pass
        except BaseException as error:  # for whoever waits
            self._error = error
        finally:
            self._done = True
            self._stopped.release()

    def _wait(self, number: int) -> None:
        """Stop here until somebody wants more."""
        self._at = number
        self._stopped.release()
        self._go.acquire()
        if self._left:
            raise _LeftError

    def _hook(self, number: int) -> Callable[..., Tensor | None]:
        site = self._sites[number]

        def hook(module: nn.Module, args: Any, kwargs: Any, out: Tensor) -> Tensor | None:
            seen = self._seen.setdefault(number, Seen())
            x = read(args, kwargs)
            seen.others.append((args[1:], {k: v for k, v in kwargs.items() if k != "input"}))
            self._calls[site.layer] += 1
            if site.sum is not None or self._calls[site.layer] < site.calls:
                # The model goes on, and may write into what it passed on here.
                seen.inputs.append(x.clone())
                seen.outputs.append(out.clone())
                return None
            seen.inputs.append(x)
            seen.outputs.append(out)
            self._wait(number)
            renewed: Tensor | None = module.forward(*args, **kwargs) if self._renew else None
            return renewed

        return hook

    def _sum(self, which: int, operands: Sequence[Tensor]) -> None:
        """Two activations are about to be added."""
        for number in self._sums.get(which, ()):
            site, seen = self._sites[number], self._seen.get(number)
            if seen is None or operands[0].shape != operands[1].shape:
                continue  # this batch takes another way
            assert site.sum is not None
            branch = operands[site.sum.operand]
            seen.other = operands[1 - site.sum.operand]
            seen.total = branch + seen.other
            self._wait(number)
            if self._renew:
                branch.copy_(self._branch(site, seen, branch))

    def _branch(self, site: Site, seen: Seen, before: Tensor) -> Tensor:
        """What a layer now sends to its sum."""
        args, kwargs = seen.others[0]
        out: Tensor = module_at(self._model, site.layer).forward(seen.inputs[0], *args, **kwargs)
        if site.norm is not None:
            out = module_at(self._model, site.norm).forward(out)
        assert site.sum is not None
        if site.sum.places is None:
            return out
        places = torch.tensor(site.sum.places, device=out.device)
        return torch.zeros_like(before).index_copy(site.sum.dim, places, out)


class _Sums(TorchDispatchMode):
    """Says when two activations are about to be added, and for the how-manieth time."""

    def __init__(self, tell: Callable[[int, Sequence[Tensor]], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tell = tell
        self._number = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if is_sum(func, args, kwargs):
            self._tell(self._number, args)
            self._number += 1
        return func(*args, **(kwargs or {}))


class Walks:
    """Both models' passes over all batches, side by side."""

    def __init__(
        self,
        model: nn.Module,
        small: nn.Module,
        sites: Sequence[Site],
        inputs: Inputs,
        waiting: int,
    ) -> None:
        """The first so many batches' passes wait at each stop; the others' are made anew."""
        self.sites, self.inputs = sites, inputs
        self._model, self._small, self._waiting = model, small, waiting
        self._walks: dict[int, tuple[Walk, Walk]] = {}

    def at(self, number: int) -> Iterator[tuple[int, Seen, Seen]]:
        """Batch by batch: its number, what the compact model's layer saw, and the original's."""
        for batch in range(len(self.inputs)):
            pair = self._walks.get(batch) or self._start(batch, number)
            mine, theirs = (walk.to(number) for walk in pair)
            if mine is not None and theirs is not None:
                yield batch, mine, theirs
            # What lies between two calls of a layer has seen its old weights.
            if batch >= self._waiting or self.sites[number].calls > 1:
                for walk in self._walks.pop(batch):
                    walk.close()

    def close(self) -> None:
        """Leave all passes where they are."""
        for pair in self._walks.values():
            for walk in pair:
                walk.close()
        self._walks.clear()

    def _start(self, batch: int, number: int) -> tuple[Walk, Walk]:
        example = self.inputs[batch]
        self._walks[batch] = (
            Walk(self._small, self.sites, example, first=number, renew=True),
            Walk(self._model, self.sites, example, first=number),
        )
        return self._walks[batch]
