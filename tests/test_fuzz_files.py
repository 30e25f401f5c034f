"""A short run of benchmarks/fuzz_files.py: mutated files load unchanged or are refused."""

import pytest

from benchmarks.fuzz_files import MUTATIONS, fuzz, networks, targets


@pytest.mark.parametrize(("make", "cases"), [(targets, 300), (networks, 120)], ids=["files", "networks"])
def test_mutated_files_are_refused_or_load_unchanged(make, cases):
    result = fuzz(cases, make=make)
    assert result["failures"] == []
    assert result["cases"] == cases
    refused = {name.partition(":")[0] for name in result["outcomes"] if name.endswith("refused")}
    assert refused == set(MUTATIONS)


def test_the_cases_are_determined_by_the_seed():
    assert fuzz(20, seed=3) == fuzz(20, seed=3)
