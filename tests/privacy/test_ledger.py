import errno
import json
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydp.errors import CorruptFile, Diverged, InvalidValue, LedgerRefusal, RaydpError
from raydp.privacy import ledger as ledger_module
from raydp.privacy.budget import Budget
from raydp.privacy.ledger import Ledger, LedgerEntry, LedgerRecorder, LedgerWriter
from raydp.privacy.mechanism import Phase, PhaseSpec
from raydp.privacy.plan import Interval, Plan


def rechain(lines, start):
    from tests.chains import rechain  # here: the programs below import this file by itself

    return rechain(lines, start)


def make_plan(*, warmup=5, sparse=7, sigma=1.25):
    """Two phases; the certificate is written by hand because the ledger never looks at it."""
    phases = tuple(
        Phase(
            spec=PhaseSpec(name=name, steps=steps, batch_size=10, population=300, clip_norm=0.5, share=share),
            noise_multiplier=noise,
        )
        for name, steps, noise, share in (("warmup", warmup, sigma, 0.3), ("sparse", sparse, 0.9, None))
    )
    bounds = Interval(lower=2.9, estimate=2.95, upper=3.0, accountant="pld")
    return Plan(budget=Budget(epsilon=3.0, delta=1e-5), phases=phases, certificate={"pld": bounds})


def entry(phase="warmup", first_step=0, steps=1, **changes):
    noise = {"warmup": 1.25, "sparse": 0.9}[phase]
    fields = {"noise_multiplier": noise, "sample_rate": 10 / 300, "clip_norm": 0.5, **changes}
    return LedgerEntry(phase=phase, first_step=first_step, steps=steps, **fields)


def make_ledger(plan, *entries):
    return Ledger(plan_digest=plan.digest, delta=1e-5, adjacency="add_remove", entries=entries)


def write(path, *, steps=((("warmup"), 3),), plan=None):
    with LedgerWriter(path, plan or make_plan()) as writer:
        for phase, count in steps:
            for step in range(count):
                writer.record(phase, step)
    return path


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.jsonl"


