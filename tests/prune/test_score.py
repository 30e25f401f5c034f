import torch

from halve.prune.score import LayerScores, Score

FOUND = LayerScores({"a": torch.tensor([1.0, -2.0, 3.0])})


def test_orders_are_searched_by_the_score_itself_or_by_a_power_of_it():
    plain, squared = (Score("mine", "a score", lambda inputs: FOUND, search_power=power) for power in (1, 2))
    assert plain.for_search(FOUND) is FOUND.by_layer
    assert squared.for_search(FOUND)["a"].tolist() == [1.0, 4.0, 9.0]
    assert FOUND.by_layer["a"].tolist() == [1.0, -2.0, 3.0]
