"""DP-NGD's ablation arms: curvature on both sides of the noise, on one side only, or estimated from the private data.

``whitened`` is DP-NGD; ``pre`` multiplies the noisy gradient by the inverse curvature; ``post`` multiplies each
gradient before clipping. ``private_20`` and ``private_50`` spend that share of the same budget on a curvature of the
private data; ``noise`` draws it from structured noise. Each arm's learning rate and floor are tuned over the same
number
of trials, on its own scale.

    raydp run searches/dp_ngd_ablations.py --scale small
"""

from ray import tune

import raydp

BASE = {"epochs": 10, "batch_size": 256, "kappa": 1.0, "reference_learning_rate": 1.0}
ARMS = {
    # name: (learning-rate range, what is fixed)
    "whitened": ((0.005, 0.3), {}),
    "pre": ((0.02, 2.0), {"arm": "pre", "clip_norm": 1.0}),
    "post": ((0.01, 0.5), {"arm": "post"}),
    "private_20": ((0.005, 0.3), {"curvature_source": "private", "curvature_share": 0.2}),
    "private_50": ((0.005, 0.3), {"curvature_source": "private", "curvature_share": 0.5}),
    "noise": ((0.005, 0.3), {"curvature_source": "noise", "fisher_labels": "random"}),
}

searches = [
    raydp.Search(
        name=f"dp_ngd_{name}",
        method="dp_ngd",
        data="mnist5k",
        public=None if "curvature_source" in fixed else "digits28",
        public_limit=None if "curvature_source" in fixed else 500,
        budget=raydp.Budget(epsilon=2.0, delta=1e-5),
        space={"learning_rate": tune.loguniform(*rates), "lambda_safe": tune.loguniform(0.01, 1.0)},
        fixed={**BASE, **fixed},
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
    for name, (rates, fixed) in ARMS.items()
]
