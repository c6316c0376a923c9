"""Policies outside of runs, and runs that crash."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from raydp.methods import Policy, PublicExamples, Setting, method
from raydp.models import build_model
from raydp.privacy.ledger import Ledger
from raydp.training import run
from raydp.training.run import RunSpec, execute
from tests.training.helpers import digits_spec, hand_made_plan


def public_examples(n: int = 40, *, classes: int = 10) -> PublicExamples:
    """Random images of 8×8, all classes in turn."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(n, 1, 8, 8, generator=generator)
    return PublicExamples(inputs=images, targets=torch.arange(n) % classes, num_classes=classes)


def setting_of(
    name: str, config: dict[str, Any], *, public: PublicExamples | None, model: str = "mlp", seed: int = 0
) -> Setting:
    """The setting of a run on the digits."""
    return Setting(
        plan=hand_made_plan(name, config),
        model=build_model(model, input_shape=(1, 8, 8), outputs=10, seed=seed),
        seed=seed,
        public=public,
        input_shape=(1, 8, 8),
    )


def policy_of(name: str, config: dict[str, Any], *, public: PublicExamples | None, **changes: Any) -> Policy:
    chosen = method(name)
    return chosen.policy(chosen.parse(config), setting_of(name, config, public=public, **changes))


def weights(spec: RunSpec) -> dict[str, Tensor]:
    """What a finished run released."""
    return torch.load(spec.directory / "weights.pt", weights_only=True)


def assert_same_ending(left: RunSpec, right: RunSpec) -> None:
    found, wanted = weights(left), weights(right)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert Ledger.read(left.ledger_file).mechanisms == Ledger.read(right.ledger_file).mechanisms


def assert_resumes(directory: Path, name: str, config: dict[str, Any], *, reports: int, **changes: Any) -> None:
    """A run that is closed after each report, and one that dies in the middle of steps, end like a whole one."""
    whole, closed, killed = (
        digits_spec(directory / kind, name, config, reports=reports, **changes)
        for kind in ("whole", "closed", "killed")
    )
    count = len(list(execute(whole)))
    for _ in range(count):
        reports_left = execute(closed)
        next(reports_left)
        reports_left.close()
    assert_same_ending(closed, whole)
    original = run.private_gradient
    for die_at in (2, 1, 5):  # once before anything was written, once again in its replay, once later
        calls = 0

        def dying(*arguments: Any, die_at: int = die_at, **keywords: Any) -> list[Tensor]:
            nonlocal calls
            calls += 1
            released = original(*arguments, **keywords)
            if calls == die_at:
                raise KeyboardInterrupt  # after the query, in the middle of the step
            return released

        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(run, "private_gradient", dying)
            list(execute(killed))
    list(execute(killed))
    assert_same_ending(killed, whole)
