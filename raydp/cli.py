"""The command line: parses, calls, prints. What it calls is imported inside the commands, so that help is instant."""

from __future__ import annotations

import json
import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raydp.errors import InvalidValue, RaydpError

if TYPE_CHECKING:
    from raydp.search.definition import Search
    from raydp.search.results import Result

app = typer.Typer(
    name="raydp",
    help="Search hyperparameters and budget splits of private training; every trial spends exactly its budget.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from raydp import __version__

        typer.echo(f"raydp {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    pass


_File = Annotated[
    Path, typer.Argument(metavar="FILE", help="A Python file that defines `search`, or several in `searches`.")
]
_RunDirectory = Annotated[Path, typer.Argument(metavar="DIR", help="A run directory.")]
_RunDirectories = Annotated[list[Path], typer.Argument(metavar="DIR [DIR …]", help="Run directories.")]
_Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="Set a field of the search or a hyperparameter; repeatable."),
]
_Trials = Annotated[int | None, typer.Option("--trials", help="Number of trials.")]
_Epsilon = Annotated[float | None, typer.Option("--epsilon", help="Epsilon of each trial.")]
_Scale = Annotated[str | None, typer.Option("--scale", metavar="small|paper", help="Settings named in the file.")]
_After = Annotated[
    list[str] | None,
    typer.Option("--after", metavar="DIR", help="Go on from an earlier search, whose spending counts; repeatable."),
]
_Only = Annotated[str | None, typer.Option("--only", metavar="NAME", help="One search of a file that has several.")]
_Tracking = Annotated[
    str | None, typer.Option("--tracking-uri", help="MLflow server; by default a SQLite file in the run directory.")
]
_Address = Annotated[str | None, typer.Option("--address", help="Ray cluster; by default one on this machine.")]
_Jobs = Annotated[
    str,
    typer.Option(
        "--address", envvar="RAYDP_ADDRESS", help="Jobs API of the cluster: http://HOST:8265; or set RAYDP_ADDRESS."
    ),
]
_JobId = Annotated[str, typer.Argument(metavar="ID", help="A job; `raydp jobs` lists them.")]
_Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON on standard output and nothing else.")]


@app.command()
def run(
    file: _File,
    overrides: _Set = None,
    trials: _Trials = None,
    epsilon: _Epsilon = None,
    scale: _Scale = None,
    only: _Only = None,
    after: _After = None,
    storage: Annotated[
        Path | None, typer.Option("--storage", metavar="DIR", help="Run directory; by default ./runs/NAME-1, …")
    ] = None,
    tracking_uri: _Tracking = None,
    address: _Address = None,
    quiet: _Quiet = False,
    as_json: _Json = False,
) -> None:
    """Run the search in FILE; each of several into its own directory."""
    from raydp.search import runner
    from raydp.search.run_directory import free_directory

    searches = _searches(file, overrides=overrides, trials=trials, epsilon=epsilon, scale=scale, only=only, after=after)
    results: dict[str, Result] = {}
    for name, search in searches.items():
        if storage is None:
            directory = free_directory(name)
        elif len(searches) > 1:
            directory = storage / name
        else:
            directory = storage
        try:
            results[name] = runner.run(
                search,
                storage=directory,
                tracking_uri=tracking_uri,
                address=address,
                quiet=quiet or as_json,
                file=file,
            )
        except KeyboardInterrupt:
            _interrupted(directory)
        if not (quiet or as_json):
            _next_steps(directory)
    if as_json:
        _print_json(_one_or_all({name: result.to_json() for name, result in results.items()}))
    _exit_unless_complete(results.values())


