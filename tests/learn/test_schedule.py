import pytest

from halve.learn.schedule import Schedule
from halve.learn.settings import Settings


def schedule(expected=None, **settings):
    return Schedule(Settings(**settings), expected)


def test_the_temperature_goes_from_start_to_end_by_equal_factors():
    assert [schedule(temperature=(8.0, 0.5)).temperature(f) for f in (0, 0.25, 0.5, 1)] == pytest.approx([8, 4, 2, 0.5])
    assert {schedule(temperature=3.0).temperature(f) for f in (0, 0.3, 1)} == {3.0}


def test_the_learning_rate_follows_its_schedule():
    cosine, constant, paper = (schedule(lr=2.0, schedule=s) for s in ("cosine", "constant", "paper"))
    assert [cosine.lr(f, 9) for f in (0, 0.5, 1)] == pytest.approx([2, 1, 0])
    assert [constant.lr(f, 9) for f in (0, 0.5, 1)] == [2, 2, 2]
    assert [paper.lr(0.9, epoch) for epoch in (0, 2, 3, 5, 6, 9)] == pytest.approx([2, 2, 0.2, 0.2, 0.02, 0.002])


def test_noise_and_guidance_reach_their_end_at_80_percent_of_the_run():
    assert [schedule().noise(f) for f in (0, 0.4, 0.8, 0.9, 1)] == pytest.approx([1, 0.5, 0, 0, 0])
    assert {schedule(noise=0.7).noise(f) for f in (0, 0.3, 1)} == {0.7}
    assert [schedule(noise=0.7).guidance(f) for f in (0, 0.4, 0.8, 1)] == pytest.approx([1, 0.5, 0, 0])


@pytest.mark.parametrize(("steps", "noises"), [(None, (1, 0)), (100, (0.3, 0)), (1_999, (0.3, 0)), (2_000, (1, 0))])
def test_short_runs_have_less_noise_unless_it_is_given(steps, noises):
    assert schedule(steps).noises == noises
    assert schedule(steps, noise=0.7).noises == (0.7, 0.7)
    assert schedule(steps, noise=(1.0, 0.0)).noises == (1, 0)


def test_a_step_gets_all_values_at_once():
    values = schedule(noise=(2.0, 1.0), temperature=(4.0, 1.0), lr=3.0, schedule="paper").at(0.4, epoch=3)
    assert values == pytest.approx((4.0**0.6, 1.5, 0.5, 0.3))
