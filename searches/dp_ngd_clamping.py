"""The clamping schedule of DP-NGD: the kind of floor, its plateau, its times, and how often curvature is renewed.

The space is conditional, so it is a function: a fixed floor has no plateau, and no floor at all (which the paper
reports to diverge) has no schedule.

    raydp run searches/dp_ngd_clamping.py --scale small
"""

import raydp


def space(trial):
    clamping = trial.suggest_categorical("clamping", ["dynamic", "fixed", "none"])
    trial.suggest_float("learning_rate", 0.01, 0.1, log=True)
    trial.suggest_categorical("curvature_interval", [1, 8, 32])
    if clamping != "none":
        trial.suggest_float("lambda_safe", 0.02, 0.5, log=True)
    if clamping == "dynamic":
        trial.suggest_float("kappa", 0.1, 1.0, log=True)
        trial.suggest_float("decay_fraction", 0.05, 0.25)
        trial.suggest_float("exponent", 2.0, 15.0)


search = raydp.Search(
    name="dp_ngd_clamping",
    method="dp_ngd",
    data="mnist5k",
    public="digits28",
    public_limit=500,
    budget=raydp.Budget(epsilon=2.0, delta=1e-5),
    space=space,
    fixed={"epochs": 10, "batch_size": 256, "reference_learning_rate": 1.0},
    trials=40,
    seeds=2,
    reports=2,
    small={"trials": 20, "seeds": 1, "fixed.epochs": 8},
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
