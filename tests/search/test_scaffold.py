"""What `raydp new` writes is a search that runs as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from raydp.errors import InvalidValue, UnknownName
from raydp.methods import METHODS
from raydp.search.files import load_searches
from raydp.search.runner import check
from raydp.search.scaffold import write_search


@pytest.mark.parametrize("name", METHODS)
def test_every_method_gets_a_file_that_loads_and_passes_all_checks(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write_search(name)
    assert path == Path(f"{name}_search.py")
    (search,) = load_searches(path).values()
    assert search.method == name and "learning_rate" in search.point_space.varying
    check(search)
    lines = path.read_text(encoding="utf-8").splitlines()
    assert max(map(len, lines)) <= 120
    assert any(line.startswith("# * clip_norm = ") for line in lines)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    target = tmp_path / "mine.py"
    target.write_text("precious")
    with pytest.raises(InvalidValue, match="exists already"):
        write_search("dp_sgd", target)
    assert target.read_text() == "precious"


def test_an_unknown_method_is_refused_with_near_names(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="Did you mean tp_topk"):
        write_search("tp_topp", tmp_path / "x.py")
    assert not list(tmp_path.iterdir())
