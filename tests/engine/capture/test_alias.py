import operator

import torch
from torch.fx import Graph

from halve.engine.capture.alias import origin, writes_between, written

ATEN = torch.ops.aten


def test_a_chain_of_views_and_writes_lies_where_it_began():
    graph = Graph()
    x = graph.placeholder("x")
    flat = graph.call_function(ATEN.view.default, (x, [-1]))
    parts = graph.call_function(ATEN.split.Tensor, (flat, 2))
    first = graph.call_function(operator.getitem, (parts, 0))
    positive = graph.call_function(ATEN.relu_.default, (first,))
    cast = graph.call_function(ATEN.type_as.default, (positive, x))
    assert origin(cast) is x


def test_what_is_computed_anew_lies_nowhere_else():
    graph = Graph()
    x = graph.placeholder("x")
    for new in (ATEN.relu.default, ATEN.clone.default, ATEN.neg.default):
        node = graph.call_function(new, (x,))
        assert origin(node) is node
    assert origin(graph.call_method("view", (x, -1))).op == "call_method"


def test_what_is_written_to_may_be_given_by_name_or_in_a_list():
    graph = Graph()
    x, y, out = (graph.placeholder(name) for name in ("x", "y", "out"))
    assert written(graph.call_function(ATEN.add.out, (x, y), {"out": out})) == [out]
    assert written(graph.call_function(ATEN._foreach_add_.Scalar, ([x, y], 1))) == [x, y]
    assert written(graph.call_function(ATEN.add.Tensor, (x, y))) == []
    assert written(x) == []


def test_a_write_between_two_values_is_seen_through_views():
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    first = graph.call_function(ATEN.relu.default, (x,))
    row = graph.call_function(ATEN.select.int, (x, 0, 0))
    graph.call_function(ATEN.zero_.default, (row,))
    last = graph.call_function(ATEN.add.Tensor, (first, x))
    assert writes_between(first, last, {x})
    assert not writes_between(first, last, {y, first})
    assert not writes_between(first, row, {x})
