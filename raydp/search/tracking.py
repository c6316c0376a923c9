"""MLflow: a search as a parent run, its trials as child runs, written by the driver alone.

The run directory is the truth; MLflow shows it. A background thread compares what a run should hold with what the
tracking server holds and writes the difference, so that every write can be repeated: nothing appears twice, and what
was missed while a server was down is found again by :meth:`Tracker.synchronise`. Nothing here can fail a search.

==================  ==========================================================================================
child run           named by the trial's key and its varying hyperparameters
params              the varying hyperparameters and ``method`` (over 250 characters: a digest; see config.json);
                    splits again as ``Split/<name>`` where they would not be among the first axes
tags                ``raydp.trial_key raydp.state raydp.reason raydp.attempts raydp.search_id mlflow.parentRunId``
metrics over steps  ``seed-<i>/<name>``, from trials/<key>/seed-<i>/metrics.jsonl
metrics at the end  ``<name>`` (mean over seeds), ``<name>_std``, ``epsilon.<accountant>`` (upper bound),
                    ``epsilon.<accountant>.lower``, ``seconds``, ``diverged`` (1; what is not finite is never logged,
                    but an objective is NaN until it is measured)
artifacts           config.json, plan.json, seed-<i>/ledger.jsonl, the same two of a private hold-out that is measured
                    through noise, and nothing else: no key can slip in; of the parent
                    run: statement.json, statement.txt, report.html
status              proposed SCHEDULED · running RUNNING · complete FINISHED · failed, diverged, infeasible FAILED ·
                    stopped, or unfinished when the search ends, KILLED
parent run          params of the definition, counts and epsilons of the summary, a description
==================  ==========================================================================================

Compare → parallel coordinates opens on the first three varying params by name, and on the first metric that all runs
have in the order in which the database keeps them: in SQLite that of their first values. So a trial's objective is
written, as NaN, before its first step is.

tracking.json holds, for each tracker that was used, the ids of the runs and what was acknowledged, to save questions;
losing it costs time only. So it is written seldom when it is large: at most a twentieth of the time goes into it. Only
``MlflowClient`` is used, never the fluent functions: those obey ``MLFLOW_RUN_ID`` and would write into a foreign run
(mlflow/mlflow#15713). This is the only module that imports mlflow, and it does so when a Tracker is made, for the
import takes seconds.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raydp.errors import CorruptFile, InvalidValue, RaydpError
from raydp.search import holdout
from raydp.search.records import TrialRecord, finite
from raydp.search.run_directory import RunDirectory

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

_log = logging.getLogger(__name__)

_Point = tuple[int, int, dict[str, float]]  # seed, step, values
_Points = dict[str, list[_Point]]  # by trial key

_STATUS = {
    "proposed": "SCHEDULED",
    "running": "RUNNING",
    "complete": "FINISHED",
    "failed": "FAILED",
    "diverged": "FAILED",
    "infeasible": "FAILED",
    "stopped": "KILLED",
}
REPORT = "report.html"  # an artifact of the parent run, which MLflow shows in place
SEARCH = "search"  # the parent run's name among the runs of a search
_SCHEMES = ("http", "https", "sqlite", "postgresql", "mysql", "mssql", "databricks")
_STATE_FILE = "tracking.json"
_NOT_MEASURED = float("nan")
_AXES = 3  # params that MLflow's parallel coordinates draw at first, by name
_PARAM_LIMIT, _TAG_LIMIT, _NAME_LIMIT = 250, 4000, 120
_RETRY_SECONDS = (5.0, 300.0)  # first and longest pause after a failure
_STATE_SHARE = 19.0  # times as long as it took to write tracking.json, it is not written again
_PAUSE = 1.0  # between rounds, so that metrics of several steps travel together


@dataclass(frozen=True, kw_only=True)
class _Content:
    """What a run should hold."""

    name: str
    status: str
    params: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    files: Mapping[str, Path] = field(default_factory=dict)  # artifact path -> local file

    def digest(self) -> str:
        files = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in self.files.items()}
        record = [self.name, self.status, dict(self.params), dict(self.tags), dict(self.metrics), files]
        return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


class Tracker:
    """Writes one search to MLflow, in the background.

    Args:
        uri: of the tracking server or database; None for a SQLite file in the run directory with the artifacts
            beside it (in place: moving the directory afterwards breaks the links to the artifacts, nothing else).
        directory: the run directory of the search.
        experiment: name of the experiment; all searches of one name share one.

    All methods but :meth:`flush`, :meth:`synchronise` and :meth:`close` only take note and return.

    Raises:
        InvalidValue: the URI is a file store or of an unknown kind.
        RaydpError: the database cannot be made or opened. (A server that does not answer is no error.)
    """

    def __init__(self, *, uri: str | None, directory: RunDirectory, experiment: str) -> None:
        self.uri = check_uri(uri) if uri is not None else f"sqlite:///{directory.path / 'mlflow.db'}"
        self._directory, self._experiment = directory, experiment
        _prepare_environment(self.uri)
        self._failures = _failures()
        self._client: MlflowClient | None = None  # a client of a database connects when it is made
        if self.uri.startswith("sqlite"):
            try:
                # Made and migrated by one process before anyone else opens it: two that do so at once both fail.
                self._client = _client(self.uri)
                self._client.search_experiments(max_results=1)
            except self._failures as error:
                raise RaydpError(
                    f"tracking database {self.uri} cannot be opened ({_first_line(error)}). Check the path, or leave "
                    "--tracking-uri out to get a new one in the run directory."
                ) from error
        self._state = self._read_state()
        self._definition: Mapping[str, Any] = directory.definition
        self._varying: tuple[str, ...] | None = None
        self._searching = False
        # Shared with the thread, under the condition:
        self._condition = threading.Condition()
        self._parent_pending = False
        self._pending: dict[str, TrialRecord | None] = {}  # None: only new steps
        self._points: _Points = {}
        self._latest: dict[str, TrialRecord] = {}
        self._busy = self._closing = self._flushing = self._outage = False
        self._retry_at, self._delay = 0.0, _RETRY_SECONDS[0]
        self.degraded: str | None = None  # why the tracker cannot be reached, while it cannot
        # The thread's own:
        self._server: _Server | None = None
        self._offsets: dict[Path, int] = {}
        self._state_due = 0.0  # when tracking.json may be written again
        self._thread = threading.Thread(target=self._work, name="raydp-tracker", daemon=True)
        self._thread.start()

    # What the driver tells.

    def start_search(self, definition: Mapping[str, Any], varying: Sequence[str]) -> None:
        """The search begins, or goes on. ``varying``: the hyperparameters that become params of the trials."""
        with self._condition:
            self._definition, self._varying, self._searching = definition, tuple(varying), True
            self._state["search"] = {"state": "running", "summary": {}}
            self._parent_pending = True
            self._condition.notify_all()

    def trial_proposed(self, record: TrialRecord) -> None:
        """A trial was proposed, or found to be infeasible."""
        self._note(record)

    def trial_started(self, record: TrialRecord) -> None:
        """An attempt at a trial began."""
        self._note(record)

    def trial_finished(self, record: TrialRecord) -> None:
        """A trial reached a terminal state."""
        self._note(record)

    def log_metrics(self, key: str, step: int, metrics: Mapping[str, float], *, seed: int = 0) -> None:
        """Values at a step of one run of a trial. What metrics.jsonl of that run holds as well is written once."""
        with self._condition:
            self._points.setdefault(key, []).append((seed, step, dict(metrics)))
            self._pending.setdefault(key, None)
            self._condition.notify_all()

    def finish_search(self, result_summary: Mapping[str, Any], state: str) -> None:
        """The search ends in state ``complete``, ``failed`` or ``stopped``; unfinished trials are marked as killed.

        Numbers of the summary become metrics of the parent run, strings become tags.
        """
        if state not in ("complete", "failed", "stopped"):
            raise InvalidValue("state", state, "must be complete, failed or stopped", "Say how the search ended.")
        with self._condition:
            self._searching = False
            self._state["search"] = {"state": state, "summary": _jsonable(result_summary)}
            self._parent_pending = True
            self._pending.update({key: record for key, record in self._latest.items() if not record.finished})
            self._condition.notify_all()

    def synchronise(self, timeout: float = 60.0) -> bool:
        """Upload whatever the run directory holds and the tracker lacks; whether all of it arrived in time.

        Without a search in progress (:meth:`start_search`), runs that a dead driver left running are marked as killed.
        """
        records = self._directory.records()
        with self._condition:
            self._parent_pending = True
            self._latest.update(records)
            self._pending.update(records)
            self._condition.notify_all()
        return self.flush(timeout)

    def flush(self, timeout: float = 30.0) -> bool:
        """Wait until everything is written; False if the tracker cannot be reached or the time is over."""
        deadline = time.monotonic() + timeout
        with self._condition:
            self._retry_at, self.degraded = 0.0, None  # ask the server once more now, whatever happened before
            self._flushing = True
            self._condition.notify_all()
            while self._thread.is_alive() and (self._work_left() or self._busy) and self.degraded is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._condition.wait(min(left, 0.5))
            self._flushing = False
            return not self._work_left() and not self._busy

    def close(self, timeout: float = 30.0) -> None:
        """Write what is left and end the thread. A search that was not finished is marked as stopped."""
        if self._searching:
            self.finish_search({}, "stopped")
        self.flush(timeout)
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        self._thread.join(timeout)
        if not self._thread.is_alive():
            with contextlib.suppress(RaydpError):  # a full disk; the next driver asks the tracker instead
                self._write_state()

    # The thread.

    def _note(self, record: TrialRecord) -> None:
        with self._condition:
            self._latest[record.key] = self._pending[record.key] = record
            self._condition.notify_all()

    def _work_left(self) -> bool:
        return self._parent_pending or bool(self._pending)

    def _work(self) -> None:
        while True:
            with self._condition:
                self._busy = False
                self._condition.notify_all()
                while not self._closing and not (self._work_left() and time.monotonic() >= self._retry_at):
                    pause = self._retry_at - time.monotonic() if self._work_left() else None
                    self._condition.wait(None if pause is None else max(pause, 0.01))
                if self._closing:
                    return
                self._busy = True
                parent, pending, points = self._parent_pending, self._pending, self._points
                self._parent_pending, self._pending, self._points = False, {}, {}
            try:
                try:
                    self._round(parent, pending, points)
                finally:
                    if time.monotonic() >= self._state_due:
                        self._write_state()
            except self._failures as error:
                self._put_back(error, pending, points)
            else:
                with self._condition:
                    if self._outage:
                        _log.warning("MLflow at %s answers again.", _redacted(self.uri))
                    self._outage, self.degraded, self._delay = False, None, _RETRY_SECONDS[0]
                    self._busy = False
                    self._condition.notify_all()
                    self._condition.wait_for(lambda: self._closing or self._flushing, timeout=_PAUSE)

    def _put_back(self, error: BaseException, pending: dict[str, TrialRecord | None], points: _Points) -> None:
        """After a failed round: keep what was not written, and leave the tracker alone for a while."""
        self._server = None  # what it holds is uncertain now: a write may have arrived all the same
        with self._condition:
            self._parent_pending = True
            self._pending = {**pending, **{key: new or pending.get(key) for key, new in self._pending.items()}}
            for key, series in points.items():
                self._points[key] = series + self._points.get(key, [])
            self._retry_at = time.monotonic() + self._delay
            self._delay = min(2 * self._delay, _RETRY_SECONDS[1])
            first, self._outage, self.degraded = not self._outage, True, _first_line(error)
        if first:
            _log.warning(
                "MLflow at %s cannot be written (%s). The search goes on; its results are kept in %s and uploaded when "
                "the tracker answers again, or by `raydp resume`.",
                _redacted(self.uri),
                self.degraded,
                self._directory.path,
            )

    def _round(self, parent: bool, pending: dict[str, TrialRecord | None], points: _Points) -> None:
        """Write one batch. What was written is taken out of ``pending`` and ``points``; a failure leaves the rest."""
        if self._server is None:
            self._client = self._client or _client(self.uri)
            server = _Server(self._client, self.uri, self._directory, self._experiment)
            known = {run["run_id"]: run for run in self._acknowledged().values()}
            # What was acknowledged for a run that the server no longer has is void.
            runs = {key: known.get(run_id, _new_entry(run_id)) for key, run_id in server.runs.items()}
            self._state["trackers"][_redacted(self.uri)] = {"experiment_id": server.experiment_id, "runs": runs}
            self._server = server
        if parent or SEARCH not in self._server.runs:
            self._write_run(SEARCH, self._parent_content())
        for key in list(pending):
            try:
                self._write_trial(key, pending[key], points.get(key, []))
            except self._failures as error:
                if not _is_refusal(error):
                    raise
                # The server answers and does not take this run (deleted by hand, say): the others can still be written.
                _log.warning("MLflow lacks (part of) trial %s: %s", key, _first_line(error))
            del pending[key]
            points.pop(key, None)

    def _write_trial(self, key: str, record: TrialRecord | None, points: Sequence[_Point]) -> None:
        record = record or self._latest.get(key)
        if record is None:
            return  # steps of a trial that nobody proposed: found again by synchronise() once the journal knows it
        entry = self._write_run(key, self._trial_content(record))
        seen: dict[Path, int] = {}
        series = [*self._lines(key, seen), *points]
        self._write_steps(key, entry, series)
        self._offsets.update(seen)

    def _write_run(self, key: str, content: _Content) -> dict[str, Any]:
        """Make the run hold this content; the run's entry of tracking.json."""
        assert self._server is not None
        entries = self._acknowledged()
        run_id = self._server.ensure(key, content)
        entry = entries.setdefault(key, _new_entry(run_id))
        digest = content.digest()
        if entry["content"] != digest:
            self._server.apply(run_id, content)
            entry["content"] = digest
        return entry

    def _write_steps(self, key: str, entry: dict[str, Any], series: Sequence[_Point]) -> None:
        """Log what lies beyond the last acknowledged step of each metric; steps that are replayed fall behind it."""
        assert self._server is not None
        last: dict[str, int] = dict(entry["steps"])
        new: list[tuple[str, int, float]] = []
        for seed, step, values in series:
            for name, value in values.items():
                metric, number = f"seed-{seed}/{_metric_name(name)}", finite(value)
                if number is None or step <= last.get(metric, -1):
                    continue
                if metric not in self._server.known_steps.get(key, ()):
                    # Written before this connection? tracking.json may be older than the server's last answer.
                    last[metric] = max(last.get(metric, -1), self._server.last_step(key, metric))
                    self._server.known_steps.setdefault(key, set()).add(metric)
                    if step <= last[metric]:
                        continue
                last[metric] = step
                new.append((metric, step, number))
        if new:
            self._server.log_steps(key, new)
        entry["steps"] = last

    def _lines(self, key: str, seen: dict[Path, int]) -> Iterator[_Point]:
        """(seed, step, values) of the lines of the trial's metrics.jsonl files that were not read yet."""
        for seed, run in self._directory.runs(key):
            path = run / "metrics.jsonl"
            if not path.exists():
                continue
            with path.open("rb") as file:
                offset = self._offsets.get(path, 0)
                size = file.seek(0, os.SEEK_END)
                file.seek(offset if offset <= size else 0)  # a trial that went back to a checkpoint may have cut it
                while (line := file.readline()).endswith(b"\n"):
                    try:
                        record = json.loads(line)
                        yield seed, int(record["step"]), dict(record["metrics"])
                    except (ValueError, TypeError, KeyError) as error:
                        raise CorruptFile(f"{path} is damaged before byte {file.tell()}: {error}") from error
                    seen[path] = file.tell()

    # What the runs should hold.

    def _trial_content(self, record: TrialRecord) -> _Content:
        status = _STATUS[record.state]
        if not record.finished and not self._searching:
            status = "KILLED"  # nobody is working on it
        names = self._varying
        if names is None:
            fixed = self._definition.get("fixed") or {}
            names = tuple(name for name in record.config if name not in fixed)
        varying = {name: record.config[name] for name in names if name in record.config}
        params = dict(varying)
        method = record.config.get("method", self._definition.get("method"))
        if method is not None:
            params["method"] = method
        params.update(_first_axes(varying))
        metrics: dict[str, float | None] = {}
        if record.state != "infeasible":
            for name in _listed(self._definition.get("metric")):
                metrics[_metric_name(name)] = _NOT_MEASURED
        for name in record.metrics:
            mean = record.mean(name)
            metrics[_metric_name(name)] = metrics.get(_metric_name(name)) if mean is None else mean
            metrics[f"{_metric_name(name)}_std"] = record.std(name)
        if record.finished:
            metrics["seconds"] = record.seconds
        for accountant, interval in record.epsilon.items():
            metrics[f"epsilon.{accountant}"] = interval.upper
            metrics[f"epsilon.{accountant}.lower"] = interval.lower
        if record.state == "diverged":
            metrics["diverged"] = 1.0
        tags = {
            "raydp.state": record.state,
            "raydp.reason": record.reason or "",
            "raydp.attempts": str(record.attempts),
            "raydp.measured_on": record.measured_on,
        }
        if self._definition.get("insecure_seed") is not None:
            tags["raydp.insecure"] = "noise from a known seed: nothing is private"
        return _Content(
            name=_label(record.key, varying),
            status=status,
            params={name: _param(value) for name, value in params.items()},
            tags={name: value[:_TAG_LIMIT] for name, value in tags.items()},
            metrics={name: value for name, value in metrics.items() if value is not None},
            files=self._files(record),
        )

    def _files(self, record: TrialRecord) -> dict[str, Path]:
        """The artifacts of a trial, by name: never a directory, in which a checkpoint or a key could lie."""
        root = self._directory.trial_directory(record.key)
        files = {name: root / name for name in ("config.json", "plan.json", holdout.PLAN)}
        if record.finished:  # a ledger in progress would be uploaded again with every line
            for i, run in self._directory.runs(record.key):
                files.update({f"seed-{i}/{name}": run / name for name in ("ledger.jsonl", holdout.LEDGER)})
        return {name: path for name, path in files.items() if path.is_file()}

    def _parent_content(self) -> _Content:
        definition, search = self._definition, self._state["search"] or {"state": "stopped", "summary": {}}
        state = search["state"]
        if state == "running" and not self._searching:
            state = "stopped"  # the driver died
        fields = {name: definition[name] for name in _PARENT_PARAMS if definition.get(name) is not None}
        fields.update({k: v for k, v in (definition.get("budget") or {}).items() if v is not None})
        summary = search["summary"]
        numbers = {name: finite(value) for name, value in summary.items() if not isinstance(value, str)}
        tags = {f"raydp.{name}": value[:_TAG_LIMIT] for name, value in summary.items() if isinstance(value, str)}
        return _Content(
            name=self._experiment,
            status=_STATUS[state],
            params={name: _param(value) for name, value in fields.items()},
            tags={**tags, "raydp.state": state, "mlflow.note.content": _description(definition, self._directory.path)},
            metrics={_metric_name(name): value for name, value in numbers.items() if value is not None},
            files=self._documents() if not self._searching else {},
        )

    def _documents(self) -> dict[str, Path]:
        files = {name: self._directory.path / name for name in ("statement.json", "statement.txt", REPORT)}
        return {name: path for name, path in files.items() if path.is_file()}

    # tracking.json

    def _acknowledged(self) -> dict[str, dict[str, Any]]:
        tracker = self._state["trackers"].get(_redacted(self.uri), {})
        runs: dict[str, dict[str, Any]] = tracker.get("runs", {})
        return runs

    def _read_state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"search": None, "trackers": {}}
        try:
            content = json.loads((self._directory.path / _STATE_FILE).read_text(encoding="utf-8"))
            return {name: content[name] for name in state}
        except FileNotFoundError:
            return state
        except (ValueError, TypeError, KeyError) as error:
            _log.warning("%s is damaged (%s) and begun anew; the tracker is asked instead.", _STATE_FILE, error)
            return state

    def _write_state(self) -> None:
        begun = time.monotonic()
        self._directory.write_json(_STATE_FILE, self._state, indent=None)
        self._state_due = time.monotonic() + _STATE_SHARE * (time.monotonic() - begun)


