"""Serve one loop of :mod:`tests.benchmarks.peers.loops`, or one of ``bench_whitening``; started by ``bench_peers``."""

from __future__ import annotations

import sys
import warnings

from tests.benchmarks.peers.serve import bind, serve


def main(workload: str, batch: str, loop_name: str, threads: str) -> None:
    bind(int(threads))
    import torch

    from tests.benchmarks.peers.loops import engine_of, loop

    torch.set_num_threads(int(threads))
    warnings.simplefilter("ignore")  # Opacus' hooks warn about inputs without gradient
    if loop_name.startswith("dp_"):  # its whitened step, and the step that it is held against there
        from tests.benchmarks.bench_whitening import loops_of

        shares = [float(loop_name.split()[1])] if loop_name != "dp_sgd" else []
        advance = loops_of(workload, batch=int(batch), shares=shares)[loop_name]
    else:
        _, advance = loop(workload, int(batch), loop_name)
    serve(advance, **({"engine": engine_of(workload)} if loop_name == "raydp" else {}))


if __name__ == "__main__":
    main(*sys.argv[1:])
