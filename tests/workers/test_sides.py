"""A dictionary in a step's parameters: what was declared goes with it, and nothing else changes them."""

from ingest.dictionaries import Declared
from workers.sides import DictionaryEntry


def test_parameters_are_what_they_were_where_nothing_is_declared():
    """They name the step's artifact: another key in them would build every atlas anew."""
    entry = DictionaryEntry.of("ab", "circuit-tracer", 0, Declared())
    assert entry.as_json() == {"hash": "ab", "format": "circuit-tracer", "layer": 0}
    assert entry.declared == Declared()


def test_what_is_declared_comes_back_from_the_parameters():
    declared = Declared(reads="mlp.in", writes="hook_mlp_out", layer=0)
    entry = DictionaryEntry.of("ab", "sparsify", 0, declared)
    again = DictionaryEntry(**entry.as_json())
    assert again == entry
    assert again.declared == declared
    assert DictionaryEntry.of("ab", "sparsify", 3, Declared(reads="mlp.in")).declared.layer is None