class TestWriting:
    def test_a_whole_plan_is_recorded_and_read_back(self, path):
        plan = make_plan()
        write(path, steps=(("warmup", 5), ("sparse", 7)))
        ledger = Ledger.read(path)
        assert ledger == make_ledger(plan, entry(steps=5), entry("sparse", steps=7))
        assert ledger.mechanisms == plan.mechanisms
        assert (ledger.steps("warmup"), ledger.steps("sparse"), ledger.steps("other")) == (5, 7, 0)
        ledger.check(plan)

    def test_the_file_format(self, path):
        plan = make_plan()
        write(path)
        header, line = [json.loads(line) for line in path.read_text().splitlines()]
        assert len(header.pop("chain")) == 64 and line.pop("chain") == Ledger.read(path).head
        assert header == {"layout": 2, "plan": plan.digest, "delta": 1e-5, "adjacency": "add_remove"}
        assert line == {
            "phase": "warmup",
            "first_step": 0,
            "steps": 3,
            "noise_multiplier": 1.25,
            "sample_rate": 10 / 300,
            "clip_norm": 0.5,
        }

    def test_steps_are_durable_after_commit_and_not_before(self, path):
        with LedgerWriter(path, make_plan()) as writer:
            writer.record("warmup", 0)
            writer.record("warmup", 1)
            assert Ledger.read(path).entries == ()
            assert writer.ledger.steps("warmup") == 2
            writer.commit()
            assert Ledger.read(path).entries == (entry(steps=2),)
            writer.commit()
            writer.record("warmup", 2)
            writer.commit()
            assert Ledger.read(path).entries == (entry(steps=2), entry(first_step=2))
            assert Ledger.read(path).mechanisms == (entry(steps=3).mechanism,)

    def test_commit_syncs_the_file_after_it_wrote(self, path, monkeypatch):
        calls = []
        for name in ("write", "fsync"):
            real = getattr(os, name)
            monkeypatch.setattr(os, name, lambda *args, name=name, real=real: (calls.append(name), real(*args))[1])
        writer = LedgerWriter(path, make_plan())
        assert calls == ["write", "fsync", "fsync"]  # the header, its file, its directory
        writer.record("warmup", 0)
        writer.commit()
        assert calls[3:] == ["write", "fsync"]
        writer.close()

    def test_a_replay_is_accepted_and_counted_once(self, path):
        write(path, steps=(("warmup", 5), ("sparse", 2)))
        with LedgerWriter(path, make_plan()) as writer:
            for phase, steps in (("warmup", 5), ("sparse", 4)):
                for step in range(steps):
                    writer.record(phase, step)
                    writer.record(phase, step)
        assert Ledger.read(path).entries == (entry(steps=5), entry("sparse", steps=2), entry("sparse", 2, 2))

    @pytest.mark.parametrize(
        ("phase", "step", "message"),
        [
            ("warmup", 5, "overspend"),
            ("warmup", 10**9, "overspend"),
            ("warmup", 4, "next is step 3"),
            ("sparse", 0, "only 3 of 5"),
            ("sparse", 7, "overspend|only 3 of 5"),
            ("train", 0, "has no phase 'train'"),
        ],
    )
    def test_refusals_come_before_anything_is_written(self, path, phase, step, message):
        writer = LedgerWriter(write(path), make_plan())
        before = path.read_bytes()
        with pytest.raises(LedgerRefusal, match=message):
            writer.record(phase, step)
        writer.close()
        assert path.read_bytes() == before

    def test_the_whole_plan_and_not_a_step_more(self, path):
        with LedgerWriter(path, make_plan()) as writer:
            for phase in make_plan().phases:
                for step in range(phase.steps):
                    writer.record(phase.name, step)
            with pytest.raises(LedgerRefusal):
                writer.record("sparse", 7)
        Ledger.read(path).check(make_plan())

    @pytest.mark.parametrize("step", [-1, 1.0, True, None])
    def test_a_step_is_a_count(self, path, step):
        with LedgerWriter(path, make_plan()) as writer, pytest.raises(InvalidValue, match="step"):
            writer.record("warmup", step)

    def test_the_ledger_of_another_plan_is_refused(self, path):
        before = write(path).read_bytes()
        with pytest.raises(LedgerRefusal, match="not of plan"):
            LedgerWriter(path, make_plan(sigma=1.26))
        assert path.read_bytes() == before

    def test_failing_training_is_an_output_and_its_steps_are_kept(self, path):
        with pytest.raises(Diverged), LedgerWriter(path, make_plan()) as writer:
            writer.record("warmup", 0)
            raise Diverged("loss is NaN")
        assert Ledger.read(path).steps("warmup") == 1
        with pytest.raises(LedgerRefusal, match="closed"):
            writer.record("warmup", 1)
        writer.close()

    def test_a_second_writer_is_refused_until_the_first_is_gone(self, path, monkeypatch):
        monkeypatch.setattr(ledger_module, "_LOCK_SECONDS", 0.15)
        first = LedgerWriter(path, make_plan())
        with pytest.raises(LedgerRefusal, match="another process"):
            LedgerWriter(path, make_plan())
        first.close()
        LedgerWriter(path, make_plan()).close()

    @given(st.lists(st.tuples(st.sampled_from(["warmup", "sparse"]), st.integers(0, 8)), max_size=60))
    def test_whatever_is_asked_the_ledger_fits_the_plan(self, tmp_path_factory, requests):
        path = tmp_path_factory.mktemp("ledger") / "ledger.jsonl"
        plan = make_plan()
        granted = set()
        with LedgerWriter(path, plan) as writer:
            for number, (phase, step) in enumerate(requests):
                try:
                    writer.record(phase, step)
                except LedgerRefusal:
                    continue
                granted.add((phase, step))
                if number % 3 == 0:
                    writer.commit()
        ledger = Ledger.read(path)
        ledger.check(plan)
        assert ledger.steps("warmup") + ledger.steps("sparse") == len(granted)


