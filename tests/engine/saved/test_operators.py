"""The list of operators that files may contain."""

import operator

import pytest
import torch

from halve.engine.saved import operators
from halve.engine.saved.operators import check_arguments, name_of, operator_named, schema_of


def overloads():
    """Every overload on the list."""
    for name in sorted(operators._NAMES):
        packet, _, only = name.partition(".")
        for overload in getattr(torch.ops.aten, packet).overloads():
            try:
                if not only or only == overload:
                    yield operator_named(f"aten.{packet}.{overload}")
            except ValueError:
                continue


def test_every_name_on_the_list_is_an_operator():
    found = {name_of(overload).split(".")[1] for overload in overloads()}
    assert found == {name.partition(".")[0] for name in operators._NAMES}


def test_operators_on_the_list_write_nothing_and_return_tensors():
    for overload in overloads():
        schema = schema_of(overload)
        assert not any(
            argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments
        )
        assert {str(value.type) for value in schema.returns} <= {"Tensor", "List[Tensor]"}, schema
        assert not {"Storage", "Stream"} & {str(argument.type) for argument in schema.arguments}, schema


def test_names_lead_back_to_the_operator():
    for target in (*overloads(), *operators._FUNCTIONS.values()):
        assert operator_named(name_of(target)) is target


@pytest.mark.parametrize(
    "name",
    [
        *("aten.from_file.default", "aten.save.default", "aten.set_.source_Tensor", "aten.resize_.default"),
        *(
            "aten.as_strided.default",
            "aten._unsafe_index.Tensor",
            "aten.empty.memory_format",
            "aten.manual_seed.default",
        ),
        *("aten.add_.Tensor", "aten.add.out", "aten.add.t", "aten.mul.left_t", "aten.split.str", "aten.lstm.data"),
        *("aten._upsample_bilinear2d_aa.default", "aten._weight_norm_interface.default", "aten.to.prim_dtype"),
        *("aten.add.__class__", "aten.add", "aten", "", ".", "aten..", "prim.Print.default", "higher_order.cond"),
        *("halve.run_kernel.default", "operator.methodcaller", "operator.call", "operator.__builtins__", "math.pow"),
        *("torch.load", "torch.sym_max.__globals__", "builtins.exec", "os.system"),
    ],
)
def test_other_names_lead_nowhere(name):
    with pytest.raises(ValueError, match=r"is not an operator that files may contain|PyTorch .* has no"):
        operator_named(name)


def test_an_operator_that_only_looks_like_one_on_the_list_has_no_name():
    class Disguised:
        def __str__(self):
            return "aten.relu.default"

        def __hash__(self):
            return 0

    for target in (Disguised(), torch.ops.aten.relu, torch.ops.aten.relu_.default, torch.relu, operator.attrgetter):
        with pytest.raises(ValueError, match=r"."):
            name_of(target)


def test_arguments_are_those_of_the_schema():
    add = torch.ops.aten.add.Tensor
    check_arguments(add, [1, 2], {"alpha": 3})
    check_arguments(add, [], {"self": 1, "other": 2})
    for args, named in (([], {}), ([1], {}), ([1, 2, 3], {}), ([1, 2], {"self": 1}), ([1, 2], {"beta": 1})):
        with pytest.raises(ValueError, match="arguments"):
            check_arguments(add, args, named)
    check_arguments(torch.ops.aten.softmax.int, [None, 1, torch.float16], {})
    for wrong in (-1, 5, "float16", torch.strided):
        with pytest.raises(ValueError, match="dtype must be a ScalarType"):
            check_arguments(torch.ops.aten.softmax.int, [None, 1, wrong], {})
    with pytest.raises(ValueError, match="positional"):
        check_arguments(operator.add, [1], {"b": 2})
