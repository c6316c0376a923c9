"""Data sets: public and private types, sources, sampling and augmentation."""

from raydp.data.augmentation import Augmentation, AugmentationDraw, apply, augment, draw
from raydp.data.dataset import Dataset, Normalization
from raydp.data.own import TorchData
from raydp.data.part import Part
from raydp.data.public import check_public, load_public
from raydp.data.sources import catalogue, is_family, is_named, load, task_of
from raydp.data.types import Batch, PrivateAccess, PrivateData, PublicData, part_sizes

__all__ = [
    "Augmentation",
    "AugmentationDraw",
    "Batch",
    "Dataset",
    "Normalization",
    "Part",
    "PrivateAccess",
    "PrivateData",
    "PublicData",
    "TorchData",
    "apply",
    "augment",
    "catalogue",
    "check_public",
    "draw",
    "is_family",
    "is_named",
    "load",
    "load_public",
    "part_sizes",
    "task_of",
]