@app.command()
def resume(
    directory: _RunDirectory,
    trials: Annotated[int, typer.Option("--trials", metavar="+N", help="Further trials beyond those planned.")] = 0,
    tracking_uri: _Tracking = None,
    address: _Address = None,
    quiet: _Quiet = False,
    as_json: _Json = False,
) -> None:
    """Go on with an interrupted search: nothing is lost, nothing runs twice for free."""
    from raydp.search import runner

    if trials < 0:
        raise InvalidValue("--trials", trials, "must not be negative", "Write --trials +5 for five further trials.")
    try:
        result = runner.resume(
            directory, extra_trials=trials, tracking_uri=tracking_uri, address=address, quiet=quiet or as_json
        )
    except KeyboardInterrupt:
        _interrupted(directory)
    if as_json:
        _print_json(result.to_json())
    elif not quiet:
        _next_steps(directory)
    _exit_unless_complete([result])


@app.command()
def submit(
    file: _File,
    address: _Jobs,
    overrides: _Set = None,
    trials: _Trials = None,
    epsilon: _Epsilon = None,
    scale: _Scale = None,
    only: _Only = None,
    after: _After = None,
    storage: Annotated[
        str | None, typer.Option("--storage", metavar="PATH", help="Run directory there, a path that all nodes see.")
    ] = None,
    tracking_uri: _Tracking = None,
    working_dir: Annotated[
        Path | None, typer.Option("--working-dir", metavar="DIR", help="What is sent; by default FILE's directory.")
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option("--exclude", metavar="NAME", help="Leave this out of it; repeatable.")
    ] = None,
    python: Annotated[
        str | None, typer.Option("--python", metavar="PATH", help="Python there; by default that of its workers.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Then print what it prints; Ctrl-C detaches.")] = False,
    as_json: _Json = False,
) -> None:
    """Run FILE's search on a cluster and return; submitting it again attaches to it, or goes on with it."""
    from raydp import cluster

    searches = _searches(file, overrides=overrides, trials=trials, epsilon=epsilon, scale=scale, only=only, after=after)
    given: list[tuple[str, object]] = [("--set", pair) for pair in overrides or ()]
    given += [("--after", directory) for directory in after or ()]
    given += [("--trials", trials), ("--epsilon", epsilon), ("--scale", scale), ("--only", only)]
    given += [("--tracking-uri", tracking_uri)]
    found = cluster.submit(
        file,
        name=file.stem if len(searches) > 1 else next(iter(searches)),
        address=address,
        storage=storage,
        working_dir=working_dir,
        excludes=exclude or (),
        options=[text for name, value in given if value is not None for text in (name, str(value))],
        python=python,
        notify=(lambda line: None) if as_json else typer.echo,
    )
    job = found.job
    if as_json:
        _print_json(found.to_json())
        return
    said = {
        "started": "started",
        "resumed": f"goes on, as attempt {job.attempt}",
        "attached": f"runs already, attempt {job.attempt}; nothing was sent",
        "complete": "is complete; nothing was sent",
    }
    typer.echo(f"{job.id} {said[found.outcome]}. Run directory there: {job.storage}")
    typer.echo(f"Follow: raydp logs -f {job.id}\nStop:   raydp stop {job.id}\nFetch:  raydp fetch {job.id}")
    if follow:
        _follow(job.id, address)


@app.command()
def jobs(address: _Jobs, as_json: _Json = False) -> None:
    """List the searches that were submitted to a cluster, the latest first."""
    from raydp import cluster

    found = cluster.jobs(address)
    if as_json:
        _print_json({"jobs": [job.to_json() for job in found]})
    else:
        from raydp.search import tables

        tables.print_jobs(found)


@app.command()
def logs(
    job_id: _JobId,
    address: _Jobs,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until it ends; Ctrl-C detaches.")] = False,
) -> None:
    """Print what a job has printed; with -f until it ends, and exit 1 unless it succeeded."""
    from raydp import cluster

    if follow:
        _follow(job_id, address)
    else:
        typer.echo(cluster.logs(job_id, address), nl=False)


