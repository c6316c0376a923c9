"""Models whose per-example gradients are well defined: no layer mixes examples."""

from raydp.models.registry import MODELS, build_model, default_model, model_digest, model_source, public_probe
from raydp.models.validation import validate_model

__all__ = ["MODELS", "build_model", "default_model", "model_digest", "model_source", "public_probe", "validate_model"]
