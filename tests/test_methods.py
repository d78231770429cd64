"""Every compared method: what it chooses in cases worked out by hand, and that all run anywhere."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.recoverable import Streams, stir
from torch import Tensor, nn

import fpgm
from fpgm.methods import METHODS, Schedule, Task, find
from fpgm.methods import comparison as cmp
from fpgm.methods.contributions import look, products
from fpgm.methods.cp import path
from fpgm.methods.everywhere import cut_everywhere
from fpgm.methods.group_norm import _Groups
from fpgm.methods.hrank import ranks
from fpgm.methods.nisp import _spearman, handed_back, inf_fs
from fpgm.methods.pfec import sensitivities, spare_
from fpgm.methods.rethinking import _passes, penalties_of, rescale_, soften_
from fpgm.methods.scales import norms_of
from fpgm.methods.task import classes_of, cut, train_
from fpgm.methods.taylor import losses
from fpgm.methods.thinet import greedy, scaling
from fpgm.planning import Planner

PRUNING = [name for name in METHODS if name != "mil"]


def data(count: int = 4, classes: int = 6) -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(3)
    return [
        (torch.randn(16, 3, 6, 6, generator=random),
         torch.randint(0, classes, (16,), generator=random))
        for _ in range(count)
    ]  # fmt: skip


def task_of(model: nn.Module, macs: float = 0.4, **options: Any) -> Task:
    batches = data()
    options = {"before": Schedule(4), "images": 32, **options}
    return Task(model, batches[0][0][:1], macs, loader=batches, **options)


class Two(nn.Module):
    """A convolution with eight filters and one that reads them, with a norm between."""

    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8) if norm else nn.Identity()
        self.b = nn.Conv2d(8, 6, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.norm(self.a(x)).relu()).mean((2, 3))


@pytest.fixture
def two() -> Two:
    return stir(Two()).eval()  # type: ignore[return-value]


class TestAll:
    @pytest.mark.parametrize("residual", ["coupled", "independent"])
    @pytest.mark.parametrize("name", PRUNING)
    def test_a_certified_smaller_model_of_the_asked_size(self, name: str, residual: Any) -> None:
        """And the caller's model stays as it was."""
        model = stir(Streams()).eval()
        before = copy.deepcopy(model.state_dict())
        found = METHODS[name].prune(task_of(model, residual=residual))
        assert found.plan is not None
        assert found.macs_removed == pytest.approx(0.4, abs=0.06)
        trained = model if found.trained is None else found.trained
        assert fpgm.verify(trained, found.plan, data()[0][0][:2]).ok
        assert found.plan.asked["criterion"]
        x = data()[0][0]
        assert found.model.eval()(x).shape == model(x).shape
        assert all(torch.equal(before[key], v) for key, v in model.state_dict().items())
        assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())

    @pytest.mark.parametrize("name", PRUNING)
    def test_in_train_mode_and_frozen(self, name: str) -> None:
        model = stir(Streams()).train().requires_grad_(False)
        before = copy.deepcopy(model.state_dict())
        METHODS[name].prune(task_of(model, before=Schedule(2)))
        assert model.training
        assert all(torch.equal(before[key], v) for key, v in model.state_dict().items())

    @pytest.mark.parametrize("name", [n for n in PRUNING if METHODS[n].needs != "weights"])
    def test_after_a_loader_that_fails(self, name: str) -> None:
        """Nothing is left hanging on the model."""

        def broken() -> Iterator[Any]:
            yield data()[0]
            raise OSError("the disk is gone")

        class Broken:
            def __iter__(self) -> Iterator[Any]:
                return broken()

        model = stir(Streams()).eval()
        task = Task(model, data()[0][0][:1], 0.4, loader=Broken(), images=64, before=Schedule(3))
        with pytest.raises(OSError, match="the disk is gone"):
            METHODS[name].prune(task)
        assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())

    def test_each_says_where_it_comes_from(self) -> None:
        for method in METHODS.values():
            assert method.about.endswith(".")
            assert method.cite or method.name in ("l2", "random")

    def test_a_name_that_is_none(self) -> None:
        with pytest.raises(fpgm.RequestError, match=r"no method 'thinnet' \(did you mean 'thinet'"):
            find("thinnet")

    def test_batches_without_classes(self, two: Two) -> None:
        task = Task(two, data()[0][0][:1], 0.4, loader=[x for x, _ in data()])
        with pytest.raises(fpgm.RequestError, match="batches without classes"):
            METHODS["taylor"].prune(task)


