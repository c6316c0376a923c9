"""The tables of the comparison, and what they say of the targets."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from tests.benchmarks.peers.cells import GEOMETRIES, PEERS, Cell

NAMES = {"hooks": "Opacus", "functorch": "Opacus functorch", "ghost": "Opacus ghost", "jax": "jax-privacy"}
#: raydp should take at most so many times what plain SGD takes …
OVER_PLAIN = {"mlp": 1.5, "lora": 1.5, "transformer": 1.6, "cnn": 2.0, "resnet20": 2.0}
OVER_FASTEST, OVER_LEANEST = 1.0, 1.2  # … what the fastest peer takes, and the memory of the leanest peer


def seconds(cell: Cell, loop: str, clock: str = "wall") -> float:
    return statistics.median(cell[clock][loop])


def ratio(cell: Cell, loop: str, to: str, clock: str = "wall") -> float:
    """Median over the blocks of the ratios within a block."""
    return statistics.median(a / b for a, b in zip(cell[clock][loop], cell[clock][to], strict=True))


def growth(cell: Cell, loop: str) -> float:
    """Megabytes that its steps add to what the process had before them."""
    found = cell["memory"][loop]
    return max(0.1, found["peak"] - found["before"])


def fastest(cell: Cell, peers: Sequence[str] = PEERS) -> str | None:
    """The loop of these peers with the least median."""
    loops = [loop for loop in cell["wall"] if loop.split()[0] in peers]
    return min(loops, key=lambda loop: seconds(cell, loop), default=None)


def leanest(cell: Cell) -> str | None:
    loops = [loop for loop in cell["memory"] if loop.split()[0] in PEERS]
    return min(loops, key=lambda loop: growth(cell, loop), default=None)


def comparison(cells: Sequence[Cell], summaries: Mapping[str, str]) -> str:
    """A Markdown table, the loops that failed, and a line for each target."""
    peers = " | ".join(NAMES[peer] for peer in PEERS)
    lines = [
        f"| model | batch | SGD | raydp | {peers} | raydp / SGD (CPU) | raydp / fastest peer (CPU) | MB, raydp | "
        "MB, leanest peer | ratio |",
        "|" + "---|" * 13,
    ]
    for cell in cells:
        numbers = [f"{1e3 * seconds(cell, loop):.1f}" for loop in ("plain", "raydp")]
        numbers += [_of_peer(cell, peer) for peer in PEERS]
        best, lean = fastest(cell), leanest(cell)
        for to in ("plain", best):
            numbers.append(
                "" if to is None else f"{ratio(cell, 'raydp', to):.2f} ({ratio(cell, 'raydp', to, 'cpu'):.2f})"
            )
        numbers.append(f"{growth(cell, 'raydp'):.0f} ({cell['memory']['raydp']['peak']:.0f})")
        numbers += (
            ["", ""]
            if lean is None
            else [
                f"{growth(cell, lean):.0f} ({cell['memory'][lean]['peak']:.0f}), {lean}",
                f"{growth(cell, 'raydp') / growth(cell, lean):.2f}",
            ]
        )
        lines.append("| " + " | ".join([cell["workload"], str(cell["batch"]), *numbers]) + " |")
    lines += ["", *_models(cells, summaries), *_failures(cells), "", *_targets(cells)]
    return "\n".join(lines)


def _of_peer(cell: Cell, peer: str) -> str:
    """The fastest of its loops, with the size of the micro-batch unless it took the whole batch."""
    best = fastest(cell, (peer,))
    if best is not None:
        size = best.partition(" ")[2]
        return f"{1e3 * seconds(cell, best):.1f}" + (f" @{size}" if size else "")
    tried = [(time, loop) for loop, time in cell["tried"].items() if loop.split()[0] == peer]
    if tried:
        time, loop = min(tried)
        return f"~{1e3 * time:.0f}" + (f" @{loop.split()[1]}" if " " in loop else "")
    return "n/a" if any(loop.split()[0] == peer for loop in cell["failed"]) else "–"


def _models(cells: Sequence[Cell], summaries: Mapping[str, str]) -> list[str]:
    found = {}
    for cell in cells:
        engine = cell["facts"].get("engine", "")
        found[cell["workload"]] = (
            f"- `{cell['workload']}`: {summaries[cell['workload']]}; {cell['parameters']:,} trained parameters"
            + (", raydp falls back to vmap" if engine == "vmap" else "")
        )
    return list(found.values())


def _failures(cells: Sequence[Cell]) -> list[str]:
    """Each reason once, with the loops that it stopped."""
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for cell in cells:
        for loop, reason in cell["failed"].items():
            peer, _, size = loop.partition(" ")
            found = reasons.setdefault((cell["workload"], peer, reason), [])
            found.append(f"{cell['batch']}" + (f" @{size}" if size else ""))
    return [
        f"- n/a: {NAMES.get(peer, peer)} on `{workload}` at {', '.join(where)}: {reason}"
        for (workload, peer, reason), where in reasons.items()
    ]


def _targets(cells: Sequence[Cell]) -> list[str]:
    """Of each target, in how many cells it is met and where it is not."""
    fast, lean, plain = {}, {}, {}
    for cell in cells:
        name = f"{cell['workload']} {cell['batch']}"
        best, least = fastest(cell), leanest(cell)
        if best is not None:
            fast[name] = ratio(cell, "raydp", best) / OVER_FASTEST
        if least is not None:
            lean[name] = growth(cell, "raydp") / growth(cell, least) / OVER_LEANEST
        if cell["workload"] in OVER_PLAIN:
            plain[name] = ratio(cell, "raydp", "plain") / OVER_PLAIN[cell["workload"]]
    targets = " ".join(f"{name} {limit:g}" for name, limit in OVER_PLAIN.items())
    return [
        _target("At least as fast as the fastest peer", fast),
        _target(f"Memory at most {OVER_LEANEST:g} times the leanest peer's", lean),
        _target(f"Time over SGD at most: {targets}", plain),
    ]


def _target(text: str, shares: Mapping[str, float]) -> str:
    missed = [f"{name} ({100 * share - 100:+.0f} %)" for name, share in shares.items() if share > 1]
    return f"- {text}: {len(shares) - len(missed)} of {len(shares)}" + (f"; not {', '.join(missed)}" if missed else "")


def geometry_table(cells: Sequence[Cell]) -> str:
    """Each loop against the step of ``dp_sgd`` that was interleaved with it."""
    lines = [
        "| model | batch | step | ms | dp_sgd, ms | ratio | ratio, CPU | MB | MB, dp_sgd |",
        "|" + "---|" * 9,
    ]
    for cell in cells:
        for base, loops in GEOMETRIES[cell["workload"]]:
            for loop in loops:
                if loop not in cell["wall"] or base not in cell["wall"]:
                    lines.append(f"| {cell['workload']} | {cell['batch']} | {loop} | n/a |" + " |" * 5)
                    continue
                numbers = [f"{1e3 * seconds(cell, name):.1f}" for name in (loop, base)]
                numbers += [f"{ratio(cell, loop, base, clock):.2f}" for clock in ("wall", "cpu")]
                numbers += [f"{growth(cell, name):.0f}" for name in (loop, base)]
                lines.append("| " + " | ".join([cell["workload"], str(cell["batch"]), loop, *numbers]) + " |")
    return "\n".join([*lines, *_failures(cells)])