class TestFollowing:
    def test_a_recorder_goes_on_where_the_ledger_is_and_writes_nothing(self, path):
        plan = make_plan()
        recorder = LedgerRecorder(path, plan, make_ledger(plan, entry(steps=3)))
        for phase, step in (("warmup", 2), ("warmup", 3), ("warmup", 4), ("sparse", 0)):
            recorder.record(phase, step)
        assert recorder.ledger.steps("warmup") == 5 and recorder.ledger.steps("sparse") == 1
        assert not path.exists()

    @pytest.mark.parametrize(
        ("phase", "step", "rule"), [("warmup", 5, "overspend"), ("warmup", 4, "in order"), ("sparse", 0, "after phase")]
    )
    def test_it_refuses_what_a_writer_refuses(self, path, phase, step, rule):
        plan = make_plan()
        recorder = LedgerRecorder(path, plan, make_ledger(plan, entry(steps=3)))
        write(path)
        with LedgerWriter(path, plan) as writer:
            for one in (recorder, writer):
                with pytest.raises(LedgerRefusal, match=rule):
                    one.record(phase, step)
                assert one.ledger.steps(phase) == (3 if phase == "warmup" else 0)

    def test_it_refuses_the_ledger_of_another_plan(self, path):
        with pytest.raises(LedgerRefusal, match="not of"):
            LedgerRecorder(path, make_plan(sigma=2.0), make_ledger(make_plan()))


