"""Runs a search on Ray Tune. The only module, with :mod:`raydp.search.trainable`, that knows its API."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune.error import TuneError
from ray.tune.search import Searcher
from torch import nn

from raydp.data import Dataset
from raydp.errors import CorruptFile, InvalidValue, RaydpError
from raydp.privacy.selection import RandomStopping
from raydp.search import carrying, holdout, statement, subsample
from raydp.search.connection import ClusterLost, Presence, concurrency, connected, head_watched, present
from raydp.search.definition import Resources, Search
from raydp.search.display import Display
from raydp.search.files import load_searches
from raydp.search.interrupts import Interrupts
from raydp.search.rehearsal import rehearse
from raydp.search.results import Result, write_trials_parquet
from raydp.search.run_directory import SOURCE, RunDirectory, free_directory
from raydp.search.secrecy import SilentTracker, is_released, open_store, release
from raydp.search.session import Session, task_to_json
from raydp.search.tracking import Tracker, check_uri
from raydp.search.trainable import TrialProcess
from raydp.training import gang
from raydp.training.run import held_out_of

_PATIENCE, _HURRIED = 30.0, 5.0  # seconds for the tracker to take what is left, and after a second Ctrl-C


def run(
    search: Search,
    *,
    storage: Path | None = None,
    tracking_uri: str | None = None,
    address: str | None = None,
    quiet: bool = False,
    file: Path | None = None,
) -> Result:
    """Run a search in a new run directory, or go on with it in the one that holds this very search already.

    Raises:
        InvalidValue: the directory is in use by another search, there is no cluster at the address, or the search asks
            for more than the cluster has. Nothing was spent, and no directory was made.
        RaydpError: the search cannot go on; the run directory says how far it came.
        KeyboardInterrupt: it was interrupted. Unfinished trials go on when it is resumed.
    """
    check(search)
    if tracking_uri is not None:
        check_uri(tracking_uri)
    definition = search.to_json()
    directory = _same_search(storage, definition) if storage is not None else None
    if directory is not None:
        return _drive(search, directory, tracking_uri=tracking_uri, address=address, quiet=quiet, extra_trials=0)
    path = storage or free_directory(search.name)
    RunDirectory.require_new(path)
    carrying.found(search)
    with connected(search, address, tracking_uri=tracking_uri):
        concurrency(search)  # what does not fit is refused before there is a directory
        directory = RunDirectory.create(path, definition, source_file=file)
        return _drive(search, directory, tracking_uri=tracking_uri, address=address, quiet=quiet, extra_trials=0)


def resume(
    directory: Path,
    *,
    extra_trials: int = 0,
    tracking_uri: str | None = None,
    address: str | None = None,
    quiet: bool = False,
) -> Result:
    """Go on with a search whose driver ended, however it ended.

    Unfinished trials go on from their checkpoints, with their keys and ledgers; then the rest is proposed.

    Args:
        directory: the run directory.
        extra_trials: trials to add to those that the search defines.

    >>> import pathlib
    >>> import raydp
    >>> raydp.resume(pathlib.Path("runs/quickstart-1"), extra_trials=6)  # doctest: +SKIP
    >>> raydp.resume(pathlib.Path("nowhere"))
    Traceback (most recent call last):
        ...
    raydp.errors.InvalidValue: run directory = ...: must be a directory that raydp made (there is none of ...
    """
    opened = RunDirectory.open(directory)
    search = stored_search(opened)
    if extra_trials and isinstance(search.rule, RandomStopping):
        raise InvalidValue(
            "--trials",
            extra_trials,
            "would void random stopping, whose number of trials is drawn before anything runs",
            "Start a new search; it has its own cost.",
        )
    if extra_trials and subsample.final_of(opened.records()) is not None:
        raise InvalidValue(
            "--trials",
            extra_trials,
            "comes too late: the final run has begun with the config that tuning chose",
            "Start a new search; it has its own cost.",
        )
    if tracking_uri is None:
        tracking_uri = next((e["tracking_uri"] for e in reversed(opened.events()) if e["event"] == "driver"), None)
    return _drive(search, opened, tracking_uri=tracking_uri, address=address, quiet=quiet, extra_trials=extra_trials)


def check(search: Search) -> None:
    """Everything that can be refused before a directory is made: data, model, hyperparameters, delta."""
    from raydp import data, models

    dataset = data.load(search.data, limit=search.data_limit)
    search.budget.warn_if_delta_is_large(len(dataset.private))
    model = models.build_model(
        search.model_name(),
        input_shape=dataset.private.input_shape,
        outputs=dataset.private.outputs,
        seed=search.seed,
    )
    models.validate_model(model)
    _check_task(search, dataset, model)
    holdout.check_data(search, dataset)
    unnoised = dataset.holdout_visibility != "public benchmark" and search.holdout_budget is None
    if isinstance(search.rule, RandomStopping) and unnoised:
        raise InvalidValue(
            "data",
            search.data,
            "has a private hold-out, and random stopping releases the trial that scored best on it: the score itself "
            "would be an unaccounted query of private examples",
            "Give holdout_budget, so that the score is noised; use data with a public hold-out; or set "
            "selection='composition', where metrics are labelled non-private.",
        )
    population = search.population()
    wanting, refused, feasible = [], [], False
    for config in (*search.point_space.corners(), search.point_space.centre()):
        chosen, hyperparameters, _ = search.point(config)
        if chosen.uses_public(hyperparameters):
            wanting.append(chosen.name)
        try:
            chosen.phases(hyperparameters, population=population)
            feasible = True
        except InvalidValue as error:  # a corner may be infeasible: that is a trial's matter
            refused.append(error)
    if not feasible:  # neither a corner nor the centre: the rule that is broken does not depend on the proposal
        raise refused[0]
    if search.public is None and wanting:
        raise InvalidValue(
            "public", None, f"must name public examples for {wanting[0]}", "Set public to a name or a Parquet path."
        )
    if search.public is not None and not wanting:
        raise InvalidValue(
            "public", search.public, "is used by no method of this search", "Leave it out, or choose another method."
        )
    if search.public is not None:
        data.check_public(
            data.load_public(search.public, limit=search.public_limit, set_size=population), dataset.private
        )


def _check_task(search: Search, dataset: Dataset, model: nn.Module) -> None:
    """The task suits the data and the methods, and the objectives can be measured."""
    chosen = search.target_task
    private = dataset.private
    chosen.check(
        dataset.name, input_shape=private.input_shape, num_classes=private.num_classes, num_labels=private.num_labels
    )
    for candidate in search.methods:
        candidate.check_task(chosen)
    available = chosen.available(model, held_out_of(dataset))
    for metric in search.metrics:
        if metric not in available:
            raise InvalidValue(
                "metric",
                metric,
                f"cannot be measured of the model {search.model_name()!r} on {dataset.name!r}",
                f"Choose one of {', '.join(available)}, or another model.",
            )
    rehearse(search, dataset, model)


def stored_search(directory: RunDirectory) -> Search:
    """The search of a run directory; a define-by-run space is read from the copy of the search's file.

    Raises:
        InvalidValue: it cannot be rebuilt, or a field breaks its rule. CorruptFile: it is no definition of a search.
    """
    try:
        return _stored_search(directory)
    except RaydpError:
        raise
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise CorruptFile(f"{directory.path}: its definition is damaged ({error}). Restore raydp.json.") from error


def _stored_search(directory: RunDirectory) -> Search:
    definition = directory.definition
    if definition["space"]["function"] is None:
        return Search.from_json(definition)
    source = directory.path / SOURCE
    if not source.exists():
        raise InvalidValue(
            "run directory",
            str(directory.path),
            "holds a search whose space is a Python function that was not in a file",
            "Call search.run(storage=…) on the same Search instead.",
        )
    for candidate in load_searches(source).values():
        if candidate.name == definition["name"]:
            return Search.from_json(definition, space=candidate.point_space)
    raise InvalidValue(
        "search.py", str(source), f"does not define the search {definition['name']!r}", "Restore the file."
    )


def _same_search(storage: Path, definition: dict[str, Any]) -> RunDirectory | None:
    """The run directory at ``storage`` if it holds the search of this definition."""
    try:
        opened = RunDirectory.open(storage)
    except InvalidValue:  # there is none
        return None
    wanted = json.loads(json.dumps(definition))
    stored = {"family": wanted["family"], **opened.definition}  # earlier versions lack it
    stored["resources"] = json.loads(json.dumps(dataclasses.asdict(Resources.from_json(stored["resources"]))))
    return opened if stored == wanted else None


def _drive(
    search: Search,
    directory: RunDirectory,
    *,
    tracking_uri: str | None,
    address: str | None,
    quiet: bool,
    extra_trials: int,
) -> Result:
    display = Display(trials=search.trials, metric=search.metrics, varying=search.point_space.varying, quiet=quiet)
    if isinstance(search.rule, RandomStopping):
        return _drive_secretly(search, directory, tracking_uri=tracking_uri, address=address, quiet=quiet)
    with directory.lock():
        directory.append({"event": "driver", "tracking_uri": _without_credentials(tracking_uri)})
        tracker, patience = Tracker(uri=tracking_uri, directory=directory, experiment=search.name), _PATIENCE
        state = "failed"
        try:
            tracker.start_search(directory.definition, search.point_space.varying)
            session = Session(search, directory, tracker=tracker, display=display)
            session.extend(extra_trials)
            trained = sum(record.finished and record.state != "infeasible" for record in directory.records().values())
            display.expect(trained + session.left)
            if session.left > 0:
                with connected(search, address, tracking_uri=tracking_uri):
                    concurrent = concurrency(search)
                    with display:
                        _fit(session, concurrent, display.note)
            session.close()
            state = "complete" if session.left == 0 else "stopped"
            try:
                write_trials_parquet(directory.path)
                statement.write(directory)
            except OSError as error:
                reason = session.failure or f"the table and the statement could not be written ({error})."
                raise RaydpError(f"{reason} Resume with: raydp resume {directory.path}") from error
            result = Result.load(directory.path)
            _report(result, display)
            tracker.finish_search(_numbers(result), state)
            if not tracker.synchronise():
                display.note(f"The tracker {tracker.uri} lacks a part; `raydp resume {directory.path}` uploads it.")
        except KeyboardInterrupt:
            patience = _HURRIED  # what the tracker lacks, a resume uploads
            raise
        finally:
            tracker.close(patience)
        display.finish(result.summary())
        if session.failure:
            raise RaydpError(session.failure)
        if session.left > 0:  # Tune ended the search gracefully; callers see what they know from everywhere else
            raise KeyboardInterrupt
        return result


def _report(result: Result, display: Display) -> None:
    """Write report.html into the run directory, where the tracker finds it."""
    from raydp.search import report

    try:
        report.write([result], result.directory / report.REPORT, pictures=False)
    except Exception as error:  # noqa: BLE001 - whatever a picture trips over, the search is over and its results stand
        display.note(f"The report was not written ({error}); try `raydp report {result.directory}`.")


def _drive_secretly(
    search: Search, directory: RunDirectory, *, tracking_uri: str | None, address: str | None, quiet: bool
) -> Result:
    """Random stopping: all trials in the private store, then the release of the best, and only then a tracker."""
    display = Display(trials=1, metric=search.metrics, varying=search.point_space.varying, quiet=quiet)
    with directory.lock():
        if not is_released(directory):
            display.note("Random stopping: how many trials run, and how they do, is secret until the best is released.")
            store, terms = open_store(search, directory)
            with store.lock():
                hidden = Display(trials=1, metric=search.metrics, quiet=True)
                tracker: Tracker = SilentTracker()  # type: ignore[assignment]
                session = Session(search, store, tracker=tracker, display=hidden, terms=terms)
                if session.left > 0:
                    with connected(search, address, tracking_uri=tracking_uri):
                        _fit(session, concurrency(search), display.note)
                session.close()
            if session.failure:
                raise RaydpError(session.failure)
            if session.left > 0:
                raise KeyboardInterrupt
            release(search, store, directory)
        directory.append({"event": "driver", "tracking_uri": _without_credentials(tracking_uri)})
        tracker, patience = Tracker(uri=tracking_uri, directory=directory, experiment=search.name), _PATIENCE
        try:
            tracker.start_search(directory.definition, search.point_space.varying)
            write_trials_parquet(directory.path)
            statement.write(directory)
            result = Result.load(directory.path)
            _report(result, display)
            tracker.finish_search(_numbers(result), "complete")
            if not tracker.synchronise():
                display.note(f"The tracker {tracker.uri} lacks a part; `raydp resume {directory.path}` uploads it.")
        except KeyboardInterrupt:
            patience = _HURRIED  # what the tracker lacks, a resume uploads
            raise
        finally:
            tracker.close(patience)
        display.finish(result.summary())
        return result


def _without_credentials(tracking_uri: str | None) -> str | None:
    """The URI as it may be written down, so that a resume finds the same tracker; None for one with a password."""
    return None if tracking_uri is not None and "@" in tracking_uri else tracking_uri


def _numbers(result: Result) -> dict[str, Any]:
    """What the parent run of the tracker shows of a result."""
    best = result.best if len(result.search["metric"]) == 1 else None
    numbers: dict[str, Any] = {"epsilon_search": result.epsilon_search.upper, "trials": len(result.trials)}
    numbers["epsilon_released"] = result.epsilon_released.upper
    numbers["selection"] = result.selection.rule
    if result.earlier:
        numbers["after"] = ", ".join(f"{each.name} ({each.id[:8]})" for each in result.earlier)
        if result.epsilon_carried is not None:
            numbers["epsilon_carried"] = result.epsilon_carried.upper
    if result.epsilon_holdout is not None:
        numbers["epsilon_holdout"] = result.epsilon_holdout.upper
    if best is not None:
        numbers["best_trial"] = best.key
        for metric in result.search["metric"]:
            numbers[f"best_{metric}"] = best.mean(metric)
    return numbers


def _fit(session: Session, concurrent: int, say: Callable[[str], None]) -> None:
    """Hand the session's trials to Tune until none is left, or until the first interrupt, which is said.

    Raises:
        KeyboardInterrupt: at a second interrupt, at once.
    """
    os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] = "1"  # Tune's CSV, JSON and TensorBoard copies of everything
    # Tune's own notes speak of result files that are switched off here; what went wrong is in the trial's reason.
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"
    for name in ("tune", "execution", "analysis.experiment_analysis", "utils.resource_updater", "utils.util"):
        logging.getLogger(f"ray.tune.{name}").setLevel(logging.CRITICAL)
    wanted = session.search.resources
    resume = f"raydp resume {shlex.quote(str(session.home))}"
    resume_with, interrupts = f"Resume with: {resume}", Interrupts(say, resume)
    own: dict[str, float] = {"cpu": wanted.cpus_per_worker, "gpu": wanted.gpus_per_worker}
    if together := wanted.workers != (1, 1):
        # The process of such a trial waits for its workers. If it held a core, theirs might never become free; Ray
        # wants it to hold something (ray-project/ray#54305).
        own = {"memory": 1}
    tuner = tune.Tuner(
        tune.with_resources(TrialProcess, own),
        tune_config=tune.TuneConfig(
            search_alg=_Proposals(session),
            num_samples=-1,  # the searcher says when it is finished
            max_concurrent_trials=concurrent,
            reuse_actors=True,
            trial_name_creator=lambda trial: json.loads(trial.config["task"])["key"],
            trial_dirname_creator=lambda trial: json.loads(trial.config["task"])["key"],
        ),
        run_config=tune.RunConfig(
            name="tune",
            storage_path=str(session.directory.path / "ray"),
            callbacks=[_Events(session), _Presence(), _Between(interrupts), *([_Abandoned()] if together else [])],
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
            # The session hands a trial out again whose process died: Tune itself gives up on one that dies before it
            # is told of its trial.
            failure_config=tune.FailureConfig(max_failures=0),
            verbose=0,
        ),
    )
    handler = signal.getsignal(signal.SIGINT)
    try:
        with head_watched(lambda text: session.note(f"{text} {resume_with}")):
            tuner.fit()
    except ClusterLost as error:
        session.failure = f"{error} {resume_with}"
    except TuneError as error:
        last = str(error).strip().splitlines()[-1]
        session.failure = session.failure or f"Ray Tune ended the search: {last}"
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, handler)  # Tune leaves its own, to which a later Ctrl-C would mean nothing
        if together and interrupts.count < 2 and present():
            _wait_for_workers()


def _wait_for_workers(limit: float = 20.0) -> None:
    """Return when the workers of all trials have given back what they occupied."""
    deadline = time.monotonic() + limit
    while gang.release_abandoned() and time.monotonic() < deadline:
        time.sleep(0.2)


@contextlib.contextmanager
def _stopping(session: Session) -> Iterator[None]:
    """Stop the search, resumably, when the session cannot go on. Tune would take it for the trial's failure and retry.

    Trials that are at work go on to their end; what cannot be written down about them is found again by a resume.
    """
    try:
        yield
    except (RaydpError, OSError) as error:
        session.failure = session.failure or str(error)


class _Proposals(Searcher):
    """Tune's searcher over a session. Tune may pickle it for its own restore, which raydp never uses."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session
        self._keys: dict[str, str] = {}

    def suggest(self, trial_id: str) -> Any:
        task = None
        with _stopping(self._session):
            task = self._session.next_task()
        if task is None:  # also where the session cannot go on
            return None if self._session.waiting else Searcher.FINISHED
        self._keys[trial_id] = task.key
        return {"task": task_to_json(task)}

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False, **_: Any
    ) -> None:
        key = self._keys[trial_id]
        with _stopping(self._session):
            if error:
                self._session.died(key)
            elif result and result.get("done") and "item" in result:
                item = json.loads(result["item"])
                if item["done"]:
                    self._session.finished(key, item)
        # Otherwise the trial was stopped from outside; it stays unfinished and is resumed.

    def save(self, checkpoint_path: str) -> None:
        """Nothing: the journal of the run directory is the truth."""

    def restore(self, checkpoint_path: str) -> None:
        raise NotImplementedError("resume with `raydp resume`, which rebuilds the search from its journal")

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return Searcher, ()


