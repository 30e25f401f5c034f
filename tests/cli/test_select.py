import pytest

import halve as package


def patterns(result):
    return {entry["layer"]: entry["pattern"] for entry in result.json}


def test_select_shows_every_layer_and_why(halve, net):
    result = halve("select", *net)
    assert result.out.splitlines()[0] == "zoo.py:net"
    for words in ("stem", "3 input channels, not divisible by 4", "depthwise convolution", "output head"):
        assert words in result.out
    assert result.out.splitlines()[-1].startswith("2 of 5 layers masked, ")
    assert result.err == ""


def test_select_speaks_of_the_options_of_the_command_line(halve, net):
    out = halve("select", *net).out
    assert "--also head" in out
    assert "--remainder pad" in out


def test_select_as_json_has_one_entry_for_each_layer(halve, net):
    entries = halve("select", *net, "--json").json
    assert [entry["layer"] for entry in entries] == ["stem", "body", "depthwise", "point", "head"]
    assert all(set(entry) == {"layer", "type", "shape", "pattern", "reason", "masked"} for entry in entries)
    assert entries[1] == {
        "layer": "body",
        "type": "Conv2d",
        "shape": "16x8x3x3",
        "pattern": "2:4",
        "reason": "along input channels",
        "masked": True,
    }


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], {"body": "2:4", "point": "2:4"}),
        (["--pattern", "1:4"], {"body": "1:4", "point": "1:4"}),
        (["--pattern", "point=1:2", "--pattern", "2:4"], {"body": "2:4", "point": "1:2"}),
        (["--pattern", "point=dense", "--pattern", "2:4"], {"body": "2:4"}),
        (["--pattern", "point=dense"], {"body": "2:4"}),
        (["--include", "bod*"], {"body": "2:4"}),
        (["--exclude", "body"], {"point": "2:4"}),
        (["--also", "head"], {"body": "2:4", "point": "2:4", "head": "2:4"}),
        (["--also", "head", "--include", "body"], {"body": "2:4", "head": "2:4"}),
        (["--remainder", "pad"], {"stem": "2:4", "body": "2:4", "point": "2:4"}),
        (["--order", "flat"], {"body": "2:4", "point": "2:4"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_select_and_prune_choose_the_same_layers(halve, net, options, expected):
    chosen = patterns(halve("select", *net, *options, "--json"))
    assert {name: pattern for name, pattern in chosen.items() if pattern != "dense"} == expected
    halve("prune", *net, *options)
    made = package.load("net.masks.safetensors")
    assert {name: str(mask.pattern) for name, mask in made.items()} == expected
