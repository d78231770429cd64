"""What each method chooses, in cases worked out by hand."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from tests.helpers.baseline_tasks import Two, data, task_of
from tests.helpers.recoverable import Streams, stir
from torch import Tensor, nn

import fpgm
from fpgm.paper.baselines import pfec, rethinking
from fpgm.paper.baselines.base import num_unit_classes, prune_and_verify
from fpgm.paper.baselines.bn_scales import batch_norm_scales
from fpgm.paper.baselines.cp import lasso_scores
from fpgm.paper.baselines.global_threshold import prune_globally
from fpgm.paper.baselines.group_norm import _UnitParameters
from fpgm.paper.baselines.hrank import mean_map_ranks
from fpgm.paper.baselines.nisp import _spearman, inf_fs, last_layer_inputs, propagate_importance
from fpgm.paper.baselines.pfec import accuracy_drops, skip_sensitive_layers_
from fpgm.paper.baselines.registry import METHODS, SgdSchedule, Task
from fpgm.paper.baselines.rethinking import (
    _rescaling_is_exact,
    memory_penalties,
    rescale_batch_norms_,
    soft_threshold_,
)
from fpgm.paper.baselines.taylor import taylor_scores
from fpgm.paper.baselines.thinet import compensation_factors, removal_order
from fpgm.paper.baselines.unit_contributions import group_products, measure_consumers
from fpgm.planning.planner import Planner


@pytest.fixture
def two() -> Two:
    return stir(Two()).eval()  # type: ignore[return-value]


class TestContributions:
    def test_summands_add_up_to_the_output(self, two: Two) -> None:
        """The products of all summands together are the square of what the layer gives."""
        task = task_of(two, images=64)
        planner = task.planner()
        (pool,) = planner.structure.groups
        together = group_products(planner, pool, measure_consumers(task, planner))
        assert together is not None
        x = torch.cat([x for x, _ in task.loader])
        with torch.no_grad():
            hidden = two.norm(two.a(x)).relu()
            out = nn.functional.conv2d(hidden, two.b.weight, padding=1).double()
            single = [
                nn.functional.conv2d(hidden[:, i : i + 1], two.b.weight[:, i : i + 1], padding=1)
                for i in range(8)
            ]
        assert float(together.sum()) == pytest.approx(float(out.square().sum()) / 64, rel=1e-3)
        pair = float((single[1].double() * single[5].double()).sum()) / 64
        assert float(together[1, 5]) == pytest.approx(pair, rel=1e-2, abs=1e-6)

    def test_thinet_misses_least(self) -> None:
        """Greedy, against trying every pair."""
        x = torch.randn(50, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        order = removal_order(x.T @ x)
        first, second = int(order[0]), int(order[1])
        alone = [float(x[:, i].square().sum()) for i in range(6)]
        assert first == min(range(6), key=lambda i: alone[i])
        with_first = {i: float((x[:, first] + x[:, i]).square().sum()) for i in range(6)}
        del with_first[first]
        assert second == min(with_first, key=lambda i: with_first[i])

    def test_thinet_scales_by_least_squares(self) -> None:
        x = torch.randn(50, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        stays = torch.tensor([True, False, True, True, False, True])
        wanted = torch.linalg.lstsq(x[:, stays], x.sum(1)).solution
        torch.testing.assert_close(
            compensation_factors(x.T @ x, stays), wanted, rtol=1e-4, atol=1e-4
        )

    def test_thinet_makes_up_for_a_copy(self) -> None:
        """Of two equal filters one goes and the other counts twice: nothing changes."""
        model = Two(norm=False).eval()
        with torch.no_grad():
            model.a.weight[3] = model.a.weight[5]
            model.a.bias[3] = model.a.bias[5]  # type: ignore[index]
            model.b.weight[:, 3] = 1e-3 * model.b.weight[:, 5]
        result = METHODS["thinet"].prune(task_of(model, 0.1))
        assert result.plan is not None
        x = data()[0][0]
        with torch.no_grad():
            torch.testing.assert_close(result.model(x), model(x), rtol=1e-3, atol=1e-4)

    def test_cp_solves_the_lasso(self) -> None:
        """Orthogonal summands enter by their size: there the solution is a soft threshold."""
        sizes = torch.tensor([3.0, 1.0, 2.0, 0.5])
        assert lasso_scores(torch.diag(sizes.square())).argsort().tolist() == [3, 1, 2, 0]

    def test_cp_lets_a_copy_in_last(self) -> None:
        x = torch.randn(100, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        x[:, 3] = 0.5 * x[:, 0]
        assert int(lasso_scores(x.T @ x).argmin()) == 3

    def test_branches_into_streams_are_not_pruned(self) -> None:
        """Nobody reads what a branch adds by itself."""
        model = stir(Streams()).eval()
        result = METHODS["thinet"].prune(task_of(model, 0.3, residual="independent"))
        assert result.plan is not None
        pruned = {g.name for g in result.plan.groups if g.kept < g.units}
        assert "one.0" in pruned
        why = {layer: frozen.reason for frozen in result.plan.frozen for layer in frozen.layers}
        assert why["two.0"] == "no layer consumes its output directly"


class TestGlobalThreshold:
    def chain(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 2, 1)
        ).eval()

    def scores(self, planner: Planner, *values: Tensor) -> Tensor:
        result = torch.zeros(num_unit_classes(planner), dtype=torch.float64)
        for group, item in zip(planner.structure.groups, values, strict=True):
            result[group.units] = item.double()
        return result

    def test_all_layers_share_one_threshold(self) -> None:
        planner = Task(self.chain(), torch.zeros(1, 3, 8, 8), 0.5).planner()
        scores = self.scores(planner, torch.arange(8.0) + 1, torch.arange(8.0) + 5)
        result = prune_globally(planner, "mine", scores)
        assert result.plan is not None
        first, second = result.plan.groups
        level = 8 - first.kept  # scores up to this went from the first layer
        assert second.kept == 8 - max(0, level - 4)
        assert first.kept < second.kept
        assert result.plan.asked["criterion"] == "mine"

    def test_scores_decide_what_is_removed_not_norms(self) -> None:
        model = self.chain()
        with torch.no_grad():  # norms rise with the number, scores fall
            model[0].weight.mul_(torch.arange(1.0, 9.0).view(8, 1, 1, 1))  # type: ignore[union-attr,operator]
        planner = Task(model, torch.zeros(1, 3, 8, 8), 0.3).planner()
        scores = self.scores(planner, torch.arange(8.0).flip(0), 100 + torch.arange(8.0))
        result = prune_globally(planner, "mine", scores)
        assert result.plan is not None
        keep = next(c.keep for c in result.plan.cuts if c.tensor == "0.weight")
        assert keep == tuple(range(len(keep)))

    def test_equal_scores_are_not_all_removed_together(self) -> None:
        """As many go as were asked for, the same share of both layers."""
        planner = Task(self.chain(), torch.zeros(1, 3, 8, 8), 0.4).planner()
        scores = self.scores(planner, torch.zeros(8), torch.zeros(8))
        result = prune_globally(planner, "mine", scores)
        assert result.macs_removed == pytest.approx(0.4, abs=0.1)
        assert result.plan is not None
        first, second = result.plan.groups
        assert abs(first.kept - second.kept) <= 1

    def test_too_much(self, two: Two) -> None:
        planner = task_of(two, 0.999).planner()
        with pytest.raises(fpgm.RequestError, match=r"macs=0\.999 cannot be reached"):
            prune_globally(planner, "mine", torch.ones(num_unit_classes(planner)).double())


class TestTaylor:
    def test_by_hand(self) -> None:
        """One output, one weight: the score is (gradient · weight)²."""
        model = Two(norm=False).eval()
        task = task_of(model, images=16)
        planner = task.planner()
        x, classes = task.loader[0]  # type: ignore[index]
        nn.functional.cross_entropy(model(x), classes).backward()
        assert model.a.weight.grad is not None
        wanted = (model.a.weight * model.a.weight.grad).sum((1, 2, 3)).square()
        (pool,) = planner.structure.groups
        result = taylor_scores(task, planner)[pool.units]
        torch.testing.assert_close(result, wanted.detach().double(), rtol=1e-4, atol=1e-9)
        model.zero_grad()
        row_result = METHODS["taylor"].prune(task)
        assert row_result.plan is not None
        keep = next(c.keep for c in row_result.plan.cuts if c.tensor == "a.weight")
        assert set(keep) == set(wanted.argsort(descending=True)[: len(keep)].tolist())


class TestGroupNorm:
    def test_all_parameters_of_a_unit_count(self, two: Two) -> None:
        planner = task_of(two).planner()
        (pool,) = planner.structure.groups
        result = _UnitParameters(planner).squared_sums()[pool.units]
        parts = (
            two.a.weight.square().sum((1, 2, 3)), two.a.bias.square(),  # type: ignore[union-attr]
            two.norm.weight.square(), two.norm.bias.square(),  # type: ignore[union-attr]
            two.b.weight.square().sum((0, 2, 3)),
        )  # fmt: skip
        wanted = sum(part.detach().double() for part in parts)
        torch.testing.assert_close(result, wanted, rtol=1e-5, atol=1e-6)

    def test_the_smallest_is_pulled_hardest(self, two: Two) -> None:
        planner = task_of(two).planner()
        (pool,) = planner.structure.groups
        groups = _UnitParameters(planner)
        sums, pulls = groups.squared_sums()[pool.units], groups.decay_factors()[pool.units]
        assert pulls[sums.argmin()] == 16
        assert pulls[sums.argmax()] == 1


class TestHRank:
    def test_ranks_of_maps(self) -> None:
        """A channel that is constant over the image has rank 1 at most; noise has full rank."""

        class Maps(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 6, 1)

            def forward(self, x: Tensor) -> Tensor:
                return self.b(self.a(x)).mean((2, 3))

        model = Maps().eval()
        with torch.no_grad():
            model.a.weight[1] = 0
            model.a.bias[1] = 2.0  # type: ignore[index]
            model.a.weight[2] = 0
            model.a.bias[2] = 0.0  # type: ignore[index]
        task = task_of(model)
        assert mean_map_ranks(task, task.planner())["a"].tolist() == [6, 1, 0, 6]

    def test_a_stream_has_other_maps_behind_every_layer(self) -> None:
        """The stem's second map is constant until `two` adds another to it."""
        model = stir(Streams(norm=False)).eval()
        with torch.no_grad():
            model.stem[0].weight[1] = 0
            model.stem[0].bias[1] = 2.0
            model.two[0].weight[2] = 0
            model.two[0].bias[2] = 0.0
        task = task_of(model, residual="independent")
        result = mean_map_ranks(task, task.planner(residual="coupled"))
        assert result["stem.0"][1] == 1
        assert result["two.0"][1] > 3
        assert result["two.0"][2] > 1  # nothing of its own, but what it is added to

    def test_layers_whose_feature_maps_have_no_consumer(self) -> None:
        """A convolution in front of a pooling counts by its own maps, linear units stay whole."""
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 6),
        ).eval()  # fmt: skip
        with torch.no_grad():
            model[2].weight[:3] = 0  # type: ignore[union-attr,operator,index]
            model[2].bias[:3] = torch.tensor([-1.0, 0.0, 2.0])  # type: ignore[union-attr,operator,index]
        result = METHODS["hrank"].prune(task_of(model, 0.3))
        assert result.plan is not None
        why = {layer: frozen.reason for frozen in result.plan.frozen for layer in frozen.layers}
        assert why["6"] == "it has no feature maps to compute a rank of"
        keep = next(c.keep for c in result.plan.cuts if c.tensor == "2.weight" and c.dim == 0)
        assert keep == (2, 3, 4, 5, 6, 7)  # ranks 1, 0, 1, then full ones


