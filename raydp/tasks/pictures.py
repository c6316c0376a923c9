"""Pictures of generated images: a row for each model, rows stacked into a grid."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor

from raydp.errors import InvalidValue

_GAP = 1  # pixels between images
_SMALLEST = 32  # pixels; smaller images are enlarged by a whole factor


def save_row(path: Path, images: Tensor) -> None:
    """Write images (n, C, H, W), C = 1 or 3, pixels in [-1, 1], beside each other as a PNG."""
    pixels = ((images.clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()  # (n, H, W, C)
    factor = max(1, -(-_SMALLEST // pixels.shape[1]))
    pixels = pixels.repeat(factor, axis=1).repeat(factor, axis=2).repeat(3 // pixels.shape[3], axis=3)
    framed = np.pad(pixels, ((0, 0), (_GAP, _GAP), (_GAP, _GAP), (0, 0)), constant_values=255)
    Image.fromarray(np.concatenate(list(framed), axis=1)).save(path, format="PNG")


def save_grid(path: Path, rows: Sequence[Path]) -> None:
    """Stack pictures of :func:`save_row`, the first on top.

    Raises:
        InvalidValue: no rows, or of different widths.
    """
    opened = [np.asarray(Image.open(row).convert("RGB")) for row in rows]
    if len({picture.shape[1] for picture in opened}) != 1:
        raise InvalidValue("rows", [str(row) for row in rows], "must be pictures of one width", "Make them alike.")
    Image.fromarray(np.concatenate(opened, axis=0)).save(path, format="PNG")