class TestContributions:
    def test_summands_add_up_to_the_output(self, two: Two) -> None:
        """The products of all summands together are the square of what the layer gives."""
        task = task_of(two, images=64)
        planner = task.planner()
        (pool,) = planner.structure.pools
        together = products(planner, pool, look(task, planner))
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
        order = greedy(x.T @ x)
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
        torch.testing.assert_close(scaling(x.T @ x, stays), wanted, rtol=1e-4, atol=1e-4)

    def test_thinet_makes_up_for_a_copy(self) -> None:
        """Of two equal filters one goes and the other counts twice: nothing changes."""
        model = Two(norm=False).eval()
        with torch.no_grad():
            model.a.weight[3] = model.a.weight[5]
            model.a.bias[3] = model.a.bias[5]  # type: ignore[index]
            model.b.weight[:, 3] = 1e-3 * model.b.weight[:, 5]
        found = METHODS["thinet"].prune(task_of(model, 0.1))
        assert found.plan is not None
        x = data()[0][0]
        with torch.no_grad():
            torch.testing.assert_close(found.model(x), model(x), rtol=1e-3, atol=1e-4)

    def test_cp_solves_the_lasso(self) -> None:
        """Orthogonal summands enter by their size: there the solution is a soft threshold."""
        sizes = torch.tensor([3.0, 1.0, 2.0, 0.5])
        assert path(torch.diag(sizes.square())).argsort().tolist() == [3, 1, 2, 0]

    def test_cp_lets_a_copy_in_last(self) -> None:
        x = torch.randn(100, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        x[:, 3] = 0.5 * x[:, 0]
        assert int(path(x.T @ x).argmin()) == 3

    def test_branches_into_streams_stay_whole(self) -> None:
        """Nobody reads what a branch adds by itself."""
        model = stir(Streams()).eval()
        found = METHODS["thinet"].prune(task_of(model, 0.3, residual="independent"))
        assert found.plan is not None
        whole = {g.name for g in found.plan.groups if g.kept == g.units}
        assert "two.0" in whole
        assert "one.0" not in whole


class TestEverywhere:
    def chain(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 2, 1)
        ).eval()

    def scores(self, planner: Planner, *pools: Tensor) -> Tensor:
        found = torch.zeros(classes_of(planner), dtype=torch.float64)
        for pool, own in zip(planner.structure.pools, pools, strict=True):
            found[pool.units] = own.double()
        return found

    def test_one_threshold(self) -> None:
        planner = Task(self.chain(), torch.zeros(1, 3, 8, 8), 0.5).planner()
        scores = self.scores(planner, torch.arange(8.0) + 1, torch.arange(8.0) + 5)
        found = cut_everywhere(planner, "mine", scores)
        assert found.plan is not None
        first, second = found.plan.groups
        level = 8 - first.kept  # scores up to this went from the first layer
        assert second.kept == 8 - max(0, level - 4)
        assert first.kept < second.kept
        assert found.plan.asked["criterion"] == "mine"

    def test_the_scores_say_which_go_and_not_the_norms(self) -> None:
        model = self.chain()
        with torch.no_grad():  # norms rise with the number, scores fall
            model[0].weight.mul_(torch.arange(1.0, 9.0).view(8, 1, 1, 1))  # type: ignore[union-attr,operator]
        planner = Task(model, torch.zeros(1, 3, 8, 8), 0.3).planner()
        scores = self.scores(planner, torch.arange(8.0).flip(0), 100 + torch.arange(8.0))
        found = cut_everywhere(planner, "mine", scores)
        assert found.plan is not None
        keep = next(c.keep for c in found.plan.cuts if c.tensor == "0.weight")
        assert keep == tuple(range(len(keep)))

    def test_too_much(self, two: Two) -> None:
        planner = task_of(two, 0.999).planner()
        with pytest.raises(fpgm.RequestError, match=r"macs=0\.999 cannot be reached"):
            cut_everywhere(planner, "mine", torch.ones(classes_of(planner)).double())


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
        (pool,) = planner.structure.pools
        found = losses(task, planner)[pool.units]
        torch.testing.assert_close(found, wanted.detach().double(), rtol=1e-4, atol=1e-9)
        model.zero_grad()
        made = METHODS["taylor"].prune(task)
        assert made.plan is not None
        keep = next(c.keep for c in made.plan.cuts if c.tensor == "a.weight")
        assert set(keep) == set(wanted.argsort(descending=True)[: len(keep)].tolist())


