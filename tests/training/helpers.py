"""Small plans and run specs that the tests of training share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from raydp.methods import Setting, method
from raydp.privacy.budget import Budget
from raydp.privacy.mechanism import Phase
from raydp.privacy.plan import Interval, Plan
from raydp.training.run import RunSpec

DIGITS = 1437  # private examples of the bundled data set


def hand_made_plan(name: str, config: dict[str, Any], *, sigma: float = 1.0, population: int = DIGITS) -> Plan:
    """A plan of the method's own phases; its certificate is invented, which only tests may do."""
    chosen = method(name)
    specs = chosen.phases(chosen.parse(config), population=population)
    return Plan(
        budget=Budget(epsilon=8.0, delta=1e-5),
        phases=tuple(Phase(spec=spec, noise_multiplier=sigma) for spec in specs),
        certificate={"pld": Interval(lower=7.0, estimate=7.5, upper=8.0, accountant="pld")},
    )


def digits_spec(directory: Path, name: str, config: dict[str, Any], *, sigma: float = 1.0, **changes: Any) -> RunSpec:
    """A run of a method on the 8×8 digits."""
    values: dict[str, Any] = {
        "directory": directory / "run",
        "key_file": directory / "secret.key",
        "method": name,
        "config": config,
        "plan": hand_made_plan(name, config, sigma=sigma),
        "data": "digits",
        "model": "mlp",
        "seed": 0,
        "insecure_seed": 7,
        "reports": 3,
    }
    directory.mkdir(parents=True, exist_ok=True)
    return RunSpec(**{**values, **changes})


def setting(name: str, config: dict[str, Any], sizes: Sequence[int], *, sigma: float = 1.0) -> Setting:
    """A setting with a model whose parameters have these sizes."""
    model = nn.Module()
    for index, size in enumerate(sizes):
        model.register_parameter(f"p{index}", nn.Parameter(torch.zeros(size)))
    return Setting(plan=hand_made_plan(name, config, sigma=sigma), model=model, seed=0)
