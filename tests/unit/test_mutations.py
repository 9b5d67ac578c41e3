"""The mistakes that ``./dev mutations`` makes can be made: their places are there."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tools.mutations import MUTATIONS, PACKAGE, ROOT, CannotApplyError, Mutation, apply


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("mutations")
    shutil.copytree(ROOT / PACKAGE, copy / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.breaks)
def test_each_mutation_has_exactly_one_place_and_tests(mutation: Mutation, tree: Path, tmp_path: Path) -> None:
    part = Path(PACKAGE) / mutation.part
    shutil.copytree(tree / part, tmp_path / part)
    apply(mutation, tmp_path)
    assert all((ROOT / word).exists() for word in mutation.tests.split() if word.startswith("tests/"))


def test_a_mutation_without_a_place_is_an_error(tree: Path) -> None:
    nowhere = Mutation(breaks="nothing", part="domain", place="no such line", mistake="", tests="tests/unit/domain")
    with pytest.raises(CannotApplyError, match="matches 0 times in domain"):
        apply(nowhere, tree)
