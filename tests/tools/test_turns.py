"""tools/bench/turns.py: who begins a round, what counts, and the tables that are printed."""

import turns


def test_every_round_begins_with_another_way_and_warm_ones_do_not_count():
    order = []
    ways = {name: lambda name=name: order.append(name) or len(order) for name in "abc"}
    found = turns.in_turns(ways, rounds=2, warm=1)
    assert "".join(order) == "cab" + "abc" + "bca"
    assert found == {"a": [4, 9], "b": [5, 7], "c": [6, 8]}


def test_figures_of_rounds():
    assert turns.ratios([1.0, 9.0], [2.0, 3.0]) == [0.5, 3.0]
    assert turns.median_range([3.0, 1.0, 2.0], 1) == "2.0 (1.0 .. 3.0)"
    assert turns.median_range([0.002], scale=1e3) == "2.00 (2.00 .. 2.00)"


def test_a_table(capsys):
    turns.head("way", ">ms")
    turns.row("a", 1)
    assert capsys.readouterr().out == "| way | ms |\n|---|---:|\n| a | 1 |\n"
