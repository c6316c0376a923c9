"""What is fuzzed: each target takes one input and raises unless the input is refused or treated rightly.

"Refused" is a RaydpError (of the command line: exit status 2, or 1). Anything else that is raised is a fault, and so is
input that is accepted and is not what was written.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import io
import json
import math
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from hypothesis import strategies as st

from raydp import cli
from raydp.data.parquet import read_images
from raydp.errors import RaydpError
from raydp.privacy.budget import Budget
from raydp.privacy.ledger import Ledger, LedgerWriter
from raydp.privacy.mechanism import Phase, PhaseSpec
from raydp.privacy.noise import NoiseKey
from raydp.privacy.plan import Interval, Plan
from raydp.search.definition import Search
from raydp.search.run_directory import RunDirectory
from raydp.search.runner import stored_search
from raydp.search.spaces import Space
from raydp.search.statement import build
from raydp.training import checkpoint


@dataclass(frozen=True, kw_only=True)
class Target:
    """One thing that is fuzzed.

    Attributes:
        inputs: where the inputs come from.
        check: raises what a fault raises; AssertionError for input that should not have been accepted.
        short: inputs in the short version that is part of the test suite.
    """

    inputs: st.SearchStrategy[Any]
    check: Callable[[Any], None]
    short: int = 60


# Inputs.

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, 1, -1, 2**63, 10**400, -(10**400), 0.0, -0.0, 1e-320, 1e308, math.inf, -math.inf, math.nan])
    | st.floats()
    | st.text(max_size=8)
)
json_values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def mutated_bytes(draw: st.DrawFn, original: bytes) -> bytes:
    """The original with some bytes flipped, cut, repeated or put in; or any bytes at all."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=200))
    content = bytearray(original)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(0, len(content) - 1)))
        end = min(len(content), at + draw(st.integers(1, 40)))
        kind = draw(st.sampled_from(["flip", "cut", "repeat", "insert", "truncate", "lines"]))
        if kind == "flip" and content:
            content[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut":
            del content[at:end]
        elif kind == "repeat":
            content[at:at] = content[at:end]
        elif kind == "insert":
            content[at:at] = draw(st.binary(min_size=1, max_size=8))
        elif kind == "truncate":
            del content[at:]
        else:
            lines = bytes(content).splitlines(keepends=True)
            content = bytearray(b"".join(draw(st.permutations(lines)))) if len(lines) < 20 else content
    return bytes(content)


@st.composite
def mutated_json(draw: st.DrawFn, original: Any) -> Any:
    """The original with one to three of its values, at any depth, exchanged, lost or put elsewhere."""
    record = copy.deepcopy(original)
    for _ in range(draw(st.integers(1, 3))):
        node = record
        while isinstance(node, dict | list) and node:
            key = draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
            if draw(st.booleans()) or not isinstance(node[key], dict | list) or not node[key]:
                if isinstance(node, dict) and draw(st.integers(0, 4)) == 0:
                    del node[key]
                else:
                    node[key] = draw(json_values)
                break
            node = node[key]
    return record


# The originals.


@functools.cache
def plan() -> Plan:
    """Two phases; the certificate is written by hand, for no file is read with an accountant here."""
    phases = tuple(
        Phase(
            spec=PhaseSpec(name=name, steps=steps, batch_size=10, population=300, clip_norm=0.5, share=share),
            noise_multiplier=noise,
        )
        for name, steps, noise, share in (("warmup", 3, 1.25, 0.3), ("sparse", 4, 0.9, None))
    )
    bounds = {name: Interval(lower=2.9, estimate=2.95, upper=3.0, accountant=name) for name in ("pld", "prv", "rdp")}
    return Plan(budget=Budget(epsilon=3.0, delta=1e-5), phases=phases, certificate=bounds)


@functools.cache
def directory() -> RunDirectory:
    """A run directory of one finished trial. It lies in a directory of its own that the process removes at its end."""
    root = Path(tempfile.mkdtemp(prefix="raydp-fuzz-"))
    _AT_EXIT.callback(shutil.rmtree, root, ignore_errors=True)
    definition = {"name": "x", "budget": plan().budget.to_json(), "accountant": "pld", "metric": ["accuracy"]}
    found = RunDirectory.create(root / "run", definition)
    found.write_json("trials/t0000/plan.json", plan().to_json())
    found.append({"event": "proposed", "key": "t0000", "number": 0, "config": {"lr": 0.1}, "plan": plan().digest})
    found.append({"event": "started", "key": "t0000", "attempt": 1})
    found.run_path("t0000", 0).mkdir()
    with LedgerWriter(found.run_path("t0000", 0) / "ledger.jsonl", plan()) as ledger:
        for phase in plan().phases:
            for step in range(phase.steps):
                ledger.record(phase.name, step)
                ledger.commit()
    finished = {"state": "complete", "metrics": {"accuracy": [0.5]}, "heads": found.heads("t0000")}
    found.append({"event": "finished", "key": "t0000", **finished})
    return found


_AT_EXIT = contextlib.ExitStack()


def _original(name: str) -> bytes:
    return (directory().path / name).read_bytes()


LEDGER = "trials/t0000/seed-0/ledger.jsonl"


@contextlib.contextmanager
def _scratch(content: bytes, name: str = "file") -> Any:
    with tempfile.TemporaryDirectory(prefix="raydp-fuzz-") as root:
        path = Path(root) / name
        path.write_bytes(content)
        yield path


# The checks.


def check_budget(fields: dict[str, Any]) -> None:
    try:
        budget = Budget(**fields)
    except RaydpError:
        return
    assert 0 < budget.epsilon <= 1000 and 0 < budget.delta < 1
    assert Budget.from_json(json.loads(json.dumps(budget.to_json(), allow_nan=False))) == budget


def check_plan(record: Any) -> None:
    with tempfile.TemporaryDirectory(prefix="raydp-fuzz-") as root:
        run = RunDirectory(Path(root), directory().header)
        run.trial_directory("t0000").mkdir(parents=True)
        (run.trial_directory("t0000") / "plan.json").write_text(json.dumps(record))
        try:
            found = run.plan("t0000")
        except RaydpError:
            return
        assert found is not None and found.epsilon.upper <= found.budget.epsilon
        assert Plan.from_json(json.loads(json.dumps(found.to_json(), allow_nan=False))) == found
        # Whatever differs from the plan has another digest, which journal and ledger refer to, or is the certificate.
        if found.digest == plan().digest:
            same = {**found.to_json(), "certificate": None}
            assert same == {**plan().to_json(), "certificate": None}


def check_ledger(content: bytes) -> None:
    with _scratch(content) as path:
        try:
            found = Ledger.read(path)
        except RaydpError:
            return
        original = Ledger.read(directory().path / LEDGER)
        assert found.plan_digest == original.plan_digest and found.entries == original.entries[: len(found.entries)]


def check_journal(content: bytes) -> None:
    with tempfile.TemporaryDirectory(prefix="raydp-fuzz-") as root:
        run = RunDirectory(Path(root), directory().header)
        (run.path / "journal.jsonl").write_bytes(content)
        try:
            found = run.events()
            run.records()
        except RaydpError:
            return
        original = directory().events()
        assert found == original[: len(found)]


def check_header(content: bytes) -> None:
    """raydp.json: what is accepted is the same header, or the journal does not go on from it."""
    with tempfile.TemporaryDirectory(prefix="raydp-fuzz-") as root:
        (Path(root) / "raydp.json").write_bytes(content)
        shutil.copy(directory().path / "journal.jsonl", root)
        try:
            found = RunDirectory.open(root)
            found.events()
        except RaydpError:
            return
        assert found.header == directory().header


def check_events(events: list[Any]) -> None:
    """A journal whose chain is right, whatever its events say; then the statement that is made of it."""
    with tempfile.TemporaryDirectory(prefix="raydp-fuzz-") as root:
        run = RunDirectory.create(Path(root) / "run", directory().definition)
        try:
            for event in events:
                run.append(event)
            run.records()
            build(run)
        except RaydpError:
            return


@functools.cache
def _checkpoint() -> bytes:
    with tempfile.TemporaryDirectory(prefix="raydp-fuzz-") as root:
        state = {"step": 3, "model": {"w": torch.ones(3)}, "plan": "x"}
        return checkpoint.save(Path(root), 3, state).read_bytes()


def check_checkpoint(content: bytes) -> None:
    with _scratch(content, "checkpoint-000000003.pt") as path:
        try:
            checkpoint.load(path)
        except RaydpError:
            return
        assert content == _checkpoint()


def check_payload(payload: bytes) -> None:
    """A checkpoint whose checksum is right, whatever it holds."""
    digest = hashlib.sha256(payload).hexdigest().encode()
    content = b"raydp checkpoint 1 " + digest + b"\n" + payload
    with _scratch(content, "checkpoint-000000003.pt") as path, contextlib.suppress(RaydpError):
        assert isinstance(checkpoint.load(path), dict)


@functools.cache
def _parquet() -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (6, 16)).tolist()
    table = pa.table({"image": pa.array(pixels, pa.list_(pa.uint8())), "label": [0, 1, 2, 0, 1, 2]})
    buffer = io.BytesIO()
    pq.write_table(table, buffer, write_page_checksum=True)
    return buffer.getvalue()


