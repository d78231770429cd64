"""The scripts in examples/ do what they say, each in a process of its own, on few images."""

from __future__ import annotations

import doctest
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.helpers.faults import python
from tests.helpers.runs import kill, logged, weights, write_net, write_recipe
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import fpgm
from fpgm.models import resnet

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
IMAGES = torch.randn(4, 3, 32, 32)
BRIEF = ("--epochs", "2", "--more", "1", "--images", "64")
TWO = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines",
       "1", "--mixed_precision", "no", "--dynamo_backend", "no")  # fmt: skip


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """One thread a process, and tables that are not folded."""
    path = str(ROOT / "src")
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


WITH_TORCHVISION = """
from contextlib import suppress
from fpgm.errors import RequestError
from fpgm.models.torchvision_import import import_torchvision
with suppress(RequestError):
    import_torchvision()
"""
"""Lightning and Transformers import torchvision; it may be built for another torch."""


def run(folder: Path, environment: dict[str, str], *command: str) -> str:
    """What a command says that ends well."""
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def script(
    folder: Path, environment: dict[str, str], name: str, *options: str, before: str = ""
) -> str:
    """What an example says that ends well."""
    file = str(EXAMPLES / name)
    program = f"import runpy, sys\nsys.argv = {[file, *options]!r}\nrunpy.run_path({file!r}, None, "
    ended = python(f"{before}{program}'__main__')", folder, environment)
    assert ended.code == 0, ended.out + ended.err
    return ended.out + ended.err


