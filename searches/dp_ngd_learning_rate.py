"""The learning rate of DP-NGD and the floor under its eigenvalues, which decide together how long a step is.

Without ``lambda_safe`` the floor is (ηC / η_sC_s)², that of equally long steps as a DP-SGD with learning rate η_s
and clip
norm C_s; here it is searched, and ``step_ratio`` reports how long the steps are beside those of DP-SGD at η_s = 1. A
high
floor clamps all eigenvalues, and DP-NGD becomes DP-SGD. κ = λ_base/λ_safe lowers the floor in the middle of training.
Public data: ``digits28`` beside ``mnist5k``; give others with ``--set data=PATH --set public=PATH``.

    raydp run searches/dp_ngd_learning_rate.py --scale small
"""

from ray import tune

import raydp

search = raydp.Search(
    name="dp_ngd_learning_rate",
    method="dp_ngd",
    data="mnist5k",
    public="digits28",
    public_limit=500,
    budget=raydp.Budget(epsilon=2.0, delta=1e-5),
    space={
        "learning_rate": tune.loguniform(0.005, 0.3),
        "lambda_safe": tune.loguniform(0.01, 1.0),
        "kappa": tune.loguniform(0.1, 1.0),
    },
    fixed={"epochs": 10, "batch_size": 256, "reference_learning_rate": 1.0},
    trials=20,
    seeds=2,
    reports=2,
    small={"trials": 16, "seeds": 1, "fixed.epochs": 8},
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
