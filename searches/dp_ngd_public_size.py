"""How many public examples does DP-NGD's curvature need? One search for each size, the learning rate tuned in each.

raydp run searches/dp_ngd_public_size.py --scale small
"""

from ray import tune

import raydp

searches = [
    raydp.Search(
        name=f"dp_ngd_public_{size}",
        method="dp_ngd",
        data="mnist5k",
        public="digits28",
        public_limit=size,
        budget=raydp.Budget(epsilon=2.0, delta=1e-5),
        space={"learning_rate": tune.grid_search([0.015, 0.03, 0.06])},
        fixed={"epochs": 10, "batch_size": 256, "lambda_safe": 0.06, "kappa": 1.0},
        sampler="grid",
        trials=3,
        seeds=3,
        reports=1,
        small={"seeds": 2, "fixed.epochs": 8},
        paper={
            "model": "wrn_16_4",
            "seeds": 5,
            "fixed.epochs": 30,
            "fixed.batch_size": 4096,
            "fixed.augmentation": "crop_flip",
            "fixed.augmentation_multiplicity": 16,
            "fixed.ema_decay": 0.9999,
        },
    )
    for size in (50, 200, 500, 1400)
]