def check_parquet(content: bytes) -> None:
    with _scratch(content) as path:
        try:
            images, labels, _ = read_images(path)
        except RaydpError:
            return
        assert images.dtype == np.uint8 and images.ndim == 4 and len(images) == len(labels) > 0 and labels.min() >= 0


def check_table(columns: dict[str, list[Any]]) -> None:
    """A readable Parquet file of whatever columns."""
    try:
        table = pa.table(columns)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return  # no such file can be written
    buffer = io.BytesIO()
    try:
        pq.write_table(table, buffer)
    except pa.ArrowException:
        return
    check_parquet(buffer.getvalue())


def check_key(content: bytes) -> None:
    with _scratch(content) as path:
        path.chmod(0o600)
        with contextlib.suppress(RaydpError):
            NoiseKey.load(path)
            assert len(content) == len(_key()) and content.startswith(b"raydp noise key, layout ")


@functools.cache
def _key() -> bytes:
    with tempfile.TemporaryDirectory(prefix="raydp-fuzz-") as root:
        NoiseKey.generate().save(Path(root) / "key")
        return (Path(root) / "key").read_bytes()


def check_space(definition: Any) -> None:
    try:
        space = Space.from_definition(definition)
        again = Space.from_json(json.loads(json.dumps(space.to_json(), allow_nan=False)))
    except RaydpError:
        return
    assert again.digest() == space.digest() and again.names == space.names
    for point in (*space.corners(), space.centre()):
        space.validate(point) if hasattr(space, "validate") else None


