"""The learning rate of any method, and nothing else: the fair way to tune a baseline.

raydp run searches/learning_rate.py --set method=tp_rand
raydp run searches/learning_rate.py --scale small --set data=PATH --epsilon 8
"""

from ray import tune

import raydp

search = raydp.Search(
    name="learning_rate",
    method="dp_sgd",
    data="mnist5k",
    budget=raydp.Budget(epsilon=3.0, delta=1e-5),
    space={"learning_rate": tune.loguniform(0.1, 20.0)},
    fixed={"epochs": 10, "batch_size": 256},
    trials=12,
    seeds=1,
    small={"trials": 8, "fixed.epochs": 5},
    paper={"trials": 20, "seeds": 3, "fixed.epochs": 40, "fixed.batch_size": 1000},
)