@app.command()
def stop(
    job_id: _JobId,
    address: _Jobs,
    timeout: Annotated[float, typer.Option("--timeout", min=0, help="Seconds to wait for its end.")] = 120.0,
    as_json: _Json = False,
) -> None:
    """Stop a job as one Ctrl-C would: nothing is lost, and submitting it again goes on with it."""
    from raydp import cluster

    job = cluster.stop(job_id, address, timeout=timeout)
    if as_json:
        _print_json(job.to_json())
    elif job.ended:
        typer.echo(f"{job.id}: {job.status}. Go on with the same `raydp submit` command.")
    else:
        typer.echo(f"{job.id} is still {job.status}: its trials write their checkpoints. Look: raydp jobs")
    if not job.ended:
        raise typer.Exit(1)


@app.command()
def fetch(
    job_id: _JobId,
    address: _Jobs,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Where to; by default ./runs/ and its name there.")
    ] = None,
    as_json: _Json = False,
) -> None:
    """Bring a job's run directory here, without its secrets; again, to bring what is new."""
    from raydp.search.copies import fetch as fetch_copy

    result = fetch_copy(job_id, address=address, target=out)
    if as_json:
        _print_json(result.to_json())
    else:
        typer.echo(result.summary())
        _next_steps(result.directory)


@app.command()
def plan(
    file: _File,
    overrides: _Set = None,
    trials: _Trials = None,
    epsilon: _Epsilon = None,
    scale: _Scale = None,
    only: _Only = None,
    after: _After = None,
    proposals: Annotated[int, typer.Option("--proposals", min=0, help="How many first proposals to plan.")] = 3,
    as_json: _Json = False,
) -> None:
    """Show noise, steps, epsilon, time and memory of FILE's search, without training."""
    from raydp.search.preview import preview

    searches = _searches(file, overrides=overrides, trials=trials, epsilon=epsilon, scale=scale, only=only, after=after)
    previews = {name: preview(search, proposals) for name, search in searches.items()}
    if as_json:
        _print_json(_one_or_all(previews))
        return
    from raydp.search import tables

    for name, found in previews.items():
        tables.print_preview(name, found)


@app.command()
def verify(directory: _RunDirectory, as_json: _Json = False) -> None:
    """Recompute epsilon of every run from its ledger with all accountants; exit 1 if one is over its budget."""
    from raydp.search.verify import verify as verify_directory

    report = verify_directory(directory)
    if as_json:
        _print_json(report)
    else:
        from raydp.search import tables

        tables.print_verification(report)
    if not report["ok"]:
        raise typer.Exit(1)


@app.command()
def statement(directory: _RunDirectory, as_json: _Json = False) -> None:
    """Print the privacy statement of DIR's search, made anew from its ledgers: what was spent, what is not covered."""
    from raydp.search import statement as statements

    found = statements.build(directory)
    if as_json:
        _print_json(found)
    else:
        typer.echo(statements.text(found), nl=False)


@app.command()
def audit(
    target: Annotated[Path, typer.Argument(metavar="FILE|DIR", help="A search file, or a run directory.")],
    epsilon: Annotated[
        float | None, typer.Option("--epsilon", help="Epsilon to audit; by default the budget's, at most 3.")
    ] = None,
    canaries: Annotated[int, typer.Option("--canaries", min=10, help="Canaries of the one run.")] = 1000,
    runs: Annotated[int, typer.Option("--runs", min=10, help="Repeated runs in each of two worlds.")] = 200,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of coins, samples and noise.")] = 0,
    only: _Only = None,
    as_json: _Json = False,
) -> None:
    """Attack the training code with public canaries: lower bounds of epsilon; exit 1 if one exceeds the claim."""
    from raydp.search.audit import audit_search, trial_config
    from raydp.search.run_directory import RunDirectory, free_directory

    found: list[tuple[str, Search, Path, dict[str, Any] | None]] = []
    if target.is_dir():
        from raydp.search.runner import stored_search

        opened = RunDirectory.open(target)
        search = stored_search(opened)
        found.append((search.name, search, target / "audit", trial_config(opened)))
    else:
        searches = _searches(target, overrides=None, trials=None, epsilon=None, scale=None, only=only)
        found += [(name, search, free_directory(f"{name}-audit"), None) for name, search in searches.items()]
    reports = {}
    for name, search, directory, config in found:
        found_out = audit_search(
            search,
            directory,
            config=config,
            epsilon=epsilon,
            canaries=canaries,
            runs=runs,
            seed=seed,
            progress=(lambda line: None) if as_json else typer.echo,
        )
        reports[name] = found_out.to_json()
        if not as_json:
            verdict = "no bound exceeds its claim" if found_out.passed else "A BOUND EXCEEDS ITS CLAIM: do not release"
            typer.echo(f"{name}: {verdict}. Report and figure: {directory}")
    if as_json:
        _print_json(_one_or_all(reports))
    if not all(record["passed"] for record in reports.values()):
        raise typer.Exit(1)


