import json
import os
import stat
import subprocess
import sys
import textwrap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raydp.errors import CorruptFile, InvalidValue, RaydpError
from raydp.privacy.budget import Budget
from raydp.privacy.mechanism import Phase, PhaseSpec
from raydp.privacy.plan import Interval, Plan
from raydp.search.run_directory import RunDirectory


def make_plan(sigma=1.0):
    spec = PhaseSpec(name="train", steps=10, batch_size=10, population=100, clip_norm=1.0)
    certificate = {"pld": Interval(lower=0.9, estimate=0.95, upper=1.0, accountant="pld")}
    return Plan(
        budget=Budget(epsilon=1.0, delta=1e-5),
        phases=(Phase(spec=spec, noise_multiplier=sigma),),
        certificate=certificate,
    )


@pytest.fixture
def directory(tmp_path):
    return RunDirectory.create(tmp_path / "run", {"name": "x"})


def proposed(number=0, plan=None):
    return {"event": "proposed", "key": f"t{number:04d}", "number": number, "config": {"lr": 0.1}, "plan": plan}


def test_create_and_open(tmp_path):
    source = tmp_path / "mine.py"
    source.write_text("search = 1\n")
    created = RunDirectory.create(tmp_path / "deep" / "run", {"name": "x"}, source_file=source)
    opened = RunDirectory.open(tmp_path / "deep" / "run")
    assert opened.definition == {"name": "x"} and opened.header == created.header
    assert opened.header["software"]["torch"] and opened.header["layout"] == 2
    assert (opened.path / "search.py").read_text() == "search = 1\n"
    assert stat.S_IMODE(opened.secrets.stat().st_mode) == 0o700
    assert opened.records() == {}


def test_create_refuses_what_is_in_use(tmp_path, directory):
    with pytest.raises(InvalidValue, match="raydp resume"):
        RunDirectory.create(directory.path, {})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    with pytest.raises(InvalidValue, match="empty"):
        RunDirectory.create(tmp_path / "other", {})
    with pytest.raises(InvalidValue, match="empty"):
        RunDirectory.create(tmp_path / "other" / "thesis.tex", {})


def test_open_refuses_what_is_none_damaged_or_of_another_version(tmp_path, directory):
    with pytest.raises(InvalidValue, match=r"raydp\.json"):
        RunDirectory.open(tmp_path)
    header = directory.path / "raydp.json"
    header.write_text(json.dumps({**directory.header, "layout": 7, "software": {"raydp-search": "9.9"}}))
    with pytest.raises(CorruptFile, match=r"version 7.*version 2.*raydp-search 9\.9"):
        RunDirectory.open(directory.path)
    header.write_text("{")
    with pytest.raises(CorruptFile, match="damaged"):
        RunDirectory.open(directory.path)
    header.write_bytes(b"\xff\xfe")
    with pytest.raises(CorruptFile, match="damaged"):
        RunDirectory.open(directory.path)


def test_reading_writes_nothing(directory):
    before = sorted(str(path) for path in directory.path.rglob("*"))
    opened = RunDirectory.open(directory.path)
    opened.records(), opened.run_path("t0000", 3), opened.runs("t0000"), opened.trial_keys()
    assert sorted(str(path) for path in directory.path.rglob("*")) == before


def test_events_come_back_in_order_and_non_finite_metrics_become_null(directory):
    directory.append(proposed())
    directory.append(
        {"event": "finished", "key": "t0000", "state": "diverged", "metrics": {"accuracy": [float("nan"), 0.5]}}
    )
    first, second = directory.events()
    assert first.pop("time") and first == proposed()
    assert second["metrics"] == {"accuracy": [None, 0.5]}
    assert directory.records()["t0000"].metrics == {"accuracy": (None, 0.5)}


def test_events_that_do_not_fit_into_json_are_refused_and_nothing_is_written(directory):
    for event in ({"event": "x", "config": {"lr": float("inf")}}, {"event": "x", "config": object()}, {"key": "t0"}):
        with pytest.raises(InvalidValue):
            directory.append(event)
    assert directory.events() == []


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(min_value=1, max_value=5000), long=st.booleans())
def test_a_torn_last_line_is_ignored_and_cut(tmp_path_factory, cut, long):
    directory = RunDirectory.create(tmp_path_factory.mktemp("torn") / "run", {})
    directory.append(proposed(0))
    keep = (directory.path / "journal.jsonl").stat().st_size
    directory.append({**proposed(1), "note": "x" * (9000 if long else 1)})
    journal = directory.path / "journal.jsonl"
    with journal.open("r+b") as file:
        file.truncate(max(keep, journal.stat().st_size - cut))
    assert list(directory.records()) == ["t0000"]
    directory.append(proposed(2))
    assert list(directory.records()) == ["t0000", "t0002"]