def probe(uri: str) -> None:
    """Ask a tracker for its experiments.

    Raises:
        InvalidValue: the URI is a file store or of an unknown kind.
        RaydpError: it cannot be reached or opened.
    """
    check_uri(uri)
    _prepare_environment(uri)
    try:
        _client(uri).search_experiments(max_results=1)
    except _failures() as error:
        raise RaydpError(_first_line(error)) from error


def log_report(directory: RunDirectory) -> bool:
    """Put the run directory's report.html beside its search in the run directory's own tracker; whether it is there.

    Nothing happens where the search was tracked elsewhere, or where the directory was moved since: its tracker then
    still names the old place of the artifacts.
    """
    database = directory.path / "mlflow.db"
    if not database.is_file() or not (directory.path / REPORT).is_file():
        return False
    uri = f"sqlite:///{database}"
    _prepare_environment(uri)
    try:
        client = _client(uri)
        runs = client.search_runs(
            [experiment.experiment_id for experiment in client.search_experiments()],
            filter_string=f"tags.`raydp.search_id` = '{directory.header['id']}'"
            f" and tags.`raydp.trial_key` = '{SEARCH}'",
        )
        here = (directory.path / "mlartifacts").as_uri()
        if not runs or not str(runs[0].info.artifact_uri).startswith(here):
            return False
        client.log_artifact(runs[0].info.run_id, str(directory.path / REPORT))
    except _failures() as error:
        _log.warning("The report was not added to %s: %s", uri, _first_line(error))
        return False
    return True


