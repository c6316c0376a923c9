"""The budget split of TP-TopK, as the paper's grid and as a continuum, and the five variants under one budget.

``split_grid``: E1/E × epsilon1/epsilon in {0.2, 0.3, 0.4}², the grid of arXiv 2606.04375 (section 2.8 of its protocol).
``split_continuous``: the same two splits, the active ratio and the learning rate, without a grid.
``five_variants``: DP-SGD, TP-TopK, TP-Rand, ON-TopK and ON-Rand, each with its own best learning rate out of the same
candidates, over paired seeds: within a seed TP-TopK and TP-Rand share weights and warm-up.

    raydp run searches/tp_topk_split.py --scale small
    raydp run searches/tp_topk_split.py --only five_variants --set data=PATH
"""

from ray import tune

import raydp

BUDGET = raydp.Budget(epsilon=3.0, delta=1e-5)
SMALL = {"seeds": 2, "fixed.epochs": 6}
PAPER = {"seeds": 3, "fixed.epochs": 40, "fixed.batch_size": 1000}

searches = [
    raydp.Search(
        name="split_grid",
        method="tp_topk",
        data="mnist5k",
        budget=BUDGET,
        space={
            "warmup_fraction": tune.grid_search([0.2, 0.3, 0.4]),
            "warmup_share": tune.grid_search([0.2, 0.3, 0.4]),
        },
        fixed={"learning_rate": 2.0, "epochs": 10, "batch_size": 256, "active_ratio": 0.4},
        sampler="grid",
        trials=9,
        seeds=3,
        small=SMALL,
        paper=PAPER,
    ),
    raydp.Search(
        name="split_continuous",
        method="tp_topk",
        data="mnist5k",
        budget=BUDGET,
        space={
            "learning_rate": tune.loguniform(0.25, 8.0),
            "warmup_fraction": tune.uniform(0.05, 0.8),
            "warmup_share": tune.uniform(0.05, 0.8),
            "active_ratio": tune.uniform(0.1, 1.0),
        },
        fixed={"epochs": 10, "batch_size": 256},
        trials=24,
        seeds=1,
        small={"trials": 12, "fixed.epochs": 6},
        paper={**PAPER, "trials": 60},
    ),
    raydp.Search(
        name="five_variants",
        data="mnist5k",
        budget=BUDGET,
        space={
            "method": tune.grid_search(["dp_sgd", "tp_topk", "tp_rand", "on_topk", "on_rand"]),
            "learning_rate": tune.grid_search([0.5, 1.0, 2.0, 4.0]),
        },
        fixed={"epochs": 10, "batch_size": 256, "active_ratio": 0.4, "warmup_fraction": 0.3, "warmup_share": 0.3},
        sampler="grid",
        trials=20,
        seeds=3,
        paired=True,
        small={"seeds": 3, "fixed.epochs": 6},
        paper=PAPER,
    ),
]