def test_damage_elsewhere_is_named_with_its_line(directory):
    for number in range(3):
        directory.append(proposed(number))
    journal = directory.path / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(lines[0] + lines[1][:-9] + b"\n" + lines[2])
    with pytest.raises(CorruptFile, match=r"journal\.jsonl, line 2"):
        directory.events()
    journal.write_bytes(lines[0] + b"[]\n")
    with pytest.raises(CorruptFile, match=r"line 2 is damaged \(it is not a JSON object"):
        directory.events()


def test_a_full_disk_leaves_no_half_line(directory):
    """A real short write: the process may not let the file grow beyond 500 bytes."""
    script = """
        import resource, sys
        from raydp.errors import RaydpError
        from raydp.search.run_directory import RunDirectory
        directory = RunDirectory.open(sys.argv[1])
        directory.append({"event": "first"})
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))
        for attempt in range(2):
            try:
                directory.append({"event": "second", "text": "x" * 1000})
            except RaydpError as error:
                assert "journal.jsonl" in str(error) and "disk is full" in str(error), error
            else:
                raise SystemExit("the append went through")
        directory.append({"event": "third"})
        try:
            directory.write_json("trials/t0000/config.json", {"text": "x" * 1000})
        except RaydpError as error:
            assert "config.json" in str(error), error
        else:
            raise SystemExit("the file was written")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(directory.path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert [event["event"] for event in directory.events()] == ["first", "third"]
    assert list((directory.path / "trials" / "t0000").iterdir()) == []  # neither the file nor a temporary one


def test_a_second_driver_is_refused_with_the_pid_of_the_first(directory):
    script = """
        import sys
        from raydp.search.run_directory import RunDirectory
        with RunDirectory.open(sys.argv[1]).lock():
            print("locked", flush=True)
            sys.stdin.read()
    """
    holder = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), str(directory.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(RaydpError, match=f"pid {holder.pid} "), directory.lock():
            pass
        holder.kill()  # the lock dies with its holder
        holder.wait()
        with directory.lock(), pytest.raises(RaydpError, match=f"pid {os.getpid()} "), directory.lock():
            pass
        with directory.lock():
            pass
    finally:
        holder.kill()
        holder.communicate()


def test_write_json_is_atomic(directory):
    path = directory.write_json("trials/t0000/config.json", {"lr": 0.5})
    with pytest.raises(InvalidValue):
        directory.write_json(path, {"lr": object()})
    with pytest.raises(InvalidValue):
        directory.write_json(path, {"lr": float("nan")})
    assert json.loads(path.read_text()) == {"lr": 0.5}
    assert [entry.name for entry in path.parent.iterdir()] == ["config.json"]


def test_plans_are_read_with_the_records_and_held_against_the_journal(directory):
    plan = make_plan()
    directory.write_json("trials/t0000/plan.json", plan.to_json())
    directory.append(proposed(0, plan.digest))
    directory.append(proposed(1, make_plan(3.0).digest))  # its plan.json is missing
    records = directory.records()
    assert records["t0000"].plan == plan and records["t0001"].plan is None
    directory.write_json("trials/t0000/plan.json", make_plan(2.0).to_json())
    with pytest.raises(CorruptFile, match="exchanged"):
        RunDirectory.open(directory.path).records()
    (directory.trial_directory("t0000") / "plan.json").write_text('{"budget": 1}')
    with pytest.raises(CorruptFile, match=r"plan\.json is damaged"):
        RunDirectory.open(directory.path).records()


def test_paths(directory):
    assert directory.run_path("t0000", 2) == directory.path / "trials" / "t0000" / "seed-2"
    for seed in (10, 2):
        directory.run_path("t0000", seed).mkdir(parents=True)
    (directory.trial_directory("t0000") / "seed-x").mkdir()
    assert [seed for seed, _ in directory.runs("t0000")] == [2, 10]
    assert directory.trial_keys() == ["t0000"]
    for key in ("../secrets", "..", ""):
        with pytest.raises(InvalidValue):
            directory.trial_directory(key)


def test_what_is_no_run_directory_is_told_apart(directory, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidValue, match=r"made \(it has no raydp\.json\)"):
        RunDirectory.open(tmp_path / "empty")
    with pytest.raises(InvalidValue, match=r"made \(there is none of that name\)"):
        RunDirectory.open(tmp_path / "nowhere")
    header = directory.path / "raydp.json"
    header.write_text('{"layout": 99}')  # whatever else another layout may hold
    with pytest.raises(CorruptFile, match="layout version 99"):
        RunDirectory.open(directory.path)
    header.write_text('{"layout": 2}')
    with pytest.raises(CorruptFile, match=r"it lacks definition, id"):
        RunDirectory.open(directory.path)