class TestGroupNorm:
    def test_all_that_goes_with_a_unit_counts(self, two: Two) -> None:
        planner = task_of(two).planner()
        (pool,) = planner.structure.pools
        found = _Groups(planner).sums()[pool.units]
        parts = (
            two.a.weight.square().sum((1, 2, 3)), two.a.bias.square(),  # type: ignore[union-attr]
            two.norm.weight.square(), two.norm.bias.square(),  # type: ignore[union-attr]
            two.b.weight.square().sum((0, 2, 3)),
        )  # fmt: skip
        wanted = sum(part.detach().double() for part in parts)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)

    def test_the_smallest_is_pulled_hardest(self, two: Two) -> None:
        planner = task_of(two).planner()
        (pool,) = planner.structure.pools
        groups = _Groups(planner)
        sums, pulls = groups.sums()[pool.units], groups.pulls()[pool.units]
        assert pulls[sums.argmin()] == 16
        assert pulls[sums.argmax()] == 1


class TestHRank:
    def test_ranks_of_maps(self) -> None:
        """A channel that is constant over the picture has rank 1 at most; noise has full rank."""

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
        planner = task.planner()
        (pool,) = planner.structure.pools
        found, known = ranks(task, planner)
        assert found[pool.units].tolist() == [6, 1, 0, 6]
        assert bool(known[pool.units].all())

    def test_layers_nobody_reads_a_map_of(self) -> None:
        """A convolution in front of a pooling counts by its own maps, linear units stay whole."""
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 6),
        ).eval()  # fmt: skip
        with torch.no_grad():
            model[2].weight[:3] = 0  # type: ignore[union-attr,operator,index]
            model[2].bias[:3] = torch.tensor([-1.0, 0.0, 2.0])  # type: ignore[union-attr,operator,index]
        found = METHODS["hrank"].prune(task_of(model, 0.3))
        assert found.plan is not None
        kept = {g.name: g.kept for g in found.plan.groups}
        assert kept["6"] == 16
        keep = next(c.keep for c in found.plan.cuts if c.tensor == "2.weight" and c.dim == 0)
        assert keep == (2, 3, 4, 5, 6, 7)  # ranks 1, 0, 1, then full ones


