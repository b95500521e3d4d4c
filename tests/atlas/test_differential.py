"""Generated Cypher against numpy on the same edges, on every store.

It exists for the day the database's version changes: newer versions of the embedded engine answer some of
these queries wrongly (an ORDER BY dropped before an aggregate, a relationship's filter applied to another
hop).
"""

from __future__ import annotations

import pytest

from tests.atlas.bindings import Graph
from tests.atlas.conftest import Toy
from tests.atlas.cypher_fuzz import Fuzz

QUESTIONS = 60


@pytest.mark.parametrize("seed", range(8))
def test_generated_queries_agree_with_numpy(toy: Toy, seed: int) -> None:
    fuzz = Fuzz(Graph.of(toy.model), seed)
    wrong = []
    answered = 0
    for _ in range(QUESTIONS):
        question = fuzz.question()
        answer = toy.store.query(question.cypher, timeout=30)
        assert len(answer.columns) == question.columns
        answered += len(question.rows) > 0
        if difference := question.differs(list(answer.rows)):
            wrong.append(f"{question.cypher}\n    {difference}")
    assert not wrong, "\n".join(wrong)
    assert answered > QUESTIONS / 2  # most questions have an answer to get wrong