@app.command()
def report(
    directories: _RunDirectories,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="The page; by default DIR/report.html, for several ./report.html."),
    ] = None,
    pairs: Annotated[
        list[str] | None,
        typer.Option("--pair", metavar="X,Y", help="Show the metric over two more hyperparameters; repeatable."),
    ] = None,
    as_json: _Json = False,
) -> None:
    """Write one HTML page of one search or several that opens anywhere, and every figure as SVG and PNG beside it."""
    from raydp.search import report as reports
    from raydp.search.run_directory import RunDirectory
    from raydp.search.tracking import log_report

    results = _results(directories)
    target = out or (results[0].directory if len(results) == 1 else Path.cwd()) / reports.REPORT
    written = reports.write(results, target, pairs=[_pair(text) for text in pairs or ()])
    if len(results) == 1 and out is None:
        log_report(RunDirectory.open(results[0].directory))
    if as_json:
        _print_json({"page": str(written[0]), "figures": [str(path) for path in written[1:]]})
        return
    typer.echo(f"{written[0]} ({written[0].stat().st_size / 1e6:.1f} MB)")
    if written[1:]:
        typer.echo(f"{len(written) - 1} figures in {written[1].parent}")


@app.command()
def compare(directories: _RunDirectories, as_json: _Json = False) -> None:
    """Compare the best trials of two searches or more, by seed where possible; say what is not comparable."""
    from raydp.search import tables
    from raydp.search.comparison import compare as compare_results

    found = compare_results(_results(directories))
    if as_json:
        _print_json(found)
    else:
        tables.print_comparison(found)


@app.command()
def new(
    method: Annotated[str, typer.Argument(metavar="METHOD", help="A method; `raydp methods` lists them.")],
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="By default ./METHOD_search.py.")] = None,
) -> None:
    """Write a commented search file for METHOD that runs as it is."""
    from raydp.search.scaffold import write_search

    target = write_search(method, out)
    quoted = shlex.quote(str(target))
    typer.echo(f"{target}\nLook:  raydp plan {quoted}\nTrain: raydp run {quoted}")


@app.command()
def doctor(
    tracking_uri: _Tracking = None,
    address: _Address = None,
    quick: Annotated[bool, typer.Option("--quick", help="Start neither Ray nor a tracker.")] = False,
    as_json: _Json = False,
) -> None:
    """Check this machine and say what to do; exit 1 if something would stop a search."""
    from raydp.search import tables
    from raydp.search.doctor import examine

    findings = examine(tracking_uri=tracking_uri, address=address, quick=quick)
    if as_json:
        _print_json({"ok": all(f.status != "fail" for f in findings), "findings": [f.to_json() for f in findings]})
    else:
        tables.print_findings(findings)
    if any(finding.status == "fail" for finding in findings):
        raise typer.Exit(1)


