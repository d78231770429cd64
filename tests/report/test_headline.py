"""What stands on top of a report: a run in one sentence, without what is unknown or unreliable."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from tests.helpers.report_pages import Parts

import fpgm
from fpgm.pruning.plan import Group, Latency
from fpgm.report.headline import cards, summary
from fpgm.report.page import render_page
from fpgm.report.records import BenchRecord, ResultsRecord, decode
from fpgm.report.run import Run
from fpgm.report.settings import used_settings

BUSY = "other processes used 1.6 of 2 cores"


def timed(backend: str, faster: float, crowd: str | None = None) -> dict[str, Any]:
    """One row of bench.json: the original, and a model with half of its MACs."""
    figures = [
        {"model": "original", "seconds": 0.01, "spread": 0.02, "faster": 1.0},
        {"model": "small", "seconds": 0.01 / faster, "spread": 0.02, "faster": faster,
         "theory": 2.0},
    ]  # fmt: skip
    return {"backend": backend, "batch": 1, "threads": 1, "figures": figures, "crowd": crowd}


def made(*times: dict[str, Any], left: int = 50, **results: Any) -> Run:
    """A run that leaves so many of 100 MACs."""
    return Run(
        "small",
        decode(ResultsRecord, {"model": "resnet20", **results}),
        fpgm.Plan("", {}, (), macs_before=100, macs_after=left),
        bench=decode(BenchRecord, {"rows": list(times)}) if times else None,
    )


ACCURACY = {"original": 0.935, "compact": 0.2, "recovered": 0.931}
VERIFIED = {"ok": True, "max_error": 1e-14}


class TestSentence:
    def test_all_that_matters(self) -> None:
        run = made(timed("onnxruntime", 1.9), accuracy=ACCURACY, certificate=VERIFIED)
        sentence = (
            "Half of the work removed, 0.4 points lost, 1.9× faster in ONNX Runtime; verified."
        )
        assert summary(run) == sentence
        text = render_page(run)
        assert f'id="summary">{sentence}</p>' in text
        assert text.index('id="summary"') < text.index('class="cards"')

    @pytest.mark.parametrize(
        ("run", "sentence"),
        [
            (made(), "Half of the work removed."),
            (made(left=38), "62% of the work removed."),
            (made(left=100), "No work removed."),
            (made(accuracy={"original": 0.9, "compact": 0.912}),
             "Half of the work removed, 1.2 points gained."),
            (made(accuracy={"original": 0.9, "compact": 0.9}),
             "Half of the work removed, no accuracy lost."),
            (made(accuracy={"original": 0.9, "compact": None}), "Half of the work removed."),
            (made(timed("eager", 0.5)), "Half of the work removed, 2.0× slower in PyTorch."),
            (made(certificate={"ok": False}), "Half of the work removed; NOT verified."),
            (Run("a"), ""),
        ],
    )  # fmt: skip
    def test_only_what_is_known(self, run: Run, sentence: str) -> None:
        assert summary(run) == sentence

    def test_an_unreliable_time_is_left_out(self) -> None:
        assert summary(made(timed("openvino", 3.9, BUSY))) == "Half of the work removed."
        both = made(timed("openvino", 3.9, BUSY), timed("onnxruntime", 1.9))
        assert summary(both).endswith("1.9× faster in ONNX Runtime.")

    def test_the_time_of_a_latency_budget(self) -> None:
        @dataclass(frozen=True)
        class Doubted(Latency):
            crowd: str | None = BUSY

        values = ("onnxruntime", 1, 0.5, 0.4, 0.5, 0.01, 0.005)
        plan = fpgm.Plan("", {}, (), macs_before=100, macs_after=50, latency=Latency(*values))
        assert summary(Run("a", plan=plan)).endswith("removed, 2.0× faster in ONNX Runtime.")
        doubted = Run("a", plan=replace(plan, latency=Doubted(*values)))
        assert summary(doubted) == "Half of the work removed."
        assert [card.value for card in cards(doubted) if card.name == "Latency"] == ["unreliable"]

    def test_a_speedup_within_the_spread_of_the_times_is_none(self) -> None:
        row = timed("eager", 1.08)
        row["figures"][0]["spread"] = 0.3
        (card,) = (card for card in cards(made(row)) if card.name == "Latency")
        assert (card.value, card.tone) == ("as fast", "plain")
        assert card.detail.startswith("as original; ")
        assert summary(made(timed("eager", 1.2))).endswith("1.2× faster in PyTorch.")

    def test_random_weights_are_said_loudly(self) -> None:
        accuracy = {"original": 0.1, "compact": 0.1}
        run = made(untrained=True, accuracy=accuracy, certificate=VERIFIED)
        assert summary(run) == "Half of the work removed; verified; random weights."
        assert 'id="untrained"' in render_page(run)
        for untrained in (False, None):
            other = made(untrained=untrained, accuracy=accuracy)
            assert summary(other) == "Half of the work removed, no accuracy lost."
            assert 'id="untrained"' not in render_page(other)


class TestCards:
    def test_accuracy_before_and_after(self) -> None:
        run = made(accuracy=ACCURACY, test_images=10_000)
        (card,) = (card for card in cards(run) if card.name == "Accuracy")
        assert card.value == "93.5% → 93.1%"
        assert card.detail == "0.4 points lost; as pruned 20.00%; 10,000 test images"

    def test_times_and_speedup_agree(self) -> None:
        """Medians of files from earlier versions may contradict the paired runs."""
        row = timed("eager", 2.0)
        row["figures"][1]["seconds"] = 0.02
        text = render_page(made(row)).partition('id="speeds"')[2]
        assert '"Before">10<' in text
        assert '"After">5<' in text
        assert "2.0× faster" in text

    def test_times_of_every_runtime(self) -> None:
        text = render_page(made(timed("eager", 1.25), timed("openvino", 3.9, BUSY)))
        words = [word for word in Parts(text.partition('id="speeds"')[2]).words if word.strip()]
        row = words.index("PyTorch")
        assert words[row : row + 7] == ["PyTorch", "1", "1", "10", "8", "1.2× faster", "2.0×"]
        row = words.index("OpenVINO")
        assert words[row + 5] == f"unreliable: {BUSY}"


class TestSettings:
    def used(self, asked: dict[str, Any], **results: Any) -> dict[str, str]:
        return used_settings(made(asked=asked, **results))

    def test_fewer_images_than_requested(self) -> None:
        asked = {"images": 1024, "test": 2000, "recover": "solve"}
        recovery = {"method": "solve", "inputs": 900, "kept": "least squares"}
        used = self.used(asked, recovery=recovery, test_images=1000)
        assert used == {
            "images": "900 (1024 requested)",
            "test": "1000 (2000 requested)",
            "recover": "solve; best result: least squares",
        }
        recovery["inputs"] = 1024
        assert self.used(asked, recovery=recovery, test_images=2000)["images"] == "1024"

    @pytest.mark.parametrize(
        ("kept", "align", "shown"),
        [
            ((48, 12), 16, "4 (16 requested; narrow layers get smaller steps)"),
            ((48, 32), 16, "16"),
            ((64, 48), 16, "16"),  # the first is not pruned
            ((13, 32), 1, "1"),
        ],
    )
    def test_alignment_that_widths_really_have(
        self, kept: tuple[int, int], align: int, shown: str
    ) -> None:
        groups = tuple(Group(str(n), (str(n),), 64, n) for n in kept)
        results = decode(ResultsRecord, {"asked": {"align": align}})
        run = Run("a", results, fpgm.Plan("", {}, (), groups=groups))
        assert used_settings(run)["align"] == shown

    def test_options_without_an_effect_are_left_out(self) -> None:
        asked = {"criterion": "fpgm", "distance": "l2", "rounding": "paper", "align": 16}
        assert list(self.used(asked)) == ["criterion", "distance", "rounding"]
        assert list(self.used({**asked, "criterion": "l1"})) == ["criterion", "rounding"]

    def test_the_weights_and_the_input(self) -> None:
        used = self.used({}, weights={"file": "a.safetensors", "sha256": "0"}, input=[1, 3, 8, 8])
        assert used == {"weights": "a.safetensors", "input": "1×3×8×8"}

    def test_a_recipe(self) -> None:
        recipe = {"prune.criterion": "l2", "prune.distance": "l2", "train.epochs": "3"}
        used = used_settings(Run("a", recipe=recipe))
        assert used == {"prune.criterion": "l2", "train.epochs": "3"}
