"""Search files: what they define is found, and what is wrong with them is said with their own line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from raydp.errors import InvalidValue, UnknownName
from raydp.search.definition import Search
from raydp.search.files import SearchFileError, load_searches

HEADER = """
from ray import tune
from raydp.privacy.budget import Budget
from raydp.search.definition import Search

def make(name):
    return Search(name=name, method="dp_sgd", data="digits", budget=Budget(epsilon=3.0, delta=1e-5),
                  space={"learning_rate": tune.loguniform(0.1, 10.0)}, fixed={"epochs": 2})

"""


def write(directory: Path, body: str, name: str = "searching.py") -> Path:
    path = directory / name
    path.write_text(HEADER + body)
    return path


def test_one_search_or_several_by_name(tmp_path):
    found = load_searches(write(tmp_path, "search = make('one')"))
    assert list(found) == ["one"] and isinstance(found["one"], Search)
    assert list(load_searches(write(tmp_path, "searches = [make('b'), make('a')]"))) == ["b", "a"]
    several = write(tmp_path, "searches = {'first': make('b'), 'second': make('a')}\nsearch = searches['first']")
    assert {name: search.name for name, search in load_searches(several).items()} == {"first": "b", "second": "a"}
    assert list(load_searches(several, only="second")) == ["second"]
    with pytest.raises(UnknownName, match="second"):
        load_searches(several, only="secnd")


def test_the_directory_is_importable_only_meanwhile_and_two_files_of_one_name_stay_apart(tmp_path):
    before = list(sys.path)
    for directory in (tmp_path / "a", tmp_path / "b"):
        directory.mkdir()
        (directory / f"beside_{directory.name}.py").write_text(f"name = 'in_{directory.name}'\n")
        body = f"import beside_{directory.name} as beside\nsearch = make(beside.name)"
        assert list(load_searches(write(directory, body))) == [f"in_{directory.name}"]
        sys.modules.pop(f"beside_{directory.name}")
    assert sys.path == before


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("x = 1\nsearch = make(1 / 0)", r"line 11: 'search = make\(1 / 0\)': ZeroDivisionError"),
        ("search = make('Capital')", "line 7: .*name = 'Capital'"),
        ("search = (", "line 11: .*never closed|line 10: .*never closed"),
        ("import no_such_module_at_all", "line 10: .*ModuleNotFoundError"),
        ("pass", "neither `search` nor `searches`"),
    ],
)
def test_errors_name_the_line_of_the_file(tmp_path, body, expected):
    path = write(tmp_path, body)
    before = set(sys.modules)
    with pytest.raises(SearchFileError, match=expected) as caught:
        load_searches(path)
    assert str(caught.value).startswith(f"{path}")
    assert "pass" in body or not {name for name in set(sys.modules) - before if name.startswith("raydp_search_file")}


@pytest.mark.parametrize("body", ["search = 3", "searches = []", "searches = [3]", "searches = [make('a'), make('a')]"])
def test_other_things_in_place_of_a_search_are_refused(tmp_path, body):
    with pytest.raises(InvalidValue, match="search"):
        load_searches(write(tmp_path, body))


def test_missing_and_unreadable_files(tmp_path):
    with pytest.raises(SearchFileError, match="no such file"):
        load_searches(tmp_path / "absent.py")
    with pytest.raises(SearchFileError, match="no such file"):
        load_searches(tmp_path)
    with pytest.raises(SearchFileError, match=r"ends in \.py"):
        load_searches(write(tmp_path, "", name="search.txt"))
