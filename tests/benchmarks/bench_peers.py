"""A private step of raydp against Opacus, jax-privacy and SGD without privacy: time and memory, on five models.

    python -m tests.benchmarks.bench_peers --json FILE [--geometries] [--jax-python PATH] [--write]

For each model and batch size (:mod:`tests.benchmarks.peers.workloads`) all loops train on the same batch of random
examples, each in a process of its own (:mod:`tests.benchmarks.peers.loops`). First every loop is tried: its memory is
what its first steps add to what the process held before (what was loaded and, for jax, compiled, is not counted), and
the fastest micro-batch of each peer is chosen among 32, 64 and 128 (for jax 16, too). Then raydp, SGD and of each peer
the whole batch and that micro-batch run in turn, block by block; figures are medians over the blocks, ratios medians of
the ratios within a block, CPU time that of all threads. A peer that took more than ``--hopeless`` times the fastest
private loop's time when it was tried is not run again; its figure then has a ``~``.

The peers are Opacus' ``GradSampleModule`` by hooks and with ``force_functorch``, its ghost clipping, and jax-privacy's
``clipped_grad`` in one compiled function, for which ``--jax-python`` names an interpreter of an environment where ``pip
install jax-privacy`` was run; it has the models without convolution blocks or updates of low rank only (mlp, cnn,
transformer), the others would have to be written anew. raydp's step is that of a run without drawing the batch and
writing the ledger.

``--geometries`` also measures, at the largest batch, steps of DP-NGD without estimates of the curvature
(``bench_whitening`` has those too) and of TP-TopK's second phase against raydp's own step of DP-SGD.

Each finished cell is added to FILE at once. Cells that are there are not measured again, so a run can be stopped and
started anew, and with all of them there the tables are printed without measuring. ``--write`` puts them into the README
beside this file. Run it on a machine that does nothing else; the load before and after each cell is in FILE.
"""

from __future__ import annotations

import argparse
import json
import platform
from importlib.metadata import version
from pathlib import Path

from tests.benchmarks.peers.cells import GEOMETRIES, Cell, Options, compared, geometries
from tests.benchmarks.peers.table import comparison, geometry_table
from tests.benchmarks.peers.workloads import WORKLOADS

README = Path(__file__).parent / "README.md"
BEGIN, END = "<!-- bench_peers: begin -->", "<!-- bench_peers: end -->"


def read(file: Path | None, settings: dict[str, object]) -> list[Cell]:
    """The cells that were measured before; a last line that was cut off is none.

    Raises:
        SystemExit: they were measured with other settings.
    """
    if file is None or not file.exists():
        return []
    cells = [json.loads(line) for line in file.read_text().split("\n")[:-1]]
    for cell in cells:
        if cell["settings"] != settings:
            raise SystemExit(
                f"{file} has cells measured with {cell['settings']}, and this command says {settings}. Name another "
                "file, or give the same options."
            )
    return cells


def append(file: Path | None, cell: Cell) -> None:
    if file is None:
        return
    if file.exists():
        text = file.read_text()
        file.write_text(text[: text.rfind("\n") + 1])  # without a line that was cut off
    with open(file, "a") as lines:
        lines.write(json.dumps(cell) + "\n")


def write(text: str) -> None:
    """Put the text between the markers of the README."""
    before, rest = README.read_text().split(BEGIN)
    README.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}")


def main(arguments: list[str] | None = None) -> None:
    everything = [name for name in WORKLOADS if name != "tiny"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="*", default=everything, choices=list(WORKLOADS), metavar="NAME")
    parser.add_argument("--batches", nargs="+", type=int, default=[32, 128, 512])
    parser.add_argument("--threads", type=int, default=Options.threads)
    parser.add_argument("--blocks", type=int, default=Options.blocks, help="that count, of each loop")
    parser.add_argument(
        "--block-seconds", type=float, default=Options.block_seconds, help="a block lasts about so long"
    )
    parser.add_argument("--hopeless", type=float, default=Options.hopeless, help="times the fastest; see above")
    parser.add_argument("--jax-python", type=Path, help="an interpreter that has jax-privacy")
    parser.add_argument("--geometries", action="store_true", help="DP-NGD and TP-TopK against DP-SGD, too")
    parser.add_argument("--json", type=Path, help="keep the cells here, one a line")
    parser.add_argument("--write", action="store_true", help="into the README beside this file")
    chosen = parser.parse_args(arguments)
    options = Options(
        threads=chosen.threads,
        blocks=chosen.blocks,
        block_seconds=chosen.block_seconds,
        hopeless=chosen.hopeless,
        jax_python=chosen.jax_python,
    )
    settings = {**options.facts(), "torch": version("torch"), "opacus": version("opacus")}
    plan = [("peers", workload, batch) for workload in chosen.workloads for batch in chosen.batches]
    if chosen.geometries:
        plan += [("geometries", workload, max(chosen.batches)) for workload in GEOMETRIES]
    found = {(cell["part"], cell["workload"], cell["batch"]): cell for cell in read(chosen.json, settings)}
    for part, workload, batch in plan:
        if (part, workload, batch) in found:
            continue
        if part == "peers":
            cell = compared(workload, batch, options, jax=WORKLOADS[workload].jax)
        else:
            loops = [loop for base, others in GEOMETRIES[workload] for loop in (base, *others)]
            cell = geometries(workload, batch, options, loops)
        cell |= {"part": part, "settings": settings, "parameters": WORKLOADS[workload].parameters()}
        append(chosen.json, cell)
        found[part, workload, batch] = cell
        times = ", ".join(f"{loop} {1e3 * min(times):.1f} ms" for loop, times in cell["wall"].items())
        print(f"{part} {workload} {batch}: {times}", flush=True)
    print(text := report(chosen, [found[key] for key in plan]))
    if chosen.write:
        write(text)


def report(chosen: argparse.Namespace, cells: list[Cell]) -> str:
    """The command and the tables of the cells."""
    flags = "".join(
        [
            f" --threads {chosen.threads} --blocks {chosen.blocks}",
            " --jax-python PATH" if chosen.jax_python is not None else "",
            " --geometries" if chosen.geometries else "",
        ]
    )
    jax = next((cell["facts"]["jax"] for cell in cells if "jax" in cell["facts"]), None)
    loads = [load for cell in cells for load in cell["load"]]
    found = [
        f"`python -m tests.benchmarks.bench_peers{flags}`: torch {version('torch')}, opacus {version('opacus')}, "
        + (f"{jax}, " if jax else "")
        + f"{platform.machine()}, load {min(loads):.1f} to {max(loads):.1f}. Milliseconds a step; `@` is the size of a "
        "micro-batch where it is the fastest. MB: growth of the resident memory during steps, in brackets all of it."
    ]
    summaries = {name: workload.summary for name, workload in WORKLOADS.items()}
    for part, make in (("peers", lambda own: comparison(own, summaries)), ("geometries", geometry_table)):
        own = [cell for cell in cells if cell["part"] == part]
        if own:
            found.append(make(own))
    return "\n\n".join(found)


if __name__ == "__main__":
    main()