class TestNisp:
    def test_handed_back_by_the_sizes_of_weights(self) -> None:
        model = nn.Sequential(
            nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 6),
        ).eval()  # fmt: skip
        planner = Task(model, torch.zeros(1, 3, 4, 4), 0.3).planner()
        worth = propagate_importance(planner, "6", torch.tensor([2.0, 1.0]))
        weight = model[2].weight.detach()[:, :, 0, 0].abs().double()  # type: ignore[union-attr,operator,index]
        wanted = 2 * weight[0] + weight[1]
        self.check(worth["0"], wanted)

    @staticmethod
    def sizes(layer: nn.Conv2d) -> Tensor:
        return layer.weight.detach().double().abs().sum((2, 3))

    @staticmethod
    def check(results: Tensor, wanted: Tensor) -> None:
        """The same but for a factor."""
        torch.testing.assert_close(results / results.sum(), wanted / wanted.sum())

    def test_a_stream_gets_from_all_who_read_it(self) -> None:
        """By hand: what `three` and `short` hand back, and `one` through what it makes of `two`."""
        model = stir(Streams()).eval()
        planner = task_of(model).planner(residual="coupled")
        worth = propagate_importance(planner, "head", torch.ones(24, dtype=torch.float64))

        def back(layer: nn.Module, s: Tensor) -> Tensor:
            weight: Tensor = layer[0].weight  # type: ignore[index]
            return s @ weight.detach().double().abs().sum((2, 3))

        head = torch.ones(24, dtype=torch.float64)
        stream = back(model.three, back(model.four, head)) + back(model.short, head)
        self.check(worth["stem.0"], stream + back(model.one, back(model.two, stream)))
        self.check(worth["two.0"], stream)  # `one` reads what is there before it
        self.check(worth["four.0"], head)

    def test_layers_of_one_stream_lose_different_units(self) -> None:
        """Where they are pruned each on its own, what `one` reads counts for the stem only."""
        model = stir(Streams()).eval()
        with torch.no_grad():
            model.one[0].weight.zero_()
            model.one[0].weight[:, 8:] = 5.0
            for layer in (model.three, model.short):
                layer[0].weight[:, :8] *= 20
        task = task_of(model, 0.2, residual="independent")
        plan = METHODS["nisp"].prune(task).plan
        assert plan is not None
        kept = {c.tensor: set(c.keep) for c in plan.cuts if c.dim == 0}
        assert kept["two.0.weight"] >= set(range(8))
        assert kept["stem.0.weight"] >= set(range(8, 16))

    def test_depthwise_filters_pass_by_their_size(self) -> None:
        model = nn.Sequential(
            nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 6),
        ).eval()  # fmt: skip
        planner = Task(model, torch.zeros(1, 3, 4, 4), 0.3).planner()
        worth = propagate_importance(planner, "5", torch.ones(4, dtype=torch.float64))
        self.check(worth["0"], model[1].weight.detach().double().abs().sum((1, 2, 3)))  # type: ignore[union-attr,operator]

    def test_what_goes_around_a_depthwise_filter_does_not_pass_through_it(self) -> None:
        class Around(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.stem, self.deep = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3, padding=1, groups=4)
                self.wide, self.back = nn.Conv2d(4, 8, 1), nn.Conv2d(8, 4, 1)
                self.head = nn.Linear(4, 6)

            def forward(self, x: Tensor) -> Tensor:
                x = self.stem(x)
                x = x + self.back(self.wide(self.deep(x)).relu())
                return self.head(x.mean((2, 3)))

        model = Around().eval()
        planner = Task(model, torch.zeros(1, 3, 4, 4), 0.3).planner()
        head = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
        worth = propagate_importance(planner, "head", head)

        branch = head @ self.sizes(model.back) @ self.sizes(model.wide)
        self.check(worth["stem"], head + branch * self.sizes(model.deep)[:, 0])
        self.check(worth["back"], head)

    def test_a_gate_does_not_bypass_a_depthwise_filter(self) -> None:
        """By hand: what `out` reads, and what the gate reads of the mean, both through `deep`."""

        class Gated(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.deep = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3, padding=1, groups=4)
                self.fc1, self.fc2 = nn.Conv2d(4, 2, 1), nn.Conv2d(2, 4, 1)
                self.out, self.head = nn.Conv2d(4, 5, 1), nn.Linear(5, 6)

            def forward(self, x: Tensor) -> Tensor:
                x = self.deep(self.a(x))
                x = x * self.fc2(self.fc1(x.mean((2, 3), keepdim=True)).relu()).sigmoid()
                return self.head(self.out(x).mean((2, 3)))

        model = Gated().eval()
        planner = Task(model, torch.zeros(1, 3, 4, 4), 0.3).planner()
        head = torch.arange(1.0, 6.0, dtype=torch.float64)
        worth = propagate_importance(planner, "head", head)

        read = head @ self.sizes(model.out)
        behind = read + read @ self.sizes(model.fc2) @ self.sizes(model.fc1)
        self.check(worth["deep"], behind)
        self.check(worth["a"], behind * self.sizes(model.deep)[:, 0])

    def test_tokens_are_not_taken_for_channels(self) -> None:
        """[inputs, tokens, channels], as many tokens as channels."""

        class Tokens(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.head = nn.Conv2d(3, 4, 3, 3), nn.Linear(4, 6)

            def forward(self, x: Tensor) -> Tensor:
                return self.head(self.a(x).flatten(2).transpose(1, 2)).mean(1)

        model = Tokens().eval()
        task = task_of(model)
        x = torch.cat([x for x, _ in task.loader])[:32]
        with torch.no_grad():
            wanted = model.a(x).mean((2, 3))
        torch.testing.assert_close(last_layer_inputs(task, "head"), wanted)

    def test_sparse_features_that_are_independent(self) -> None:
        """Equal values are equal in rank: many zeros are no agreement."""
        random = torch.Generator().manual_seed(0)
        x = torch.rand(2000, 3, generator=random) * (torch.rand(2000, 3, generator=random) > 0.9)
        result = _spearman(x.double())
        assert float((result - torch.eye(3)).abs().max()) < 0.1

    def test_features_that_say_the_same_count_less(self) -> None:
        random = torch.Generator().manual_seed(0)
        x = torch.randn(200, 4, generator=random)
        x = torch.cat([x, x[:, :1], x[:, :1]], 1)
        scores = inf_fs(x)
        assert scores[[0, 4, 5]].max() < scores[[1, 2, 3]].min()


class TestRethinking:
    def test_rescaling_is_the_same_function(self) -> None:
        for model in (stir(Two()), stir(Streams())):
            net = copy.deepcopy(model).eval()
            planner = task_of(net).planner()
            x = data()[0][0]
            wanted = net(x)
            rescale_batch_norms_(net, planner, batch_norm_scales(planner), 0.1)
            torch.testing.assert_close(net(x), wanted, rtol=1e-3, atol=1e-4)
            small = [m for m in net.modules() if isinstance(m, nn.BatchNorm2d)]
            large = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
            shrunk = [
                float((a.weight.abs().max() / b.weight.abs().max()).detach())
                for a, b in zip(small, large, strict=True)
            ]
            assert min(shrunk) == pytest.approx(0.1)
            rescale_batch_norms_(net, planner, batch_norm_scales(planner), 10.0)
            for a, b in zip(small, large, strict=True):
                torch.testing.assert_close(a.weight, b.weight)

    @pytest.mark.parametrize(("activation", "passes"), [(nn.ReLU(), True), (nn.ReLU6(), False)])
    def test_where_factors_do_not_pass_scales_stay(
        self, activation: nn.Module, passes: bool
    ) -> None:
        """Found on data: an image of zeros would not tell."""

        class Acted(Two):
            def forward(self, x: Tensor) -> Tensor:
                return self.b(activation(10 * self.norm(self.a(x)))).mean((2, 3))

        net = stir(Acted()).eval()
        before = copy.deepcopy(net.state_dict())
        task = task_of(net)
        planner = replace(task, example=torch.zeros(1, 3, 6, 6)).planner()
        assert _rescaling_is_exact(task, planner, batch_norm_scales(planner)) == passes
        for key, value in net.state_dict().items():
            torch.testing.assert_close(value, before[key])

    def test_soft_thresholds_reach_zero_and_stay(self) -> None:
        scale = torch.tensor([0.3, -0.2, 1.0])
        for _ in range(3):
            soft_threshold_(scale, torch.tensor([0.1, 0.1, 0.1]))
        assert scale.tolist() == pytest.approx([0.0, 0.0, 0.7], abs=1e-6)

    def test_small_scales_are_sooner_at_zero(
        self, two: Two, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with torch.no_grad():
            two.b.weight.zero_()  # nothing pulls on the scales but thresholds
        task = task_of(two, before_pruning=SgdSchedule(1))
        for alpha, result in ((0.1, "0 of 8 "), (1e-6, "8 of 8 ")):
            monkeypatch.setattr(rethinking, "ALPHA", alpha)
            (note,) = METHODS["rethinking"].prune(task).notes
            assert note.startswith(result)

    @pytest.mark.parametrize("batch", [1, 4])
    def test_penalties_follow_memory(self, batch: int) -> None:
        """Weights that make a channel, weights that read it, and its map."""
        model = nn.Sequential(
            nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 3),
        ).eval()  # fmt: skip
        planner = Task(model, torch.zeros(batch, 4, 8, 8), 0.3).planner()
        first, second = memory_penalties(planner, batch_norm_scales(planner))
        one, two = 4 * 9 + 8 * 9 + 64, 4 * 9 + 2 * 9 + 16
        assert float(first[0] / second[0]) == pytest.approx(one / two)

    def test_without_batch_norms(self) -> None:
        with pytest.raises(fpgm.RequestError, match="This model has no batch norm"):
            METHODS["rethinking"].prune(task_of(Two(norm=False).eval()))
        with pytest.raises(fpgm.RequestError, match="No layer is followed by a batch norm"):
            METHODS["slimming"].prune(task_of(Two(norm=False).eval()))


class TestPfec:
    def test_sensitive_layers_are_not_pruned(self) -> None:
        """Labels are the model's own answers, so that accuracy falls where pruning hurts."""
        model = stir(Streams()).eval()
        with torch.no_grad():
            batches = [(x, model(x).argmax(1)) for x, _ in data(8)]
        task = Task(model, batches[0][0][:1], 0.2, loader=batches, images=128)
        planner = task.planner("l1")
        losses_ = accuracy_drops(planner, task)
        assert max(losses_.values()) > 0
        drop = sorted(losses_.values())[-2]
        skipped = set(skip_sensitive_layers_(planner, task, drop))
        assert skipped == set(planner.budget.rates)
        assert skipped == {layer for layer, loss in losses_.items() if loss > drop}
        result = prune_and_verify(planner)
        assert result.plan is not None
        assert all(g.kept == g.units for g in result.plan.groups if set(g.layers) & skipped)

    @pytest.mark.parametrize(
        ("drop", "start"), [(-1.0, "not pruned: "), (2.0, "no sensitive layer")]
    )
    def test_it_notes_which_layers_it_skips(
        self, drop: float, start: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(pfec.skip_sensitive_layers_, "__defaults__", (drop,))
        (note,) = METHODS["pfec-sensitivity"].prune(task_of(stir(Streams()).eval(), 0.2)).notes
        assert note.startswith(start)
