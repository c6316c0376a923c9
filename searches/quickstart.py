"""Quickstart: how much of the budget should choose the coordinates, and how much should train them?

TP-TopK on 4,000 real MNIST digits that ship with a dependency. Twelve trials propose a learning rate and the two splits
(E1/E: the warm-up's share of the steps; epsilon1/epsilon: its share of the budget). Each spends exactly (3, 1e-5).

    raydp run searches/quickstart.py
"""

from ray import tune

import raydp

search = raydp.Search(
    name="quickstart",
    method="tp_topk",
    data="mnist5k",
    budget=raydp.Budget(epsilon=3.0, delta=1e-5),
    space={
        "learning_rate": tune.loguniform(0.25, 4.0),
        "warmup_fraction": tune.uniform(0.1, 0.6),
        "warmup_share": tune.uniform(0.1, 0.6),
    },
    fixed={"epochs": 8, "batch_size": 256, "active_ratio": 0.4},
    trials=12,
)
