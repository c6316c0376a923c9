"""The fast mutants die in the ordinary run; all of them do in ``python -m tests.mutants.run``."""

from __future__ import annotations

import pytest

from tests.mutants.catalogue import MUTANTS, Mutant
from tests.mutants.run import ROOT, mutated, table


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_mutant_applies_to_the_code_as_it_is_and_names_tests_that_exist(mutant: Mutant) -> None:
    source = (ROOT / "raydp" / mutant.file).read_text(encoding="utf-8")
    compile(mutated(mutant, source), mutant.file, "exec")
    assert mutated(mutant, source) != source
    assert mutant.tests and all((ROOT / "tests" / test.split("::")[0]).is_file() for test in mutant.tests)


def test_there_are_twenty_at_least_of_different_names() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 20


def test_a_text_that_is_not_there_once_is_refused() -> None:
    mutant = Mutant(name="m", file="f", old="a", new="b", tests=())
    for source in ("", "aa"):
        with pytest.raises(ValueError, match="not once"):
            mutated(mutant, source)


def test_the_table_counts_what_was_killed_and_marks_what_was_not_run() -> None:
    found = table([(MUTANTS[0], "tests/x.py::test_y"), (MUTANTS[1], "SURVIVED")])
    assert found.startswith(f"1 of 2 mutants killed; {len(MUTANTS) - 2} not run") and "`x.py::test_y`" in found
    assert found.count("| not run |") == len(MUTANTS) - 2
    assert "not run" not in table([(mutant, "tests/x.py::test_y") for mutant in MUTANTS])


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [mutant for mutant in MUTANTS if mutant.fast], ids=lambda mutant: mutant.name)
def test_a_fast_mutant_is_killed(mutant: Mutant) -> None:
    from tests.mutants.run import BROKEN, SURVIVED, caught_by

    assert caught_by(mutant) not in (SURVIVED, BROKEN)
