"""The hyperparameters of DP-DeepSets, searched on public data alone: the search costs no privacy.

Every trial trains a hypernetwork on public tasks, and releases from *public validation tasks*, with the noise that a
release from a private set will have. There are no people behind any set here, so choosing the best trial costs nothing,
whatever was tried: ``selection="public"`` says so, as does every result. A gradient method whose learning rate is tuned
on private data pays for the whole search. What was found here is then used once, on the private set.

    raydp run searches/deepsets_hypernetwork.py --scale small
"""

from ray import tune

import raydp

search = raydp.Search(
    name="deepsets_hypernetwork",
    method="dp_deepsets",
    data="regression",
    data_limit=512,
    public="regression",
    public_limit=1000,
    budget=raydp.Budget(epsilon=2.0, delta=1e-5, adjacency="replace_one"),
    selection="public:fresh synthetic tasks of the family",
    metric="parameter_error",
    space={
        "embedding": tune.choice([4, 8, 16, 32]),
        "clip_norm": tune.loguniform(0.3, 10.0),
        "learning_rate": tune.loguniform(3e-4, 1e-2),
        "decoder_depth": tune.choice([0, 1, 2]),
    },
    fixed={
        "encoder_width": 256,
        "decoder": "mlp",
        "decoder_hidden": 128,
        "epochs": 12,
        "sets_per_step": 8,
        "loss_points": 256,
    },
    trials=20,
    seeds=20,
    reports=1,
    small={"trials": 6, "seeds": 8, "public_limit": 600, "fixed.epochs": 8},
    paper={"trials": 60, "seeds": 40, "public_limit": 10000, "fixed.epochs": 20},
)
