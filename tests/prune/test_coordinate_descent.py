import itertools

import pytest
import torch

from halve.masks.pattern import Pattern
from halve.prune import coordinate_descent as module
from halve.prune.coordinate_descent import Cost, coordinate_descent

TABLE = Pattern("2:4").table()


def problem(rows, blocks, seed=0):
    torch.manual_seed(seed)
    columns = 4 * blocks
    x = torch.randn(3 * columns, columns) @ torch.randn(columns, columns)
    weight, offset = torch.randn(rows, columns), torch.randn(rows)
    cost = Cost(x.T @ x / len(x), torch.randn(rows, columns), torch.randn(rows, columns), offset, torch.rand(rows) * 9)
    return weight, cost, torch.randperm(columns).reshape(blocks, 4)


def removed(weight, codes, blocks):
    result = torch.zeros_like(weight)
    result[:, blocks.flatten()] = (weight[:, blocks] * ~TABLE[codes]).flatten(1)
    return result


def test_a_single_block_gets_the_best_of_all_codes():
    weight, cost, blocks = problem(40, 1)
    every = [cost.of(removed(weight, torch.full((40, 1), code), blocks)) for code in range(6)]
    best = torch.stack(every).argmin(0)
    assert torch.equal(
        coordinate_descent(weight, torch.zeros(40, 1, dtype=torch.long), cost, blocks, TABLE)[:, 0], best
    )


def test_many_rows_reach_the_best_of_all_pairs_of_codes_and_none_gets_worse():
    weight, cost, blocks = problem(200, 2)
    pairs = torch.tensor(list(itertools.product(range(6), repeat=2)))
    best = torch.stack([cost.of(removed(weight, pair.expand(200, 2), blocks)) for pair in pairs]).min(0).values
    start = torch.zeros(200, 2, dtype=torch.long)
    found = cost.of(removed(weight, coordinate_descent(weight, start, cost, blocks, TABLE), blocks))
    assert (found <= cost.of(removed(weight, start, blocks)) + 1e-4).all()
    assert (found < best + 1e-3).double().mean() > 0.5


@pytest.mark.parametrize("together", [1, 3, 1000])
def test_how_many_blocks_go_together_changes_nothing_but_the_time(together, monkeypatch):
    weight, cost, blocks = problem(5, 40)
    start = torch.zeros(5, 40, dtype=torch.long)
    expected = coordinate_descent(weight, start, cost, blocks, TABLE)
    monkeypatch.setattr(module, "_TOGETHER", together)
    assert torch.equal(coordinate_descent(weight, start, cost, blocks, TABLE), expected)
    assert not start.any()


def test_a_refused_code_is_not_taken():
    weight, cost, blocks = problem(30, 2)
    refused = torch.zeros(2, 6, dtype=torch.bool)
    refused[1, :5] = True
    codes = coordinate_descent(weight, torch.full((30, 2), 5), cost, blocks, TABLE, refused)
    assert (codes[:, 1] == 5).all()
    assert codes[:, 0].unique().numel() > 3
