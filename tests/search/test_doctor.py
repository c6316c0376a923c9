"""The doctor says what is there, and what to do where it is not enough."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import types
from pathlib import Path

import pytest

from raydp import cli
from raydp.search import doctor
from raydp.search.doctor import Finding, examine


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def test_a_healthy_machine_is_ready_and_nothing_is_left_behind(tmp_path: Path) -> None:
    findings = by_name(examine(quick=True))
    assert set(findings) >= {"Python", "processors", "memory", "shared memory", "disk", "file system", "clocks", "GPUs"}
    assert all(finding.status in doctor.STATUSES for finding in findings.values())
    assert all(bool(finding.advice) == (finding.status != "ok") for finding in findings.values())
    assert "locks" in findings["file system"].found
    assert not list(tmp_path.iterdir())


def test_a_full_disk_stops_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(total=10e9, free=0.1e9))
    finding = by_name(examine(quick=True))["disk"]
    assert finding.status == "fail" and "0.5 GB" in finding.advice


def test_the_other_project_of_that_name_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.6.0" if name == "raydp" else real(name))
    finding = by_name(examine(quick=True))["namesake"]
    assert finding.status == "fail" and "pip uninstall raydp" in finding.advice


def test_a_container_with_fewer_cores_than_the_machine_is_told_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_cpus", lambda: 3)
    monkeypatch.setattr(doctor.os, "cpu_count", lambda: 64)
    finding = by_name(examine(quick=True))["processors"]
    assert finding.status == "warn" and "resources.total_cpus=3" in finding.advice


def test_a_clock_that_differs_from_the_file_systems_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = doctor.time.time
    monkeypatch.setattr(doctor.time, "time", lambda: real() - 3600)
    finding = by_name(examine(quick=True))["clocks"]
    assert finding.status == "warn" and "+3600" in finding.found


def test_a_tracker_that_does_not_answer_fails_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = doctor._tracker("file:///somewhere")
    assert finding.status == "fail" and "must be a server or a database" in finding.found
    assert doctor._tracker(None).status == "ok"


def test_the_command_prints_a_line_each_and_exits_1_where_something_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [
        Finding(name="disk", status="fail", found="0.1 GB", advice="Free some."),
        Finding(name="GPUs", status="ok", found="none"),
    ]
    monkeypatch.setattr(doctor, "examine", lambda **options: found)
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", "--quick"])
    out = capsys.readouterr().out
    assert ended.value.code == 1
    assert "fail disk  0.1 GB" in out and "→ Free some." in out and "Not ready: disk." in out
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", "--json"])
    record = json.loads(capsys.readouterr().out)
    assert ended.value.code == 1 and record["ok"] is False and record["findings"][1]["name"] == "GPUs"
    found.pop(0)
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor"])
    assert ended.value.code == 0 and "Ready." in capsys.readouterr().out


@pytest.mark.slow
def test_ray_is_started_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = doctor._ray(None)
    assert finding.status == "ok" and "computes" in finding.found
    monkeypatch.setattr(doctor, "_SECONDS", 5)
    wrong = doctor._ray("127.0.0.1:1")
    assert wrong.status == "fail" and "ray status" in wrong.advice
