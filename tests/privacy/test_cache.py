import concurrent.futures
import json
from pathlib import Path
from typing import Any

import pytest

from raydp.privacy import Budget, Interval, Phase, PhaseSpec, Plan, PlanCache, calibrate
from raydp.privacy import calibration as calibration_module
from raydp.privacy.cache import plan_key

SPEC = PhaseSpec(name="train", steps=10, batch_size=100, population=1000, clip_norm=1.0)
BUDGET = Budget(epsilon=2.0, delta=1e-5)


def plan(upper: float = 1.0) -> Plan:
    interval = Interval(lower=0.0, estimate=upper, upper=upper, accountant="pld")
    return Plan(budget=BUDGET, phases=(Phase(spec=SPEC, noise_multiplier=1.0),), certificate={"pld": interval})


def key(**changes: object) -> str:
    fields: dict[str, object] = {
        "budget": BUDGET,
        "phases": [SPEC],
        "accountant": "pld",
        "split": "composed",
        "cross_check": ("prv",),
    }
    return plan_key(**{**fields, **changes})  # type: ignore[arg-type]


def test_put_get(tmp_path: Path) -> None:
    cache = PlanCache(tmp_path / "plans")
    assert cache.get("k") is None
    cache.put("k", plan())
    assert cache.get("k") == plan()
    assert not list((tmp_path / "plans").glob("*.tmp"))


@pytest.mark.parametrize("damage", ["", "{", "[]", "null", '{"key": "k"}', "\x00\x01"])
def test_a_damaged_entry_is_a_miss(tmp_path: Path, damage: str) -> None:
    cache = PlanCache(tmp_path)
    (tmp_path / "k.json").write_text(damage)
    assert cache.get("k") is None


def test_a_tampered_noise_multiplier_is_a_miss(tmp_path: Path) -> None:
    cache = PlanCache(tmp_path)
    cache.put("k", plan())
    record = json.loads((tmp_path / "k.json").read_text())
    record["plan"]["phases"][0]["noise_multiplier"] = 0.1
    (tmp_path / "k.json").write_text(json.dumps(record))
    assert cache.get("k") is None


def test_a_directory_that_cannot_be_written_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = PlanCache(tmp_path / "file" / "plans")
    cache.put("k", plan())
    assert cache.get("k") is None


def test_default_directory_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYDP_CACHE", str(tmp_path))
    assert PlanCache().directory == tmp_path


def test_key_holds_everything_a_plan_follows_from(monkeypatch: pytest.MonkeyPatch) -> None:
    other = PhaseSpec(name="train", steps=11, batch_size=100, population=1000, clip_norm=1.0)
    keys = {
        key(),
        key(budget=Budget(epsilon=2.0, delta=1e-6)),
        key(budget=Budget(epsilon=2.0, delta=1e-5, adjacency="replace_one")),
        key(budget=Budget(epsilon=2.1, delta=1e-5)),
        key(phases=[other]),
        key(accountant="rdp"),
        key(split="naive"),
        key(cross_check=()),
    }
    assert len(keys) == 8
    before = key()
    monkeypatch.setattr("raydp.privacy.cache._versions", lambda: {"opacus": "0"})
    assert key() != before


def _write(directory: str, upper: float) -> bool:
    cache = PlanCache(Path(directory))
    for _ in range(50):
        cache.put("k", plan(upper))
        if cache.get("k") is None:
            return False
    return True


def test_concurrent_processes_never_see_half_a_plan(tmp_path: Path) -> None:
    with concurrent.futures.ProcessPoolExecutor(2) as pool:
        assert all(pool.map(_write, [str(tmp_path)] * 2, [1.0, 1.5]))


def test_calibrate_asks_the_cache_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = PlanCache(tmp_path)
    first = calibrate(budget=BUDGET, phases=[SPEC], cache=cache, cross_check=("rdp",))
    monkeypatch.setattr(calibration_module, "_solve", lambda *args: pytest.fail("solved again"))
    assert calibrate(budget=BUDGET, phases=[SPEC], cache=cache, cross_check=("rdp",)) == first


def test_a_cached_plan_that_answers_another_question_is_not_believed(tmp_path: Path) -> None:
    cache = PlanCache(tmp_path)
    asked = {"budget": Budget(epsilon=0.5, delta=1e-5), "phases": [SPEC], "cross_check": ()}
    cache.put(plan_key(accountant="pld", split="composed", **asked), plan())  # type: ignore[arg-type]
    found = calibrate(cache=cache, **asked)  # type: ignore[arg-type]
    assert found.budget.epsilon == 0.5 and found.epsilon.upper <= 0.5


def test_a_plan_is_solved_once_for_all_clip_norms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, budget = PlanCache(tmp_path), Budget(epsilon=3.0, delta=1e-5)

    def solve(*clip_norms: float, **options: Any) -> Plan:
        phases = [
            PhaseSpec(name=name, steps=20, batch_size=100, population=2000, clip_norm=clip_norm, share=share)
            for name, clip_norm, share in zip(("warmup", "train"), clip_norms, (0.3, None), strict=True)
        ]
        return calibrate(budget=budget, phases=phases, cross_check=(), **options)

    first = solve(0.25, 4.0, cache=cache)
    fresh = solve(3.0, 7.0)
    monkeypatch.setattr("raydp.privacy.calibration._solve", lambda *arguments: pytest.fail("solved again"))
    again = solve(3.0, 7.0, cache=cache)
    assert again == fresh and again.digest == fresh.digest != first.digest
    assert [phase.clip_norm for phase in first.phases] == [0.25, 4.0]
    assert [phase.clip_norm for phase in again.phases] == [3.0, 7.0]
    assert len(list(tmp_path.iterdir())) == 1
