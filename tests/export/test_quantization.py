import torch

from halve.export.quantization import Quality, Quantization


def test_scores_are_compared_as_classes_and_others_by_their_error():
    scores = torch.tensor([[3.0, 1.0], [0.0, 2.0]])
    assert Quality.of([scores.flip(1)], [scores]).agreement == 0
    assert Quality.of([scores[:, :1]], [scores[:, :1]]) == Quality(None, None, 0.0)


def test_the_error_is_that_of_the_worst_output():
    scores, boxes = torch.tensor([[3.0, 1.0]]), torch.ones(1, 4)
    assert Quality.of([scores, 1.5 * boxes], [scores, boxes]) == Quality(1.0, 0.0, 0.5)


def test_the_outcome_in_a_line_counts_what_is_in_int8():
    found = Quantization(
        method="mse",
        distances={"mse": 0.01},
        costs={"body": 0.2, "stem": 0.1},
        sums={"add": 0.1},
        left=("body",),
        drop=0.0,
        quality={"float32": Quality(1.0, 0.0, 0.0)},
        images=36,
        held_out=12,
    )
    assert found.summary == (
        "1 of 2 layers and 1 of 1 residual sums in int8, ranges by mse; "
        "agreement with the dense network on 12 held-out images: float32 100.0 %"
    )
    errors = found.with_quality(float32=Quality(None, None, 0.5), int8=Quality(None, None, 0.25))
    assert "relative error of the dense network's outputs on 12 held-out images" in errors.summary
    assert errors.summary.endswith(": float32 50.0 %, int8 25.0 %")
    assert errors.as_json()["quality"]["int8"] == {"agreement": None, "kl": None, "error": 0.25}
