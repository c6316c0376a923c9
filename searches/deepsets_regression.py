"""DP-DeepSets on its linear-regression case study (arXiv 2606.26772, section 4), beside what it is compared with there.

Many private sets of 512 examples, of different people, each with a task of its own: every seed of a trial is another
one. The error is that of the released weights, ‖ω - w‖²; the answer 0 has 0.543.

* deepsets_regression: a hypernetwork learned from public tasks. Embedding size, clip norm and learning rate.
* deepsets_oracle: the explicit network of the paper's proof, which learns nothing. Embedding size and clip norm.
* deepsets_gd: full-batch DP gradient descent, as accounted for as the others. Steps, clip norm and learning rate.

    raydp run searches/deepsets_regression.py --scale small
    raydp run searches/deepsets_regression.py --scale small --only deepsets_gd --epsilon 1

The study of widths, dimensions and priors is ``python -m tests.benchmarks.regression_study``.
"""

from ray import tune

import raydp

COMMON = {
    "data": "regression",
    "data_limit": 512,
    "budget": raydp.Budget(epsilon=4.0, delta=1e-5, adjacency="replace_one"),
    "metric": "parameter_error",
    "reports": 1,
}

learned = raydp.Search(
    name="deepsets_regression",
    method="dp_deepsets",
    public="regression",
    public_limit=1000,
    space={
        "embedding": tune.choice([4, 8, 16, 32]),
        "clip_norm": tune.loguniform(0.3, 10.0),
        "learning_rate": tune.loguniform(3e-4, 1e-2),
    },
    fixed={
        "encoder_width": 256,
        "decoder": "mlp",
        "decoder_depth": 1,
        "decoder_hidden": 128,
        "epochs": 12,
        "sets_per_step": 8,
        "loss_points": 256,
    },
    trials=16,
    seeds=20,
    small={"trials": 6, "seeds": 8, "public_limit": 600, "fixed.epochs": 8},
    paper={"trials": 40, "seeds": 40, "public_limit": 10000, "fixed.epochs": 20},
    **COMMON,
)

oracle = raydp.Search(
    name="deepsets_oracle",
    method="dp_deepsets",
    space={"embedding": tune.choice([2, 4, 8, 16, 32]), "clip_norm": tune.loguniform(1.0, 30.0)},
    fixed={"encoder": "oracle", "decoder": "pad"},
    trials=24,
    seeds=20,
    small={"trials": 8, "seeds": 8},
    paper={"trials": 60, "seeds": 40},
    **COMMON,
)

descent = raydp.Search(
    name="deepsets_gd",
    method="dp_sgd",
    space={
        "epochs": tune.choice([1, 5, 20]),
        "clip_norm": tune.loguniform(4.0, 64.0),
        "learning_rate": tune.loguniform(0.025, 0.5),
    },
    fixed={"batch_size": 512},
    trials=24,
    seeds=20,
    small={"trials": 8, "seeds": 8},
    paper={"trials": 60, "seeds": 40},
    **COMMON,
)

searches = [learned, oracle, descent]
