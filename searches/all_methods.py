"""Every method at one budget, each with its learning rate tuned over the same number of trials on its own scale.

The methods that use public data get the same 500 public examples; the others get none, and that is part of the answer.

    raydp run searches/all_methods.py --scale small
    raydp run searches/all_methods.py --scale small --only all_dp_ngd --set data=PATH --set public=PATH
"""

from ray import tune

import raydp

METHODS = {
    # method: (learning-rate range, what is fixed)
    "dp_sgd": ((0.25, 8.0), {}),
    "tp_topk": ((0.25, 8.0), {}),
    "tp_rand": ((0.25, 8.0), {}),
    "on_topk": ((0.25, 8.0), {}),
    "on_rand": ((0.25, 8.0), {}),
    "dp_ngd": ((0.005, 0.3), {"kappa": 1.0, "lambda_safe": 0.06}),
    "dp_sgd_pt": ((0.25, 8.0), {}),
    "ada_dps": ((0.05, 2.0), {}),
    "gep": ((0.05, 4.0), {"embedding_clip_norm": 1.0, "residual_clip_norm": 0.5}),
}
PUBLIC = ("dp_ngd", "dp_sgd_pt", "ada_dps", "gep")

searches = [
    raydp.Search(
        name=f"all_{method}",
        method=method,
        data="mnist5k",
        public="digits28" if method in PUBLIC else None,
        public_limit=500 if method in PUBLIC else None,
        budget=raydp.Budget(epsilon=2.0, delta=1e-5),
        space={"learning_rate": tune.loguniform(*rates)},
        fixed={"epochs": 10, "batch_size": 256, **fixed},
        trials=12,
        seeds=3,
        reports=1,
        small={"trials": 8, "seeds": 2, "fixed.epochs": 8},
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
    for method, (rates, fixed) in METHODS.items()
]
