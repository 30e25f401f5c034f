import torch
from torch import nn

import halve
from halve.modules import kind_of
from halve.select.ran import layers_that_run
from tests.families import family
from tests.untouched import untouched


class Switching(nn.Module):
    """Runs `easy` or `hard`, by the sum of its inputs, and never `aux`."""

    def __init__(self):
        super().__init__()
        self.easy, self.hard, self.aux, self.head = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        x = self.easy(x) if x.sum() > 0 else self.hard(x)
        return self.head(x) if not self.training else self.head(x) + self.aux(x)


LAYERS = ("easy", "hard", "aux", "head")


def test_layers_count_that_run_on_any_batch_in_eval_mode():
    model, x = Switching().train(), torch.ones(2, 8)
    with untouched(model):
        assert layers_that_run(model, LAYERS, [x]) == {"easy", "head"}
        assert layers_that_run(model, LAYERS, [x, -x]) == {"easy", "hard", "head"}


def test_no_more_batches_are_read_than_needed():
    def batches():
        yield torch.ones(2, 8)
        yield -torch.ones(2, 8)
        raise AssertionError("one more")

    assert layers_that_run(Switching(), ["easy", "hard", "head"], batches()) == {"easy", "hard", "head"}


def test_forward_decides_what_runs():
    assert layers_that_run(Switching(), LAYERS, [torch.ones(2, 8)], lambda m, x: m.aux(x)) == {"aux"}


def test_weights_that_are_read_without_calling_the_layer_count():
    model = family("vit")  # attention multiplies by the weight of its out_proj itself
    layers = [name for name, module in model.named_modules() if kind_of(module)]
    assert layers_that_run(model, layers, torch.randn(2, 3, 64, 64)) == set(layers)


def test_computed_and_shared_weights_count():
    model = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
        nn.utils.spectral_norm(nn.Linear(8, 8)),
        nn.Linear(8, 8),
        nn.Linear(8, 8),
        nn.Linear(8, 8),
    )
    model[3].weight = model[2].weight
    ran = layers_that_run(model, list("01234"), [torch.ones(2, 8)], lambda m, x: m[2](m[1](m[0](x))))
    assert ran == set("0123")


def test_select_lists_layers_that_do_not_run_with_the_reason():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8))
    chosen = halve.select(model, data=torch.ones(2, 8), forward=lambda m, x: m[0](x))
    assert [choice.masked for choice in chosen] == [True, False]
    assert chosen.not_masked == {"1": "did not run on the data (also='1' masks it)"}
    assert "did not run on the data" in str(chosen)
    assert len(halve.select(model, data=torch.ones(2, 8), forward=lambda m, x: m[0](x), also="1").masked) == 2
    assert len(halve.select(model).masked) == 2


def test_a_head_that_does_not_run_is_said_not_to_run():
    class Early(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.late = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x):
            return self.body(x)

    chosen = halve.select(Early(), data=torch.ones(2, 8))
    assert chosen.not_masked["late"] == "did not run on the data (also='late' masks it)"