class TestFullDisk:
    def test_half_a_line_is_cut_off_and_the_steps_can_be_committed_later(self, path, monkeypatch):
        writer = LedgerWriter(write(path), make_plan())
        before = path.read_bytes()
        writer.record("warmup", 3)
        real = os.write

        def full(descriptor, content):
            real(descriptor, content[:20])
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            with pytest.raises(RaydpError, match="Free space"):
                writer.commit()
        assert path.read_bytes() == before
        writer.commit()
        assert Ledger.read(path).steps("warmup") == 4
        writer.close()

    def test_a_failing_sync_is_not_success(self, path, monkeypatch):
        writer = LedgerWriter(write(path), make_plan())
        before = path.read_bytes()
        writer.record("warmup", 3)
        calls = []

        def fail_once(descriptor):
            calls.append(descriptor)
            if len(calls) == 1:
                raise OSError(errno.EIO, "Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail_once)
            with pytest.raises(RaydpError, match="cannot be written"):
                writer.commit()
        assert path.read_bytes() == before
        writer.close()
        assert Ledger.read(path).steps("warmup") == 4

    def test_the_operating_system_stops_the_file_in_the_middle_of_a_line(self, path):
        """A real short write: the kernel's limit on file size lies inside the second entry."""
        result = run(
            path,
            """
            import resource
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            writer = LedgerWriter(path, make_plan())
            writer.record("warmup", 0)
            writer.commit()
            size = path.stat().st_size
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + 30, size + 30))
            writer.record("warmup", 1)
            try:
                writer.commit()
            except RaydpError as error:
                print(error)
            """,
        )
        assert "cannot be written" in result.stdout
        assert path.read_bytes().endswith(b"\n")
        assert Ledger.read(path).entries == (entry(),)

    @pytest.mark.parametrize(("outcome", "seen"), [(Diverged, RaydpError), (KeyboardInterrupt, KeyboardInterrupt)])
    def test_an_outcome_is_not_told_without_the_steps_that_led_to_it(self, path, monkeypatch, outcome, seen):
        def full(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        with pytest.raises(seen) as caught, LedgerWriter(path, make_plan()) as writer:
            writer.record("warmup", 0)
            monkeypatch.setattr(os, "write", full)
            raise outcome("after step 1")
        if outcome is Diverged:
            assert type(caught.value) is RaydpError and "Free space" in str(caught.value)
            assert isinstance(
                caught.value.__cause__, OSError
            )  # a search takes this for an interruption, and keeps the key
        else:
            assert "Free space" in caught.value.__notes__[0]

    def test_a_directory_that_does_not_exist(self, tmp_path):
        with pytest.raises(RaydpError, match="directory"):
            LedgerWriter(tmp_path / "absent" / "ledger.jsonl", make_plan())


class TestReading:
    def test_a_torn_last_line_is_ignored_at_every_length(self, path):
        write(path, steps=(("warmup", 5), ("sparse", 2)))
        whole = path.read_bytes()
        last = whole[:-1].rfind(b"\n") + 1
        for length in range(last, len(whole)):
            path.write_bytes(whole[:length])
            assert Ledger.read(path).entries == (entry(steps=5),)
            with LedgerWriter(path, make_plan()) as writer:
                assert path.read_bytes() == whole[:last]
                writer.record("sparse", 0)
                writer.record("sparse", 1)
            assert path.read_bytes() == whole

    @pytest.mark.parametrize(
        ("line", "old", "new"),
        [
            (1, b'"layout": 2', b'"layout": 3'),
            (1, b'"layout"', b'"format"'),
            (1, b"{", b"["),
            (1, b"1e-05", b"2.0"),
            (1, b"add_remove", b"add"),
            (2, b'"steps": 2', b'"steps": 0'),
            (2, b'"steps": 2', b'"steps": 2.0'),
            (2, b"1.25", b"-1.25"),
            (2, b"1.25", b"NaN"),
            (2, b"0.5", b"Infinity"),
            (2, b'"clip_norm": 0.5', b'"clip": 0.5'),
            (2, b"}", b""),
            (3, b'"first_step": 2', b'"first_step": 1'),
            (3, b'"first_step": 2', b'"first_step": 3'),
            (3, b"warmup", b"warm/up"),
        ],
    )
    @pytest.mark.parametrize("forged", [False, True])
    def test_any_other_damage_is_named_by_its_line(self, path, line, old, new, forged):
        with LedgerWriter(path, make_plan()) as writer:
            for step in range(5):
                writer.record("warmup", step)
                if step % 2:
                    writer.commit()
        lines = path.read_bytes().splitlines(keepends=True)
        assert old in lines[line - 1]
        lines[line - 1] = lines[line - 1].replace(old, new)
        path.write_bytes(rechain(lines, ledger_module._START) if forged else b"".join(lines))
        before = path.read_bytes()
        with pytest.raises(CorruptFile, match=f"Line {line} of|layout 2"):
            Ledger.read(path)
        with pytest.raises(CorruptFile):
            LedgerWriter(path, make_plan())
        assert path.read_bytes() == before

    def test_what_would_be_a_good_ledger_is_refused_when_it_is_not_the_one_that_was_written(self, path):
        with LedgerWriter(path, make_plan(warmup=6)) as writer:
            for step in range(6):
                writer.record("warmup", step)
                writer.commit()
        header, *lines = path.read_bytes().splitlines(keepends=True)
        assert Ledger.read(path).head == json.loads(lines[-1])["chain"]
        edited = lines[0].replace(b'"clip_norm": 0.5', b'"clip_norm": 0.25')
        for wrong in ([edited, *lines[1:]], lines[1:], [lines[1], lines[0], *lines[2:]], [lines[0], *lines]):
            path.write_bytes(header + b"".join(wrong))
            with pytest.raises(
                CorruptFile, match=r"Line [23] of the ledger .* was edited, or a line was lost or moved"
            ):
                Ledger.read(path)
        path.write_bytes(header + b"".join(lines[:-1]))  # only the head tells
        assert Ledger.read(path).steps("warmup") == 5

    def test_the_chain_goes_on_after_a_restart(self, path):
        write(path, steps=(("warmup", 2),))
        write(path, steps=(("warmup", 4),))
        ledger = Ledger.read(path)
        assert ledger.entries == (entry(steps=2), entry(first_step=2, steps=2))
        assert len(path.read_bytes().splitlines()) == 3

    def test_an_emptied_ledger_is_damage_and_not_a_fresh_start(self, path):
        write(path)
        path.write_bytes(b"")
        with pytest.raises(CorruptFile, match="count its whole plan as spent"):
            LedgerWriter(path, make_plan())

    def test_a_missing_ledger(self, path):
        with pytest.raises(CorruptFile, match="No such file"):
            Ledger.read(path)

    def test_a_ledger_is_plain_data(self):
        ledger = make_ledger(make_plan(), entry(steps=2))
        assert pickle.loads(pickle.dumps(ledger)) == ledger


class TestMechanisms:
    def test_only_equal_neighbours_are_merged(self):
        plan = make_plan()
        ledger = make_ledger(
            plan, entry(steps=2), entry(first_step=2), entry(first_step=3, noise_multiplier=2.0), entry("sparse")
        )
        assert [(m.noise_multiplier, m.steps) for m in ledger.mechanisms] == [(1.25, 3), (2.0, 1), (0.9, 1)]
        assert make_ledger(plan).mechanisms == ()

    @pytest.mark.parametrize("accountant", ["pld", "rdp"])
    def test_epsilon_is_the_accountants_of_what_ran(self, accountant):
        from raydp.privacy import accountants  # slow to import, and the programs below import this file

        plan = make_plan()
        ledger = make_ledger(plan, entry(steps=2), entry(first_step=2, steps=3), entry("sparse", steps=7))
        expected = accountants.epsilon(plan.mechanisms, delta=1e-5, adjacency="add_remove", accountant=accountant)
        assert ledger.epsilon(accountant) == expected
        assert 0 < expected.estimate <= expected.upper
        part = make_ledger(plan, entry(steps=2)).epsilon(accountant)
        assert 0 < part.upper < expected.upper
        assert make_ledger(plan).epsilon(accountant).upper == 0

    def test_epsilon_is_stated_for_the_ledgers_own_adjacency(self):
        fields = {"plan_digest": "x", "delta": 1e-5, "entries": (entry(steps=3),)}
        one, other = (Ledger(adjacency=adjacency, **fields) for adjacency in ("add_remove", "replace_one"))
        assert other.epsilon("rdp").upper > one.epsilon("rdp").upper


class TestCheck:
    @pytest.mark.parametrize(
        ("entries", "message"),
        [
            ((entry(steps=6),), "overspend"),
            ((entry(steps=5), entry(first_step=5)), "overspend"),
            ((entry(steps=4), entry("sparse")), "only 4 of 5"),
            ((entry(noise_multiplier=1.2),), "noise_multiplier"),
            ((entry(sample_rate=0.04),), "sample_rate"),
            ((entry(clip_norm=1.0),), "clip_norm"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, entries, message):
        with pytest.raises(LedgerRefusal, match=message):
            make_ledger(make_plan(), *entries).check(make_plan())

    def test_another_plan_is_refused(self):
        with pytest.raises(LedgerRefusal, match="not of plan"):
            make_ledger(make_plan()).check(make_plan(sparse=8))

    def test_a_part_of_a_plan_is_fine(self):
        make_ledger(make_plan(), entry(steps=5), entry("sparse", steps=2)).check(make_plan())

    def test_a_gap_cannot_be_built(self):
        with pytest.raises(InvalidValue, match="first_step"):
            make_ledger(make_plan(), entry(steps=2), entry(first_step=3))


def program(path, body):
    preamble = f"""
    import signal, sys, pathlib
    sys.path.insert(0, {str(os.path.dirname(__file__))!r})
    from test_ledger import make_plan
    from raydp.errors import RaydpError
    from raydp.privacy.ledger import LedgerWriter
    path = pathlib.Path({str(path)!r})
    """
    return [sys.executable, "-c", textwrap.dedent(preamble) + textwrap.dedent(body)]


def run(path, body):
    result = subprocess.run(program(path, body), capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result


def test_a_process_killed_while_it_writes_leaves_every_released_step_behind(path):
    plan = make_plan(warmup=200_000)
    process = subprocess.Popen(
        program(
            path,
            """
            with LedgerWriter(path, make_plan(warmup=200_000)) as writer:
                for step in range(200_000):
                    writer.record("warmup", step)
                    if step % 3 == 2:
                        writer.commit()
                        print(step, flush=True)  # the release
            """,
        ),
        stdout=subprocess.PIPE,
        text=True,
    )
    for _ in range(40):
        process.stdout.readline()
    time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    seen = process.stdout.read().split("\n")
    process.wait()
    released = max(int(line) for line in seen[:-1] if line)
    ledger = Ledger.read(path)
    assert ledger.steps("warmup") >= released + 1
    ledger.check(plan)
    with LedgerWriter(path, plan) as writer:  # the lock went with the process
        done = writer.ledger.steps("warmup")
        for step in range(done + 1):
            writer.record("warmup", step)
    assert Ledger.read(path).steps("warmup") == done + 1