@app.command()
def ui(
    directory: _RunDirectory,
    host: Annotated[str, typer.Option("--host", help="Interface to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port to listen on.")] = 5000,
) -> None:
    """Serve MLflow's user interface on a run directory, until Ctrl-C."""
    database = directory / "mlflow.db"
    if not database.is_file():
        raise InvalidValue(
            "DIR",
            str(directory),
            "holds no mlflow.db",
            "Give a run directory; a search with --tracking-uri is found on that server.",
        )
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise InvalidValue("--port", port, f"cannot be used: {error.strerror}", "Give another --port.") from error
    typer.echo(f"MLflow shows {directory} at http://{host}:{port} (Ctrl-C ends it)")
    command = [sys.executable, "-m", "mlflow", "server", "--host", host, "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{database.resolve()}"]
    command += ["--artifacts-destination", str((directory / "mlartifacts").resolve())]
    # In a process group of its own: Ctrl-C reaches only us, and we end the server and its workers without tracebacks.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    server = subprocess.Popen(command, start_new_session=True)
    try:
        code = server.wait()
    except KeyboardInterrupt:
        code = 0
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()
    raise typer.Exit(code)


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Show one method's hyperparameters.")] = None,
    as_json: _Json = False,
) -> None:
    """List the methods, or the hyperparameters of one."""
    from raydp import _validate
    from raydp.methods import METHODS
    from raydp.search import tables

    chosen = [METHODS[_validate.one_of("method", name, METHODS)]] if name else list(METHODS.values())
    records = [tables.describe_method(method) for method in chosen]
    if as_json:
        _print_json(records[0] if name else {"methods": records})
    elif name:
        tables.print_method(records[0])
    else:
        tables.print_names("methods", {record["name"]: record["summary"] for record in records})


@app.command()
def describe(
    files: Annotated[list[Path], typer.Argument(help="Parquet files of one table.", exists=True, dir_okay=False)],
    target: Annotated[str | None, typer.Option(help="The column to predict; the last one unless given.")] = None,
) -> None:
    """Draft the description of a table of your own, to fill in: raydp describe visits.parquet > visits.toml."""
    from raydp.data.drafts import draft

    typer.echo(draft(files, target), nl=False)


@app.command()
def datasets(as_json: _Json = False) -> None:
    """List the data sets that have a name; a directory with Parquet files can be given instead."""
    from raydp.data import catalogue

    found = dict(catalogue())
    if as_json:
        _print_json({"datasets": found})
    else:
        from raydp.search import tables

        tables.print_names("data sets", found)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line. What raydp refuses is one message and exit status 2; Ctrl-C is 130."""
    # Before any library does so in its own style: a warning is one line, without the source line that raised it.
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    warnings.formatwarning = _one_line
    try:
        app(args=None if arguments is None else list(arguments), prog_name="raydp")
    except RaydpError as error:
        from rich.console import Console
        from rich.text import Text

        Console(stderr=True).print(Text(f"error: {error}", style="red"), soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _one_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    return f"warning: {message}\n"


def parse_overrides(
    pairs: Sequence[str] | None, *, trials: int | None = None, epsilon: float | None = None
) -> dict[str, str]:
    """``["field=value", …]`` and the options that stand for fields, as the texts that a Search reads by its types.

    Raises:
        InvalidValue: no ``=``, no field, or a field given twice.
    """
    given = list(pairs or ())
    if trials is not None:
        given.append(f"trials={trials}")
    if epsilon is not None:
        given.append(f"budget.epsilon={epsilon!r}")
    found: dict[str, str] = {}
    for pair in given:
        field, equals, value = pair.partition("=")
        field = field.strip()
        if not equals or not field:
            raise InvalidValue("--set", pair, "must be FIELD=VALUE", "Write --set learning_rate=0.5, for example.")
        if field in found:
            raise InvalidValue("--set", pair, f"gives {field} a second time (first {found[field]})", "Give it once.")
        found[field] = value.strip()
    return found


def _searches(
    file: Path,
    *,
    overrides: Sequence[str] | None,
    trials: int | None,
    epsilon: float | None,
    scale: str | None,
    only: str | None,
    after: Sequence[str] | None = None,
) -> dict[str, Search]:
    """The file's searches with the scale and then the overrides applied."""
    from raydp.search.files import load_searches

    changes: dict[str, Any] = dict(parse_overrides(overrides, trials=trials, epsilon=epsilon))
    searches = load_searches(file, only=only)
    if scale is not None:
        searches = {name: search.scaled(scale) for name, search in searches.items()}
    if after:
        if "after" in changes:
            raise InvalidValue("--set", f"after={changes['after']}", "stands also in --after", "Give it once.")
        changes = {**changes, "after": tuple(after)}
    if changes:
        searches = {name: search.with_overrides(changes) for name, search in searches.items()}
    return searches