class TestNisp:
    def test_handed_back_by_the_sizes_of_weights(self) -> None:
        model = nn.Sequential(
            nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 6),
        ).eval()  # fmt: skip
        planner = Task(model, torch.zeros(1, 3, 4, 4), 0.3).planner()
        worth = handed_back(planner, "6", torch.tensor([2.0, 1.0]))
        weight = model[2].weight.detach()[:, :, 0, 0].abs().double()  # type: ignore[union-attr,operator,index]
        wanted = 2 * weight[0] + weight[1]
        first = next(w for w in planner.structure.writers if w.layer == "0")
        found = worth[first.classes]
        torch.testing.assert_close(found / found.sum(), wanted / wanted.sum())

    def test_a_stream_gets_from_all_who_read_it(self) -> None:
        """By hand: what `three` and `short` hand back, and `one` through what it makes of `two`."""
        model = stir(Streams()).eval()
        planner = task_of(model).planner(residual="coupled")
        worth = handed_back(planner, "head", torch.ones(24, dtype=torch.float64))

        def back(layer: nn.Module, s: Tensor) -> Tensor:
            weight: Tensor = layer[0].weight  # type: ignore[index]
            return s @ weight.detach().double().abs().sum((2, 3))

        head = torch.ones(24, dtype=torch.float64)
        stream = back(model.three, back(model.four, head)) + back(model.short, head)
        whole = stream + back(model.one, back(model.two, stream))
        stem = next(w for w in planner.structure.writers if w.layer == "stem.0")
        found = worth[stem.classes]
        torch.testing.assert_close(found / found.sum(), whole / whole.sum())

    def test_depthwise_filters_pass_by_their_size(self) -> None:
        model = nn.Sequential(
            nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 6),
        ).eval()  # fmt: skip
        planner = Task(model, torch.zeros(1, 3, 4, 4), 0.3).planner()
        worth = handed_back(planner, "5", torch.ones(4, dtype=torch.float64))
        wanted = model[1].weight.detach().double().abs().sum((1, 2, 3))  # type: ignore[union-attr,operator]
        first = next(w for w in planner.structure.writers if w.layer == "0")
        found = worth[first.classes]
        torch.testing.assert_close(found / found.sum(), wanted / wanted.sum())

    def test_sparse_features_that_are_independent(self) -> None:
        """Equal values are equal in rank: many zeros are no agreement."""
        random = torch.Generator().manual_seed(0)
        x = torch.rand(2000, 3, generator=random) * (torch.rand(2000, 3, generator=random) > 0.9)
        found = _spearman(x.double())
        assert float((found - torch.eye(3)).abs().max()) < 0.1

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
            rescale_(net, planner, norms_of(planner), 0.1)
            torch.testing.assert_close(net(x), wanted, rtol=1e-3, atol=1e-4)
            small = [m for m in net.modules() if isinstance(m, nn.BatchNorm2d)]
            large = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
            shrunk = [
                float((a.weight.abs().max() / b.weight.abs().max()).detach())
                for a, b in zip(small, large, strict=True)
            ]
            assert min(shrunk) == pytest.approx(0.1)
            rescale_(net, planner, norms_of(planner), 10.0)
            for a, b in zip(small, large, strict=True):
                torch.testing.assert_close(a.weight, b.weight)

    @pytest.mark.parametrize(("activation", "passes"), [(nn.ReLU(), True), (nn.ReLU6(), False)])
    def test_where_factors_do_not_pass_scales_stay(
        self, activation: nn.Module, passes: bool
    ) -> None:
        """Found on data: a picture of zeros would not tell."""

        class Acted(Two):
            def forward(self, x: Tensor) -> Tensor:
                return self.b(activation(10 * self.norm(self.a(x)))).mean((2, 3))

        net = stir(Acted()).eval()
        before = copy.deepcopy(net.state_dict())
        task = task_of(net)
        planner = replace(task, example=torch.zeros(1, 3, 6, 6)).planner()
        assert _passes(task, planner, norms_of(planner)) == passes
        for key, value in net.state_dict().items():
            torch.testing.assert_close(value, before[key])

    def test_soft_thresholds_reach_zero_and_stay(self) -> None:
        scale = torch.tensor([0.3, -0.2, 1.0])
        for _ in range(3):
            soften_(scale, torch.tensor([0.1, 0.1, 0.1]))
        assert scale.tolist() == pytest.approx([0.0, 0.0, 0.7], abs=1e-6)

    @pytest.mark.parametrize("batch", [1, 4])
    def test_penalties_follow_memory(self, batch: int) -> None:
        """Weights that make a channel, weights that read it, and its map."""
        model = nn.Sequential(
            nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 3),
        ).eval()  # fmt: skip
        planner = Task(model, torch.zeros(batch, 4, 8, 8), 0.3).planner()
        first, second = penalties_of(planner, norms_of(planner))
        one, two = 4 * 9 + 8 * 9 + 64, 4 * 9 + 2 * 9 + 16
        assert float(first[0] / second[0]) == pytest.approx(one / two)

    def test_without_batch_norms(self) -> None:
        with pytest.raises(fpgm.RequestError, match="this model has none"):
            METHODS["rethinking"].prune(task_of(Two(norm=False).eval()))
        with pytest.raises(fpgm.RequestError, match="No unit has a batch norm"):
            METHODS["slimming"].prune(task_of(Two(norm=False).eval()))


class TestPfec:
    def test_sensitive_layers_are_spared(self) -> None:
        """Labels are the model's own answers, so that accuracy falls where pruning hurts."""
        model = stir(Streams()).eval()
        with torch.no_grad():
            batches = [(x, model(x).argmax(1)) for x, _ in data(8)]
        task = Task(model, batches[0][0][:1], 0.2, loader=batches, images=128)
        planner = task.planner("l1")
        losses_ = sensitivities(planner, task)
        assert max(losses_.values()) > 0
        drop = sorted(losses_.values())[-2]
        spare_(planner, task, drop)
        spared = set(planner.budget.rates)
        assert spared == {layer for layer, loss in losses_.items() if loss > drop}
        found = cut(planner)
        assert found.plan is not None
        assert all(g.kept == g.units for g in found.plan.groups if set(g.layers) & spared)