class _Server:
    """A connection at which the experiment exists and the runs of this search are known. Every method may fail."""

    def __init__(self, client: MlflowClient, uri: str, directory: RunDirectory, experiment: str) -> None:
        self._client, self._search_id = client, str(directory.header["id"])
        self.experiment_id = _experiment(client, experiment, uri)
        self.runs: dict[str, str] = {}  # trial key or SEARCH -> run id
        self.known_steps: dict[str, set[str]] = {}  # metrics of which the last step is certain
        token = None
        while True:
            page = client.search_runs(
                [self.experiment_id],
                filter_string=f"tags.`raydp.search_id` = '{self._search_id}'",
                order_by=["attributes.start_time DESC"],  # of two, the first one made wins
                page_token=token,
            )
            self.runs.update({run.data.tags["raydp.trial_key"]: run.info.run_id for run in page})
            token = page.token
            if not token:
                break

    def ensure(self, key: str, content: _Content) -> str:
        """The id of the run of that key, which is made if there is none."""
        if key not in self.runs:
            tags = {"raydp.search_id": self._search_id, "raydp.trial_key": key, **content.tags}
            if key != SEARCH:
                tags["mlflow.parentRunId"] = self.runs[SEARCH]
            run = self._client.create_run(self.experiment_id, tags=tags, run_name=content.name)
            self.runs[key] = run.info.run_id
        return self.runs[key]

    def apply(self, run_id: str, content: _Content) -> None:
        """Write what the run lacks. A param that exists stays: MLflow refuses to change it."""
        from mlflow.entities import Metric, Param, RunTag

        run = self._client.get_run(run_id)
        now = int(time.time() * 1000)
        has = run.data
        metrics = [Metric(k, v, now, 0) for k, v in content.metrics.items() if not _same(has.metrics.get(k), v)]
        params = [Param(k, v) for k, v in content.params.items() if k not in has.params]
        tags = [RunTag(k, v) for k, v in content.tags.items() if has.tags.get(k) != v]
        while metrics or params or tags:
            self._client.log_batch(run_id, metrics=metrics[:500], params=params[:100], tags=tags[:100])
            metrics, params, tags = metrics[500:], params[100:], tags[100:]
        for name, path in content.files.items():
            self._client.log_artifact(run_id, str(path), os.path.dirname(name) or None)
        if run.info.run_name != content.name:
            self._client.update_run(run_id, name=content.name)
        if run.info.status != content.status:
            if content.status in ("RUNNING", "SCHEDULED"):
                self._client.update_run(run_id, status=content.status)
            else:
                self._client.set_terminated(run_id, content.status)

    def last_step(self, key: str, metric: str) -> int:
        """The last step at which the run holds the metric, or -1."""
        history: Sequence[Metric] = self._client.get_metric_history(self.runs[key], metric)
        return max((point.step for point in history), default=-1)

    def log_steps(self, key: str, points: Sequence[tuple[str, int, float]]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        for start in range(0, len(points), 500):
            batch = [Metric(name, value, now, step) for name, step, value in points[start : start + 500]]
            self._client.log_batch(self.runs[key], metrics=batch)


_PARENT_PARAMS = (
    "method",
    "data",
    "model",
    "metric",
    "mode",
    "sampler",
    "trials",
    "seeds",
    "accountant",
    "seed",
    "insecure_seed",
)
_REFUSALS = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST", "RESOURCE_DOES_NOT_EXIST", "PERMISSION_DENIED")


def _new_entry(run_id: str) -> dict[str, Any]:
    return {"run_id": run_id, "content": None, "steps": {}}


def check_uri(uri: str) -> str:
    """The URI of a tracker, if it is a server or a database. Raises InvalidValue."""
    scheme = uri.split(":", 1)[0].split("+", 1)[0] if ":" in uri else ""
    if scheme in _SCHEMES:
        return uri
    if scheme in ("", "file"):
        rule = "must be a server or a database; MLflow no longer writes to directories of files"
        fix = (
            "Write http://HOST:PORT or sqlite:///PATH.db; an existing directory is converted by "
            f"`mlflow migrate-filestore --source {uri.removeprefix('file://') or 'mlruns'} --target sqlite:///PATH.db`."
        )
        raise InvalidValue("tracking_uri", uri, rule, fix)
    raise InvalidValue("tracking_uri", uri, f"must begin with one of {', '.join(_SCHEMES)}", "Write http://HOST:PORT.")


def _prepare_environment(uri: str) -> None:
    """Settings that MLflow reads from the environment only; what the user has set stays."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # it would tear the live table
    if uri.startswith("http"):
        # The defaults hold a caller for minutes. Retries are ours, after a pause.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")


def _client(uri: str) -> MlflowClient:
    from mlflow import MlflowClient

    for name in ("mlflow.store.db.utils", "alembic"):
        # "Creating initial MLflow database tables" on every new search; warnings and errors still show.
        logging.getLogger(name).setLevel(logging.WARNING)
    return MlflowClient(tracking_uri=uri, registry_uri=uri)


def _failures() -> tuple[type[BaseException], ...]:
    """What an MLflow store raises when it is down, full or refuses (requests' exceptions are OSErrors)."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    return (MlflowException, SQLAlchemyError, OSError, RaydpError)


def _is_refusal(error: BaseException) -> bool:
    return isinstance(error, CorruptFile) or getattr(error, "error_code", None) in _REFUSALS


def _experiment(client: MlflowClient, name: str, uri: str) -> str:
    """The id of the experiment of that name, made or restored if need be."""
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        location = None  # a server knows where its artifacts go
        if uri.startswith("sqlite:///"):
            location = (Path(uri.removeprefix("sqlite:///")).absolute().parent / "mlartifacts").as_uri()
        # Else the interface takes it for a chat application's, and opens on an empty page of traces.
        tags = {"mlflow.experimentKind": "custom_model_development"}
        return str(client.create_experiment(name, artifact_location=location, tags=tags))
    if experiment.lifecycle_stage != "active":
        client.restore_experiment(experiment.experiment_id)
    return str(experiment.experiment_id)


def _redacted(uri: str) -> str:
    """The URI without user and password."""
    return re.sub(r"//[^/@]*@", "//", uri)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return _redacted(lines[0][:300]) if lines else type(error).__name__


def _param(value: Any) -> str:
    """Canonical text, for a param can never change: true, 7, 7.0, 0.1; what is long is a digest."""
    if isinstance(value, bool):
        text = "true" if value else "false"
    elif isinstance(value, list | tuple):
        text = ",".join(map(str, value))
    else:
        text = value if isinstance(value, str) else repr(value)
    if len(text) <= _PARAM_LIMIT:
        return text
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()[:16]} (see config.json)"


def _listed(names: Any) -> list[str]:
    return [names] if isinstance(names, str) else list(names or ())


def _same(logged: float | None, wanted: float) -> bool:
    """Whether a metric holds that value already; NaN is one value."""
    return logged == wanted or (logged is not None and math.isnan(logged) and math.isnan(wanted))


def _first_axes(varying: Mapping[str, Any]) -> dict[str, Any]:
    """The splits of the budget under names that sort first, where MLflow would not draw them at once."""
    splits = {name: value for name, value in varying.items() if name.endswith(("_share", "_fraction"))}
    if set(splits) <= set(sorted(varying)[:_AXES]):
        return {}
    return {f"Split/{name}": value for name, value in splits.items()}


def _metric_name(name: str) -> str:
    return re.sub(r"[^\w\-. /]", "_", name)[:_PARAM_LIMIT]


def _label(key: str, varying: Mapping[str, Any]) -> str:
    parts = [
        f"{name}={value:.3g}" if isinstance(value, float) else f"{name}={value}" for name, value in varying.items()
    ]
    label = " ".join([key, *parts])
    return label if len(label) <= _NAME_LIMIT else label[: _NAME_LIMIT - 1] + "…"


def _jsonable(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Strings and finite numbers of a summary; the rest has no place in a tag or a metric."""
    return {
        k: v if isinstance(v, str) else finite(v)
        for k, v in summary.items()
        if isinstance(v, str) or finite(v) is not None
    }


def _description(definition: Mapping[str, Any], path: Path) -> str:
    budget = definition.get("budget") or {}
    return (
        f"Search of **{definition.get('method')}** on **{definition.get('data')}**; every trial spends "
        f"(ε, δ) = ({budget.get('epsilon')}, {budget.get('delta')}), adjacency {budget.get('adjacency')}.\n\n"
        f"Run directory: `{path}`. Check what was spent: `raydp verify {path}`."
    )
