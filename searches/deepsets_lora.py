"""Low-rank updates of a diffusion model for small private sets: DP-DeepSets against gradients, at equal budgets.

The private sets are members of a family: neighbouring images of one encoder, from the private half of a data set. Each
run of a trial takes another member, whose people are charged for that run alone. The public half gives DP-DeepSets its
public sets, and the gradient methods their pre-training (``dp_sgd_pt``) or mirror map (``pda_dpmd``).

The data and the base model, trained on the public half, are made first (``small``: 16×16 Fashion-MNIST, sets of 64):

    python searches/deepsets_lora.py ../shared/data/fashion_mnist/train.parquet runs/lora_family
    raydp run searches/deepsets_lora.py --scale small
    raydp report runs/lora_*_e*-1 --out lora.html    # Fréchet and KID against epsilon, over all budgets

``--scale paper`` wants a family of 64×64 images in sets of 128 in ``runs/lora_family``, and as ``base.pt`` the
published network (``raydp.models.improved_diffusion`` reads it, ``raydp.models.denoiser.save_denoiser`` keeps it
with rank 1).

Distances are measured against the private sets themselves, in the vectors of EfficientNet-Lite0: neither a FID nor a
private release. Learning rates and steps are the best of a grid on that measure, for the gradient methods only; that
flatters them, and no epsilon here counts it.
"""

import sys
from pathlib import Path

from ray import tune

import raydp

FAMILY = "runs/lora_family"
EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
SHARED = {
    "data": FAMILY,
    "model": f"{FAMILY}/base.pt",
    "public": FAMILY,
    "task": "denoising",
    "metric": "frechet",
    "sampler": "grid",
    "reports": 1,
}


def _gradients(label: str, budget: raydp.Budget) -> raydp.Search:
    """The three gradient methods, each with the paper's learning rates and steps."""
    return raydp.Search(
        **SHARED,
        name=f"lora_gradients_e{label}",
        budget=budget,
        space={
            "method": tune.grid_search(["dp_sgd", "dp_sgd_pt", "pda_dpmd"]),
            "learning_rate": tune.grid_search([1e2, 1e3]),
            "steps": tune.grid_search([100, 400]),
        },
        fixed={
            "clip_norm": 1e-2,
            "batch_size": 32,
            "schedule": "warmup_cosine",
            "pretrain_learning_rate": 1e-2,
            "pretrain_batch_size": 32,
            "pretrain_epochs": 100,
            "alpha": 0.5,
            "public_batch_size": 32,
        },
        trials=12,
        seeds=100,
        # A smaller model wants smaller steps: at the paper's rates the noise alone ruins its images.
        small={
            "seeds": 2,
            "trials": 9,
            "space": {
                "method": tune.grid_search(["dp_sgd", "dp_sgd_pt", "pda_dpmd"]),
                "learning_rate": tune.grid_search([1.0, 10.0, 100.0]),
            },
            "fixed.batch_size": 16,
            "fixed.steps": 50,
            "fixed.pretrain_epochs": 1,
        },
        paper={"task": "denoising_1024"},
    )


def _hypernetwork(label: str, budget: raydp.Budget) -> raydp.Search:
    """DP-DeepSets; one hypernetwork a budget, which all members share."""
    return raydp.Search(
        **SHARED,
        name=f"lora_deepsets_e{label}",
        method="dp_deepsets",
        budget=budget,
        space={"learning_rate": tune.grid_search([1e-3])},
        fixed={"image_encoder": "efficientnet_lite0", "epochs": 200, "sets_per_step": 4, "loss_points": 128},
        trials=1,
        seeds=100,
        small={
            "seeds": 2,
            "fixed.epochs": 6,
            "fixed.sets_per_step": 8,
            "fixed.loss_points": 8,
            "fixed.embedding": 32,
            # 1,344 numbers: a small multilayer perceptron learns them in a fraction of the transformer's steps.
            "fixed.decoder": "mlp",
            "fixed.decoder_depth": 1,
            "fixed.decoder_hidden": 256,
        },
        paper={"task": "denoising_1024"},
    )


searches = []
for _epsilon in EPSILONS:
    _label, _budget = f"{_epsilon:g}".replace(".", "_"), raydp.Budget(epsilon=_epsilon, delta=1e-5)
    searches += [_gradients(_label, _budget), _hypernetwork(_label, _budget)]


def make_family(images_file: str, directory: str, *, limit: int = 8000, steps: int = 1500) -> None:
    """The ``small`` family: 16×16 images, private sets of 64, and a base model of the public half."""
    import torch
    from torch.nn import functional as F

    from raydp.data.neighbours import split_halves, write_family
    from raydp.data.parquet import read_images
    from raydp.models.denoiser import save_denoiser
    from raydp.models.encoders import load_encoder
    from raydp.models.unet import UNetShape
    from raydp.training.denoiser import train_denoiser

    raw, labels, _ = read_images(images_file)
    small = F.interpolate(torch.from_numpy(raw).float(), (16, 16), mode="bilinear", antialias=True)
    images = small.round().clamp(0, 255).to(torch.uint8)
    encoder = load_encoder("efficientnet_lite0")
    labels = torch.from_numpy(labels)
    write_family(directory, images[:limit], labels[:limit], encoder, set_size=64, members=4, public_sets=2000)
    shape = UNetShape(
        image_size=16,
        image_channels=images.shape[1],
        channels=16,
        residual_blocks=1,
        multipliers=(1, 2, 2),
        attention_sizes=(8, 4),
        heads=2,
        groups=8,
    )
    base = train_denoiser(
        images[split_halves(images)[0]],
        shape,
        steps=steps,
        batch_size=64,
        learning_rate=2e-3,
        ema_decay=0.99,
        progress=lambda step, loss: print(f"step {step}: loss {loss:.4f}", flush=True),
    )
    save_denoiser(Path(directory) / "base.pt", base, lora_rank=1)


if __name__ == "__main__":
    make_family(*sys.argv[1:3])