def cost(model: nn.Module) -> tuple[int, int]:
    """MACs and parameters."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.eval()(IMAGES[:1])
    return counter.get_total_flops() // 2, sum(p.numel() for p in model.parameters())


def check_small(file: Path, original: nn.Module, said: str) -> nn.Module:
    """The file holds a smaller network, with as many MACs as the script said."""
    small = fpgm.load(file, lambda: original)
    before, after = (
        int(n.replace(",", ""))
        for n in re.search(r"MACs: (\S+) to (\S+)", said).groups()  # type: ignore[union-attr]
    )
    assert cost(small)[0] == after < 0.7 * before
    return small


def check_trained(folder: Path, original: nn.Module, said: str) -> None:
    """Two epochs pruned, verified, the compact network is as good as the masked one, and saved."""
    steps = re.findall(r"epoch (\d+): ", said)
    assert steps == ["1", "2"]
    assert "verified: compact and masked model differ by " in said
    masked, compact = re.search(r"masked: (\S+), compact: (\S+)", said).groups()  # type: ignore[union-attr]
    assert masked == compact
    check_small(folder / "small.safetensors", original, said)


def test_plain_loop(tmp_path: Path, environment: dict[str, str]) -> None:
    said = script(tmp_path, environment, "plain_loop.py", *BRIEF)
    check_trained(tmp_path, resnet(20), said)
    trained, read = re.search(r"trained further: (\S+)\n.*loaded again: (\S+)", said).groups()  # type: ignore[union-attr]
    assert trained == read


def test_lightning(tmp_path: Path, environment: dict[str, str]) -> None:
    pytest.importorskip("lightning", exc_type=ImportError)
    said = script(tmp_path, environment, "with_lightning.py", *BRIEF, before=WITH_TORCHVISION)
    check_trained(tmp_path, resnet(20), said)


def test_transformers(tmp_path: Path, environment: dict[str, str]) -> None:
    transformers = pytest.importorskip("transformers")
    said = script(tmp_path, environment, "with_transformers.py", *BRIEF, before=WITH_TORCHVISION)
    config = transformers.ResNetConfig(
        embedding_size=32,
        hidden_sizes=[32, 64, 128],
        depths=[1, 1, 1],
        layer_type="basic",
        num_labels=10,
    )
    check_trained(tmp_path, transformers.ResNetForImageClassification(config), said)


def test_accelerate_in_two_processes(tmp_path: Path, environment: dict[str, str]) -> None:
    """By their digests both hold the same model, though each was trained on other images."""
    said = run(
        tmp_path, environment, sys.executable, *TWO, str(EXAMPLES / "with_accelerate.py"), *BRIEF
    )
    assert "processes: 2" in said
    assert "the same model in all processes: yes" in said
    check_trained(tmp_path, resnet(20), said)


def test_prune_recover_export(tmp_path: Path, environment: dict[str, str]) -> None:
    runtime = pytest.importorskip("onnxruntime")
    options = ("--images", "64", "--backends", "eager", "--seconds", "0.05")
    said = script(tmp_path, environment, "prune_recover_export.py", *options)
    assert "verified: compact and masked model differ by " in said
    pruned, recovered = (
        float(re.search(rf"{name}: (\S+)%", said)[1])  # type: ignore[index]
        for name in ("pruned", "recovered")
    )
    assert recovered > pruned + 20
    small = check_small(tmp_path / "small.safetensors", resnet(20), said).eval()
    session = runtime.InferenceSession(tmp_path / "small.onnx", providers=["CPUExecutionProvider"])
    (answers,) = session.run(None, {session.get_inputs()[0].name: IMAGES.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(answers), small(IMAGES), rtol=1e-3, atol=1e-3)


def test_ray(tmp_path: Path, environment: dict[str, str]) -> None:
    pytest.importorskip("ray", reason='Ray is not installed: pip install "ray[tune]"')
    options = ("--rates", "0.2", "0.4", "--criteria", "fpgm", "--images", "32")
    script(tmp_path, environment | {"HOME": str(tmp_path)}, "sweep_with_ray.py", *options)
    rows = json.loads((tmp_path / "sweep.json").read_text())
    assert sorted(row["rate"] for row in rows) == [0.2, 0.4]
    assert rows == sorted(rows, key=lambda row: -row["accuracy"])


# SLURM, without SLURM: its variables are set by hand, its programs replaced by a few lines.

SRUN = """
[[ $1 = --* ]] && echo "$1" > asked && shift
for node in $(seq 0 $((SLURM_NNODES - 1))); do SLURM_NODEID=$node "$@" & done
for node in $(seq 0 $((SLURM_NNODES - 1))); do wait -n; done
"""
SCONTROL = """
if [ "$1" = requeue ]; then echo "$2" > requeued; else echo 127.0.0.1; echo elsewhere; fi
"""


@pytest.fixture
def slurm(tmp_path: Path, environment: dict[str, str]) -> dict[str, str]:
    """The environment of a job; `fpgm` and `accelerate` are those of this Python."""
    if shutil.which("bash") is None:
        pytest.skip("there is no bash")
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, lines in {
        "srun": SRUN,
        "scontrol": SCONTROL,
        "fpgm": f'exec {sys.executable} -m fpgm "$@"',
        "accelerate": f'shift; exec {sys.executable} -m accelerate.commands.launch "$@"',
    }.items():
        (programs / name).write_text(f"#!/bin/bash\nset -e\n{lines}\n")
        (programs / name).chmod(0o755)
    return {**environment, "PATH": f"{programs}:{environment['PATH']}"}


@pytest.mark.parametrize("name", ["imagenet.sbatch", "sweep.sbatch"])
def test_shell_scripts_are_bash_and_ask_slurm_for_something(name: str, tmp_path: Path) -> None:
    file = EXAMPLES / "slurm" / name
    run(tmp_path, dict(os.environ), "bash", "-n", str(file))
    lines = file.read_text().splitlines()
    assert lines[0] == "#!/bin/bash"
    # SLURM stops looking for its options at the first command.
    first = next(n for n, line in enumerate(lines) if line and not line.startswith("#"))
    options = [n for n, line in enumerate(lines) if line.startswith("#SBATCH --")]
    assert len(options) > 4
    assert max(options) < first


def test_every_index_of_the_sweep_is_another_point(tmp_path: Path, slurm: dict[str, str]) -> None:
    (tmp_path / "bin/fpgm").write_text('#!/bin/bash\necho "$@" >> said\n')
    file = EXAMPLES / "slurm/sweep.sbatch"
    last = int(re.search(r"--array=0-(\d+)", file.read_text())[1])  # type: ignore[index]
    for index in range(last + 1):
        run(tmp_path, {**slurm, "SLURM_ARRAY_TASK_ID": str(index)}, "bash", str(file))
    said = (tmp_path / "said").read_text().splitlines()
    points = {re.search(r"--macs (\S+) --criterion (\S+) ", line).groups() for line in said}  # type: ignore[union-attr]
    folders = {re.search(r"--out (\S+)", line)[1] for line in said}  # type: ignore[index]
    assert len(said) == len(points) == len(folders) == 9


def test_one_index_of_the_sweep(tmp_path: Path, slurm: dict[str, str]) -> None:
    job = {**slurm, "SLURM_ARRAY_TASK_ID": "4", "SLURM_CPUS_PER_TASK": "1", "OUT": "swept"}
    run(
        tmp_path, job, "bash", str(EXAMPLES / "slurm/sweep.sbatch"),
        "--recover", "norms", "--images", "32", "--test", "64",
    )  # fmt: skip
    plan = fpgm.Plan.from_json((tmp_path / "swept/l2-0.5/plan.json").read_text())
    assert plan.macs_removed == pytest.approx(0.5, abs=0.03)
    check_small(
        tmp_path / "swept/l2-0.5/small.safetensors",
        resnet(20),
        f"MACs: {plan.macs_before} to {plan.macs_after}",
    )


def test_two_machines_are_preempted_and_resume(tmp_path: Path, slurm: dict[str, str]) -> None:
    """Out of time in the first epochs, the job asks to be queued again, and then goes on."""
    pytest.importorskip("accelerate")
    epochs = 4
    recipe = write_recipe(tmp_path, write_net(tmp_path, "nn.BatchNorm2d(16), ", 0.2), epochs)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = {
        **slurm,
        "SLURM_JOB_ID": str(port - 20000 if port < 40000 else port - 40000),
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "1",
        "SLURM_CPUS_PER_TASK": "3",
    }
    command = [
        "bash",
        str(EXAMPLES / "slurm/imagenet.sbatch"),
        str(recipe),
        "--allow-code",
        "--out",
        "run",
    ]
    started = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=job,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        deadline = time.time() + 240
        while not list(tmp_path.glob("run/checkpoints/*.json")):
            assert started.poll() is None
            assert time.time() < deadline
            time.sleep(0.01)
        started.send_signal(signal.SIGUSR1)
        started.wait(timeout=60)
        os.killpg(started.pid, signal.SIGTERM)  # as SLURM does with all of a job's processes
        started.communicate(timeout=60)  # the pipe ends with the last of them
    finally:
        kill(started)
    assert (tmp_path / "asked").read_text().strip() == "--cpus-per-task=3"
    assert (tmp_path / "requeued").read_text().strip() == job["SLURM_JOB_ID"]
    assert len(logged(tmp_path / "run")) < epochs

    said = run(tmp_path, job, *command)
    assert re.search(rf"resuming after epoch \d+ of {epochs}", said)
    assert [row["epoch"] for row in logged(tmp_path / "run")] == list(range(1, epochs + 1))
    assert json.loads((tmp_path / "run/environment.json").read_text())["processes"] == 2
    assert len(weights(tmp_path / "run")["0.weight"]) < 16


# Figures by calculation.


@pytest.fixture(scope="module")
def training_cost() -> ModuleType:
    results = importlib.util.spec_from_file_location("training_cost", EXAMPLES / "training_cost.py")
    assert results is not None
    assert results.loader is not None
    module = importlib.util.module_from_spec(results)
    results.loader.exec_module(module)
    return module


def test_the_table_of_the_guide_is_what_the_script_prints(training_cost: Any) -> None:
    pytest.importorskip("torchvision", exc_type=ImportError)
    names = [f"torchvision:resnet{depth}" for depth in (18, 34, 50, 101)]
    page = (ROOT / "docs/guides/scale.md").read_text(encoding="utf-8")
    for line in training_cost.table(names, gpus=16, batch=64):
        assert line in page
    assert training_cost.measure("torchvision:resnet50").macs == training_cost.RESNET50
    assert doctest.testmod(training_cost).failed == 0


def test_what_the_backward_pass_needs_by_hand(training_cost: Any) -> None:
    """The convolution keeps what it reads, the norm what it reads and its statistics, ReLU what it
    gives out; a picture is 3×8×8, then 4×6×6."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    x = torch.empty(2, 3, 8, 8, device="meta")
    assert training_cost.forward_macs(net.to("meta"), x) == 2 * 4 * 6 * 6 * 27
    kept = 2 * (3 * 8 * 8 + 4 * 6 * 6 + 4 * 6 * 6)
    assert training_cost.kept_elements(net, x) == kept + 4 + 4
