"""Rows and grids of generated images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from raydp.errors import InvalidValue
from raydp.tasks.pictures import save_grid, save_row


@pytest.mark.parametrize("channels", [1, 3])
def test_rows_hold_the_images_and_grids_hold_the_rows(tmp_path: Path, channels: int) -> None:
    images = torch.stack([torch.full((channels, 16, 16), value) for value in (-1.0, 0.0, 1.0)])
    save_row(tmp_path / "a.png", images)
    save_row(tmp_path / "b.png", -images)
    save_grid(tmp_path / "grid.png", [tmp_path / "a.png", tmp_path / "b.png"])
    grid = np.asarray(Image.open(tmp_path / "grid.png"))
    assert grid.shape == (2 * 34, 3 * 34, 3)  # enlarged twice, with a frame of one pixel
    middles = grid[17::34, 17::34, 0]
    assert middles.tolist() == [[0, 128, 255], [255, 128, 0]]
    assert (grid[:, 0] == 255).all()


def test_rows_of_other_widths_are_refused(tmp_path: Path) -> None:
    save_row(tmp_path / "a.png", torch.zeros(2, 1, 8, 8))
    save_row(tmp_path / "b.png", torch.zeros(3, 1, 8, 8))
    with pytest.raises(InvalidValue, match="one width"):
        save_grid(tmp_path / "grid.png", [tmp_path / "a.png", tmp_path / "b.png"])
    with pytest.raises(InvalidValue):
        save_grid(tmp_path / "grid.png", [])