class _Events(tune.Callback):
    """Tells the session when a process begins with a trial, and what it reports."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        with _stopping(self._session):
            self._session.started(json.loads(trial.config["task"])["key"])

    def on_trial_result(self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **_: Any) -> None:
        item = json.loads(result["item"])
        if not item["done"]:
            self._session.progressed(json.loads(trial.config["task"])["key"], item)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return tune.Callback, ()


class _Presence(tune.Callback):
    """Ends the search when its cluster is gone: Tune would wait for it for ever."""

    def __init__(self) -> None:
        self._presence = Presence()

    def on_step_begin(self, iteration: int, trials: list[Any], **info: Any) -> None:
        self._presence.check()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return tune.Callback, ()


class _Between(tune.Callback):
    """Stands between Ctrl-C and Tune as soon as Tune has installed its handler."""

    def __init__(self, interrupts: Interrupts) -> None:
        self._interrupts = interrupts

    def on_step_begin(self, iteration: int, trials: list[Any], **info: Any) -> None:
        self._interrupts.stand_between()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return tune.Callback, ()


class _Abandoned(tune.Callback):
    """After the death of a trial's process, gives back what its workers occupied, as soon as they have ended too."""

    def __init__(self) -> None:
        self._until = self._next = 0.0

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._until = time.monotonic() + 60.0

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        now = time.monotonic()
        if self._next <= now < self._until:
            self._next = now + 0.5
            gang.release_abandoned()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return tune.Callback, ()


__all__ = ["check", "resume", "run", "stored_search"]