def _results(directories: Sequence[Path]) -> list[Result]:
    """The results in these run directories; of a directory that holds run directories, those are named.

    Raises:
        InvalidValue: one of them is no run directory.
    """
    from raydp.search.results import Result

    for directory in directories:
        inside = sorted(path.parent for path in directory.glob("*/raydp.json")) if directory.is_dir() else []
        if inside and not (directory / "raydp.json").exists():
            given = " ".join(shlex.quote(str(path)) for path in inside)
            raise InvalidValue("DIR", str(directory), "is not a run directory but holds some", f"Write: {given}")
    return [Result.load(directory) for directory in directories]


def _pair(text: str) -> tuple[str, str]:
    names = [name.strip() for name in text.split(",")]
    if len(names) != 2 or not all(names):
        raise InvalidValue("--pair", text, "must be X,Y", "Write --pair learning_rate,active_ratio, for example.")
    return names[0], names[1]


def _exit_unless_complete(results: Iterable[Result]) -> None:
    """Exit 1 when a search has no complete trial at all: there is nothing to take from it."""
    for result in results:
        if not any(record.state == "complete" for record in result.trials):
            reasons = Counter(record.reason for record in result.trials if record.reason)
            why = "".join(f" ({count} of {len(result.trials)}: {text})" for text, count in reasons.most_common(1))
            typer.echo(
                f"error: no trial of {result.directory} completed{why}; `raydp resume` can add trials.", err=True
            )
            raise typer.Exit(1)


def _follow(job_id: str, address: str) -> None:
    """Print what the job prints until it ends. Ctrl-C leaves it running; it exits 1 unless the job succeeded."""
    import asyncio

    from raydp import cluster

    async def show() -> None:
        async for text in cluster.follow(job_id, address):
            typer.echo(text, nl=False)

    try:
        asyncio.run(show())
    except KeyboardInterrupt:
        typer.echo(f"\nDetached; {job_id} goes on. Follow: raydp logs -f {job_id}", err=True)
        raise typer.Exit(130) from None
    job = cluster.find(job_id, address)
    typer.echo(f"{job.id}: {job.status}. {job.message}", err=True)
    if job.status != "SUCCEEDED":
        raise typer.Exit(1)


def _interrupted(directory: Path) -> None:
    typer.echo(f"\nInterrupted. Go on with: raydp resume {shlex.quote(str(directory))}", err=True)
    raise typer.Exit(130)


def _next_steps(directory: Path) -> None:
    quoted = shlex.quote(str(directory))
    typer.echo(f"Read:    raydp report {quoted}\nCompare: raydp ui {quoted}\nCheck:   raydp verify {quoted}")


def _one_or_all(found: Mapping[str, Any]) -> Any:
    """The JSON of one search as it is; of several, under ``searches`` by name."""
    return next(iter(found.values())) if len(found) == 1 else {"searches": dict(found)}


def _print_json(record: Any) -> None:
    typer.echo(json.dumps(record, indent=2, allow_nan=False))
