"""Algorithm 1 in the real Lightning and Transformers trainers, on real digits."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fpgm.models import digits

X = torch.randn(4, 1, 8, 8)
EPOCHS = 4


def real_digits(count: int) -> TensorDataset:
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images[:count], dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    return TensorDataset(x, torch.tensor(labels[:count]))


def accuracy(model: nn.Module) -> float:
    x, y = real_digits(1797)[1000:]
    model.eval()
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())


@pytest.mark.parametrize("mode", ["soft", "hard"])
@pytest.mark.filterwarnings("ignore")
def test_lightning(mode: str, tmp_path: Path) -> None:
    pl = pytest.importorskip("lightning.pytorch")
    from fpgm.training.callbacks.lightning import PruneCallback

    class Digits(pl.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = digits()

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> dict[str, Any]:
            optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
            steps = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
            return {"optimizer": optimizer, "lr_scheduler": steps}

    def trainer(epochs: int, callback: Any) -> Any:
        return pl.Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            callbacks=[callback],
            default_root_dir=tmp_path,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    torch.manual_seed(0)
    module = Digits()
    loader = DataLoader(real_digits(1000), 50, shuffle=True)
    callback = PruneCallback(X, attribute="net", rate=0.4, mode=mode)
    run = trainer(EPOCHS, callback)
    run.fit(module, loader)
    assert [step.epoch for step in callback.steps] == list(range(1, EPOCHS + 1))
    assert callback.compact is not None
    assert accuracy(callback.compact) == accuracy(module.net) > 0.85
    small = sum(p.numel() for p in callback.compact.parameters())
    assert small < 0.7 * sum(p.numel() for p in module.net.parameters())

    run.save_checkpoint(tmp_path / "last.ckpt")
    again = PruneCallback(X, attribute="net", rate=0.4, mode=mode)
    longer = trainer(EPOCHS + 1, again)
    longer.fit(Digits(), loader, ckpt_path=tmp_path / "last.ckpt", weights_only=True)
    assert [step.epoch for step in again.steps] == [EPOCHS + 1]


@pytest.mark.parametrize("mode", ["soft", "hard"])
@pytest.mark.filterwarnings("ignore")
def test_hugging_face(mode: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from fpgm.training.callbacks.huggingface import TrainerPruneCallback

    class Digits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = digits()

        def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            logits = self.net(x)
            if labels is None:
                return {"logits": logits}
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    data = [{"x": x, "labels": y} for x, y in real_digits(1000)]
    options: dict[str, Any] = {
        "output_dir": str(tmp_path),
        "per_device_train_batch_size": 50,
        "learning_rate": 0.01,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "epoch",
    }

    def fit(epochs: int, resume: bool) -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = Digits()
        callback = TrainerPruneCallback({"x": X}, rate=0.4, mode=mode)
        arguments = transformers.TrainingArguments(num_train_epochs=epochs, **options)
        trainer = transformers.Trainer(
            model=model, args=arguments, train_dataset=data, callbacks=[callback]
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.train(resume_from_checkpoint=resume or None)
        return model, callback

    model, callback = fit(EPOCHS, resume=False)
    assert [step.epoch for step in callback.steps] == list(range(1, EPOCHS + 1))
    assert callback.compact is not None
    assert accuracy(callback.compact.net) == accuracy(model.net) > 0.85
    _, again = fit(EPOCHS + 1, resume=True)
    assert [step.epoch for step in again.steps] == [EPOCHS + 1]