@functools.cache
def _space() -> dict[str, Any]:
    from ray import tune

    space = Space.from_definition(
        {"a": tune.uniform(0, 1), "b": tune.choice([1, 2]), "c": 3, "d": tune.lograndint(1, 99)}
    )
    record: dict[str, Any] = space.to_json()
    return record


def check_space_json(record: Any) -> None:
    with contextlib.suppress(RaydpError):
        Space.from_json(record)


@functools.cache
def _definition() -> dict[str, Any]:
    from ray import tune

    space = {"learning_rate": tune.loguniform(0.1, 1.0), "method": tune.choice(["dp_sgd", "tp_topk"])}
    search = Search(name="x", data="digits", budget=plan().budget, space=space, warm_start=({"learning_rate": 0.5},))
    record: dict[str, Any] = json.loads(json.dumps(search.to_json()))
    return record


def check_definition(record: Any) -> None:
    with contextlib.suppress(RaydpError):
        stored_search(RunDirectory(Path("absent"), {"definition": record}))


def check_override(pairs: dict[str, Any]) -> None:
    search = Search.from_json(_definition())
    with contextlib.suppress(RaydpError):
        search.with_overrides(pairs)


def check_command_line(arguments: list[str]) -> None:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main(arguments)
            code: Any = 0
        except SystemExit as ended:
            code = ended.code or 0
    assert code in (0, 1, 2, 130), f"exit status {code!r}"
    assert code == 0 or err.getvalue() or out.getvalue(), "refused without a word"


def _dimensions() -> st.SearchStrategy[Any]:
    from ray import tune

    numbers = st.sampled_from([0, 1, -1, 1e-9, 0.5, 1.0, 100, 2**70, math.inf, math.nan]) | st.floats() | st.integers()
    kinds = [tune.uniform, tune.loguniform, tune.randint, tune.lograndint]
    return (
        st.tuples(st.sampled_from(kinds), numbers, numbers).map(_made)
        | st.tuples(st.sampled_from([tune.quniform, tune.qrandint]), numbers, numbers, numbers).map(_made)
        | st.lists(scalars, max_size=3).map(tune.choice)
        | st.lists(scalars, max_size=3).map(tune.grid_search)
        | json_values
    )


