import json

from halve.engine.plan import Entry, Plan


def test_a_plan_round_trips_through_json():
    entry = Entry("a", "4>2", "dense torch", False, 0.1, None, None, 0.2, "why")
    table = Plan({1: [entry], 8: []}, {"b": "falls back to eager"})
    assert Plan.from_json(json.loads(json.dumps(table.as_json()))) == table
    assert "b: falls back to eager" in str(table)
