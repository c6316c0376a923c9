"""The harness that holds raydp's steps against those of other libraries: all of them must do the same thing."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import pytest
import torch

from raydp.geometry.capture import vmapped_gradients
from raydp.training.gradients import PerExampleGradients
from tests.benchmarks.peers.loops import OPACUS, SUPPORTS, Setting, loop
from tests.benchmarks.peers.serve import LoopFailed, Served
from tests.benchmarks.peers.table import comparison, geometry_table
from tests.benchmarks.peers.workloads import Encoder, cross_entropies

BATCH = 6
PRIVATE = ["raydp", *OPACUS, *(f"{name} 4" for name in OPACUS)]


def moved(name: str, setting: Setting, steps: int = 1) -> torch.Tensor:
    """How far some steps move the weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Opacus' hooks warn about inputs without gradient
        model, advance = loop("tiny", BATCH, name, setting=setting)
        before = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        for _ in range(steps):
            advance()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]) - before


@pytest.mark.parametrize("name", PRIVATE)
def test_without_noise_and_clipping_each_loop_is_plain_sgd(name: str) -> None:
    setting = Setting(learning_rate=0.01, clip_norm=1e3, noise_multiplier=1e-12)
    wanted = moved("plain", setting, steps=2)
    assert float((moved(name, setting, steps=2) - wanted).norm()) < 1e-3 * float(wanted.norm())


@pytest.mark.parametrize("name", PRIVATE)
def test_each_loop_clips_to_the_same_norm(name: str) -> None:
    setting = Setting(learning_rate=1.0, clip_norm=0.01, noise_multiplier=1e-7)
    wanted = moved("raydp", setting)
    assert float((moved(name, setting) - wanted).norm()) < 1e-2 * float(wanted.norm())
    assert float(wanted.norm()) <= 0.01


@pytest.mark.parametrize("name", PRIVATE)
def test_each_loop_adds_the_same_noise(name: str) -> None:
    found = moved(name, Setting(learning_rate=1.0, clip_norm=0.5, noise_multiplier=30.0))
    assert float(found.std()) == pytest.approx(0.5 * 30 / BATCH, rel=0.05)


@pytest.mark.parametrize("name", SUPPORTS)
def test_a_support_moves_its_coordinates_alone(name: str) -> None:
    ratio, where = SUPPORTS[name]
    found = moved(name, Setting(learning_rate=1.0)) != 0
    assert float(found.float().mean()) == pytest.approx(ratio, abs=1e-3)
    if where == "last":
        assert bool(found[-int(ratio * len(found)) :].all())


def test_the_encoder_is_captured() -> None:
    model = Encoder(tokens=5, vocabulary=11, width=8, heads=2, blocks=1, classes=3)
    tokens, labels = torch.randint(11, (4, 5)), torch.randint(3, (4,))

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return cross_entropies(outputs, targets).sum()

    engine = PerExampleGradients(model, loss)
    assert engine.engine == "captured"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # attention has no batching rule
        wanted = vmapped_gradients(model, loss, engine.names, tokens, labels)
    for found, gradient in zip(engine(tokens, labels), wanted, strict=True):
        torch.testing.assert_close(found, gradient, atol=1e-6, rtol=1e-3)


def served(code: str) -> Served:
    return Served([sys.executable, "-c", f"from tests.benchmarks.peers.serve import serve\n{code}"])


def test_a_served_loop_tells_its_time_and_the_memory_of_its_steps() -> None:
    process = served("serve(lambda: print(len(bytearray(50 * 2**20))), name='it')")  # what it prints is no answer
    try:
        assert process.facts == {"name": "it"}
        wall, cpu = process.run(3)
        assert wall > 0 and cpu >= 0
        memory = process.memory()
        assert 45 < memory["peak"] - memory["before"] < 100
    finally:
        process.close()


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise ValueError('no such layer')", "ValueError: no such layer"),
        ("import os; serve(lambda: os.kill(os.getpid(), 9))", "killed by signal 9, probably for memory"),
    ],
)
def test_a_loop_that_ends_says_why(code: str, reason: str) -> None:
    with pytest.raises(LoopFailed, match=reason):
        served(code).run(1)


def made_cell(**changes: Any) -> dict[str, Any]:
    """A cell in which raydp takes 2 s and 100 MB."""
    wall = {"plain": [1.0, 1.0, 1.1], "raydp": [2.0, 2.0, 2.2], "hooks 32": [4.0, 4.0, 4.0], "ghost": [1.6, 1.6, 9.0]}
    memory = {name: {"before": 400.0, "peak": 500.0} for name in (*wall, "functorch")}
    memory["hooks 32"]["peak"] = 450.0
    return {
        "workload": "mlp",
        "batch": 32,
        "wall": wall,
        "cpu": wall,
        "tried": {**{name: min(times) for name, times in wall.items()}, "functorch": 30.0},
        "memory": memory,
        "failed": {"jax": "MemoryError"},
        "facts": {"engine": "vmap"},
        "parameters": 7,
        **changes,
    }


def test_the_table_names_the_fastest_and_the_leanest_peer_and_the_targets_that_are_missed() -> None:
    text = comparison([made_cell()], {"mlp": "an MLP"})
    row = next(line for line in text.splitlines() if line.startswith("| mlp"))
    assert row == (
        "| mlp | 32 | 1000.0 | 2000.0 | 4000.0 @32 | ~30000 | 1600.0 | n/a | 2.00 (2.00) | 1.25 (1.25) | 100 (500) | "
        "50 (450), hooks 32 | 2.00 |"
    )
    assert "7 trained parameters, raydp falls back to vmap" in text
    assert "jax-privacy on `mlp` at 32: MemoryError" in text
    assert "At least as fast as the fastest peer: 0 of 1; not mlp 32 (+25 %)" in text
    assert "not mlp 32 (+67 %)" in text and "not mlp 32 (+33 %)" in text


def test_a_geometry_that_failed_has_no_figures() -> None:
    found = {"raydp": [2.0], "topk 0.4 scattered": [1.0]}
    memory = {name: {"before": 0.0, "peak": 10.0} for name in found}
    text = geometry_table(
        [made_cell(wall=found, cpu=found, memory=memory, failed={"topk 0.1 last layers": "MemoryError"})]
    )
    assert "| mlp | 32 | topk 0.4 scattered | 1000.0 | 2000.0 | 0.50 | 0.50 | 10 | 10 |" in text
    assert "| mlp | 32 | topk 0.1 last layers | n/a |" in text
