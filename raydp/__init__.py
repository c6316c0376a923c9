"""raydp: search hyperparameters and budget splits of differentially private training; every trial spends its budget.

>>> import raydp
>>> from ray import tune
>>> search = raydp.Search(
...     name="example",
...     method="tp_topk",
...     data="mnist5k",
...     budget=raydp.Budget(epsilon=3.0, delta=1e-5),
...     space={"learning_rate": tune.loguniform(0.1, 4.0), "warmup_share": tune.uniform(0.1, 0.6)},
...     trials=12,
... )
>>> result = search.run()  # doctest: +SKIP
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"


def _refuse_namesake() -> None:
    """The index has another project whose import package is also ``raydp`` (Spark on Ray); both cannot be installed."""
    try:
        version = importlib.metadata.version("raydp")
    except importlib.metadata.PackageNotFoundError:
        return
    raise ImportError(
        f"The distribution 'raydp' {version} (Spark on Ray) is installed. Its import name is that of this package, "
        "'raydp-search', and it has overwritten part of it. Run `pip uninstall raydp` and reinstall raydp-search, or "
        "use a virtual environment of its own."
    )


_refuse_namesake()

if TYPE_CHECKING:
    from raydp.privacy.budget import Budget as Budget
    from raydp.privacy.plan import Plan as Plan
    from raydp.search.definition import Resources as Resources
    from raydp.search.definition import Search as Search
    from raydp.search.results import Result as Result
    from raydp.search.runner import resume as resume

_HOMES = {
    "Budget": "raydp.privacy.budget",
    "Plan": "raydp.privacy.plan",
    "Resources": "raydp.search.definition",
    "Result": "raydp.search.results",
    "Search": "raydp.search.definition",
    "resume": "raydp.search.runner",
}


def __getattr__(name: str) -> Any:
    """Load the public names on first use, so that ``import raydp.privacy`` needs neither torch nor Ray."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'raydp' has no attribute {name!r}")


__all__ = ["Budget", "Plan", "Resources", "Result", "Search", "resume"]
