"""Writes a search file for a method: commented, and runnable as it is."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from pathlib import Path
from typing import Any

from raydp import _validate
from raydp.errors import InvalidValue, RaydpError
from raydp.methods import METHODS, Method

#: data, its limit, public, public_limit, metric; digits28 is the bundled companion of mnist5k.
_IMAGES = ("mnist5k", None, "digits28", 500, "accuracy")
_SETS = ("regression", 512, "regression", 600, "parameter_error")  # many small private sets
#: A range for the learning rate of each method on mnist5k; others get their default, ten times less and more.
_RATES = {
    "dp_ngd": (0.005, 0.3),
    "ada_dps": (0.05, 2.0),
    "dp_deepsets": (3e-4, 1e-2),
    "gep": (0.05, 4.0),
}
_DENSE = (0.25, 8.0)
#: Worth searching beside the learning rate, where a method has them.
_SPACES = {
    "warmup_fraction": ("tune.uniform(0.1, 0.6)", "E1/E, the warm-up's share of the steps"),
    "warmup_share": ("tune.uniform(0.1, 0.6)", "ε1/ε, the warm-up's share of the budget"),
    "active_ratio": ("tune.uniform(0.1, 0.9)", "ρ, the share of the coordinates that is trained"),
}
#: What makes the defaults sensible on mnist5k.
_FIXED: dict[str, dict[str, Any]] = {
    "dp_ngd": {"kappa": 1.0, "lambda_safe": 0.06},
    "gep": {"embedding_clip_norm": 1.0, "residual_clip_norm": 0.5},
    "dp_deepsets": {"embedding": 8, "encoder_width": 256, "decoder": "mlp", "decoder_depth": 1, "decoder_hidden": 128},
}


def write_search(name: str, out: Path | None = None) -> Path:
    """Write a search file for the method of that name.

    Args:
        name: one of :data:`raydp.methods.METHODS`.
        out: the file; None takes ``<name>_search.py`` in the working directory.

    Returns:
        Where it was written.

    Raises:
        UnknownName: no such method.
        InvalidValue: the file exists already; nothing is overwritten.
        RaydpError: it cannot be written.
    """
    method = METHODS[_validate.one_of("METHOD", name, METHODS)]
    target = out or Path(f"{name}_search.py")
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(search_text(method, target.name))
    except FileExistsError as error:
        raise InvalidValue("--out", str(target), "exists already", "Give another --out, or remove the file.") from error
    except OSError as error:
        raise RaydpError(f"{target} cannot be written ({error.strerror}). Give another --out.") from error
    return target


def search_text(method: Method, file: str) -> str:
    """The Python source of a search of that method on bundled data, to be kept under the name ``file``."""
    names = [item.name for item in dataclasses.fields(method.hyperparameters)]
    low, high = _RATES.get(method.name, _DENSE)
    space = [
        (f"tune.loguniform({low}, {high})", "learning_rate", "the most important one; its scale is the method's own")
    ]
    space += [(domain, name, help) for name, (domain, help) in _SPACES.items() if name in names]
    fixed: dict[str, Any] = {name: value for name, value in (("epochs", 8), ("batch_size", 256)) if name in names}
    fixed |= _FIXED.get(method.name, {})
    data, limit, public, public_limit, metric = _IMAGES if "batch_size" in names else _SETS
    uses_public = method.uses_public(method.parse(fixed))
    lines = [
        f'"""A search of {method.name} under a privacy budget.',
        "",
        *textwrap.wrap(f"The method: {method.summary}.", 117),
        "",
        f"    raydp plan {file}  # noise, steps, epsilon and time; nothing is trained",
        f"    raydp run {file}  # a live table; results in runs/",
        '"""',
        "",
        "from ray import tune",
        "",
        "import raydp",
        "",
        "search = raydp.Search(",
        f'    name="{method.name}_search",  # also the name of the MLflow experiment',
        f'    method="{method.name}",',
        "    # A name that `raydp datasets` lists; or your own: a directory with train.parquet and test.parquet,",
        '    # a described table ("visits.toml"; `raydp describe` drafts one), or a function that returns a torch',
        '    # data set ("mine.py:visits").',
        f'    data="{data}",',
    ]
    if limit is not None:
        lines.append(f"    data_limit={limit},  # private examples")
    if uses_public:
        lines += [
            "    # Public examples, which cost no privacy. They must share no example with the private ones.",
            f'    public="{public}",',
            f"    public_limit={public_limit},",
        ]
    lines += [
        "    # What every trial spends, exactly. delta must be well below 1/N.",
        "    budget=raydp.Budget(epsilon=3.0, delta=1e-5),",
        "    # What is searched: tune.loguniform, tune.uniform, tune.choice, tune.randint, tune.grid_search, …",
        "    space={",
        *(f'        "{name}": {domain},  # {help}' for domain, name, help in space),
        "    },",
        "    # What is held constant. Everything that is not named here or above has the default listed below.",
        "    fixed={",
        *(f'        "{name}": {json.dumps(value)},' for name, value in fixed.items()),
        "    },",
        f'    metric="{metric}",  # measured on the hold-out set',
        "    trials=12,",
        "    seeds=1,  # runs of each trial; every one is charged. Two or more tell luck from skill.",
        '    sampler="tpe",  # tpe, random, gp or grid',
        '    small={"trials": 4},  # what --scale small changes',
        ")",
        "",
        f"# Every hyperparameter of {method.name}, with its default:",
    ]
    taken = {name for _, name, _ in space} | set(fixed)
    for item in dataclasses.fields(method.hyperparameters):
        if item.name in taken:
            continue
        entry = f"{item.name} = {item.default!r}: {item.metadata.get('help', '')}"
        lines += textwrap.wrap(entry, 117, initial_indent="# * ", subsequent_indent="#   ")
    return "\n".join(lines) + "\n"
