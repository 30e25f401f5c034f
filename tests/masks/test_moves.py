import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from halve.errors import MaskError
from halve.masks.moves import checked, move_, moved, moved_back


@given(st.permutations(range(4)), st.permutations(range(3)))
def test_moving_back_undoes_moving(rows, columns):
    tensor = torch.arange(12.0).reshape(4, 3)
    dims = {0: tuple(rows), 1: tuple(columns)}
    assert torch.equal(moved_back(moved(tensor, dims), dims), tensor)


def test_place_i_holds_what_was_at_order_i():
    assert moved(torch.tensor([10, 11, 12]), {0: (2, 0, 1)}).tolist() == [12, 10, 11]


def test_tied_tensors_move_once():
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    net[1].weight = net[0].weight
    before = net[0].weight.detach().clone()
    move_(net, {"0.weight": {0: (1, 0)}})
    assert torch.equal(net[1].weight, before[[1, 0]])


@pytest.mark.parametrize("moves", [{"9.weight": {0: (0, 1)}}, {"0.weight": {0: (0, 1, 2)}}, {"0.weight": {2: (0, 1)}}])
def test_moves_of_another_model_are_refused_and_nothing_moves(moves):
    net = nn.Sequential(nn.Linear(2, 2))
    before = net[0].weight.detach().clone()
    with pytest.raises(MaskError, match="for another model"):
        move_(net, {"0.weight": {0: (1, 0)}, **moves})
    assert torch.equal(net[0].weight, before)


def test_what_is_no_permutation_is_refused():
    with pytest.raises(MaskError, match=r"the order of a\.weight along dimension 1 is not a permutation"):
        checked({"a.weight": {0: (1, 0), 1: (0, 0)}})
