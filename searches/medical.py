"""Any diabetic retinopathy from retinal images, from scratch, at epsilon 8: the medical case of arXiv 2606.04375.

DP-SGD, TP-TopK and TP-Rand, each with its own best learning rate out of the same candidates, over paired seeds. AUROC
chooses; balanced accuracy, sensitivity, specificity and the minority's recall are at the fixed threshold of the larger
logit. ``searches/retina_any_dr.toml`` says which files are read and which grades count as diseased.

    raydp run searches/medical.py
    raydp run searches/medical.py --set data=MY_TABLE.toml
"""

from pathlib import Path

from ray import tune

import raydp

search = raydp.Search(
    name="medical",
    data=str(Path(__file__).with_name("retina_any_dr.toml")),
    budget=raydp.Budget(epsilon=8.0, delta=1e-4),
    space={
        "method": tune.grid_search(["dp_sgd", "tp_topk", "tp_rand"]),
        "learning_rate": tune.grid_search([0.25, 0.5, 1.0, 2.0]),
    },
    fixed={"epochs": 20, "batch_size": 128, "active_ratio": 0.4, "warmup_fraction": 0.3, "warmup_share": 0.3},
    metric="auroc",
    sampler="grid",
    trials=12,
    seeds=5,
    paired=True,
    reports=1,
    small={"seeds": 3},
    paper={"fixed.epochs": 40, "fixed.batch_size": 256, "model": "wrn_16_4", "seeds": 5},
)