class TestTraining:
    def test_hooks_are_called_with_the_rate(self, two: Two) -> None:
        rates: list[float] = []
        task = task_of(two)
        net = task.copy()
        train_(net, task, Schedule(4, lr=0.1), settle=rates.append)
        assert rates == pytest.approx([0.1, 0.0853553, 0.05, 0.0146447], rel=1e-4)
        assert not net.training
        assert all(p.grad is None for p in net.parameters())

    def test_it_learns(self) -> None:
        model = stir(Two()).eval()
        batches = data(2)
        task = Task(model, batches[0][0][:1], 0.4, loader=batches)

        def loss(net: nn.Module) -> float:
            with torch.no_grad():
                return sum(float(nn.functional.cross_entropy(net(x), y)) for x, y in batches)

        net = task.copy()
        train_(net, task, Schedule(40, lr=0.05))
        assert loss(net) < loss(model)

    def test_a_loss_that_is_no_number(self, two: Two) -> None:
        with pytest.raises(fpgm.ModelError, match=r"The loss is .* lower lr"):
            train_(two, task_of(two), Schedule(50, lr=1e9))


class TestComparison:
    def accuracy(self, model: nn.Module) -> float:
        x, _ = data()[0]
        with torch.no_grad():
            return float(model(x).mean().sigmoid())

    def test_all_get_the_same_training(self) -> None:
        model = stir(Streams()).eval()
        task = task_of(model, before=Schedule(3))
        rows = [cmp.compare(METHODS[name], task, Schedule(5), self.accuracy).row
                for name in ("fpgm", "slimming")]  # fmt: skip
        assert [row.steps for row in rows] == [5, 5]
        alone = cmp.compare(METHODS["slimming"], task, Schedule(5), self.accuracy).row
        assert (alone.once, alone.tuned) == (rows[1].once, rows[1].tuned)
        assert all(row.tuned is not None and row.recovered is not None for row in rows)

    def test_without_training_there_is_none(self) -> None:
        model = stir(Streams()).eval()
        made = cmp.compare(METHODS["fpgm"], task_of(model), Schedule(0), self.accuracy)
        assert (made.row.tuned, made.row.steps) == (None, 0)
        trains = cmp.compare(METHODS["slimming"], task_of(model), Schedule(0), self.accuracy)
        assert (trains.row.tuned, trains.row.steps) == (None, 0)
        with torch.no_grad():
            made.best(data()[0][0])

    def test_recovery_starts_from_the_original(self) -> None:
        """What soft pruning has zeroed cannot be learnt from."""
        model = stir(Streams()).eval()
        x = data()[0][0]

        def nearness(net: nn.Module) -> float:
            with torch.no_grad():
                return -float((net(x) - model(x)).square().mean())

        task = task_of(model, before=Schedule(5, lr=0.1), images=64)
        row = cmp.compare(METHODS["sfp"], task, Schedule(5, lr=0.1), nearness).row
        assert row.recovered is not None
        assert row.recovered > row.once

    def test_seeds_change_what_is_left_to_chance(self) -> None:
        model = stir(Streams()).eval()
        plans = [cmp.compare(METHODS["random"], task_of(model, seed=seed), Schedule(0),
                             self.accuracy).plan for seed in (0, 1)]  # fmt: skip
        assert plans[0] is not None
        assert plans[1] is not None
        assert plans[0].cuts != plans[1].cuts


def test_scores_that_a_layer_lacks() -> None:
    from fpgm.scored import Scored

    model = Two().eval()
    with pytest.raises(fpgm.RequestError, match="criterion 'mine': layer 'a' has no scores"):
        fpgm.plan(model, torch.zeros(1, 3, 6, 6), rate=0.5, criterion=Scored("mine", {}))
    scores = Scored("mine", {"a": torch.arange(8.0).flip(0), "b": torch.zeros(6)})
    plan = fpgm.plan(model, torch.zeros(1, 3, 6, 6), rate=0.5, align=1, criterion=scores)
    assert plan.asked["criterion"] == "mine"
    assert plan.cuts[0].keep == (0, 1, 2, 3)