def _made(parts: tuple[Any, ...]) -> Any:
    """What Ray Tune makes of the numbers, or a word where it refuses them itself."""
    function, *numbers = parts
    try:
        return function(*numbers)
    except (ValueError, TypeError, AssertionError, ArithmeticError):
        return "refused by Tune"


_WORDS = [
    *("run", "resume", "plan", "verify", "statement", "ui", "methods", "datasets", "--version", "-h", "--help"),
    *("--json", "--set", "--trials", "--epsilon", "--scale", "--only", "--storage", "--quiet", "--port", "--proposals"),
    *("a=b", "=", "trials=-1", "budget.epsilon=nan", "-1", "0", "1e999", "nan", "absent.py", "absent", "dp_sgd", "/"),
    *("\udcff", "\0", "a\nb", "[red]", "*", ""),
]


def _run_of(kind: str) -> Any:
    return st.deferred(lambda: mutated_bytes(_original(kind)))


TARGETS: dict[str, Target] = {
    "Budget": Target(
        inputs=st.fixed_dictionaries(
            {"epsilon": scalars, "delta": scalars}, optional={"adjacency": scalars | st.sampled_from(["replace_one"])}
        ),
        check=check_budget,
    ),
    "plan.json": Target(inputs=st.deferred(lambda: mutated_json(plan().to_json()) | json_values), check=check_plan),
    "ledger": Target(inputs=_run_of(LEDGER), check=check_ledger, short=100),
    "journal": Target(inputs=_run_of("journal.jsonl"), check=check_journal, short=100),
    "journal events": Target(
        inputs=st.deferred(lambda: mutated_json([dict(event) for event in directory().events()])).filter(
            lambda events: isinstance(events, list) and all(isinstance(event, dict) for event in events)
        ),
        check=check_events,
        short=30,
    ),
    "raydp.json": Target(inputs=_run_of("raydp.json"), check=check_header),
    "checkpoint": Target(inputs=st.deferred(lambda: mutated_bytes(_checkpoint())), check=check_checkpoint),
    "checkpoint payload": Target(
        inputs=st.deferred(lambda: mutated_bytes(_checkpoint().partition(b"\n")[2])), check=check_payload
    ),
    "Parquet bytes": Target(inputs=st.deferred(lambda: mutated_bytes(_parquet())), check=check_parquet),
    "Parquet tables": Target(
        inputs=st.fixed_dictionaries(
            {},
            optional={
                "image": st.lists(
                    st.lists(st.integers(-1, 300) | st.floats(), max_size=4) | st.binary(max_size=9) | st.none(),
                    max_size=3,
                ),
                "label": st.lists(st.integers(-3, 2**63 - 1) | st.none() | st.floats(), max_size=3),
                "other": st.lists(st.text(max_size=3), max_size=3),
            },
        ),
        check=check_table,
    ),
    "noise key": Target(inputs=st.deferred(lambda: mutated_bytes(_key())), check=check_key),
    "spaces": Target(
        inputs=st.deferred(
            lambda: st.dictionaries(st.text("ab_. /", max_size=4), _dimensions(), max_size=3) | json_values
        ),
        check=check_space,
    ),
    "space JSON": Target(inputs=st.deferred(lambda: mutated_json(_space()) | json_values), check=check_space_json),
    "definition": Target(
        inputs=st.deferred(lambda: mutated_json(_definition())).filter(lambda record: isinstance(record, dict)),
        check=check_definition,
    ),
    "--set": Target(
        inputs=st.deferred(
            lambda: st.dictionaries(
                st.sampled_from([*_definition(), "budget.epsilon", "resources.retries", "epochs", "momentum"])
                | st.text(max_size=6),
                st.text(max_size=6)
                | st.sampled_from(["nan", "inf", "1e999", "9" * 5000, "none", "true", "a,b"])
                | scalars,
                max_size=2,
            )
        ),
        check=check_override,
    ),
    "command line": Target(
        inputs=st.lists(st.sampled_from(_WORDS) | st.text(max_size=6), max_size=5), check=check_command_line, short=40
    ),
}
