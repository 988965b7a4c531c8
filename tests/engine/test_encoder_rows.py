"""Rows of the encoder pool: distinct while held, all back in the end; positions behind a prompt."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mmjax.engine.device.encoder import EncoderRows
from mmjax.models.host_inputs import RotaryPositions


@given(st.lists(st.tuples(st.sampled_from("abcde"), st.integers(1, 6)), max_size=40))
def test_rows_are_distinct_and_return(steps: list[tuple[str, int]]) -> None:
    rows = EncoderRows(10)
    held: dict[str, list[int]] = {}
    for identifier, count in steps:
        if identifier in rows:
            assert rows.get(identifier).tolist() == held.pop(identifier)
            rows.free(identifier)
        elif count <= rows.num_free:
            held[identifier] = rows.allocate(identifier, count).tolist()
        used = [row for entry in held.values() for row in entry]
        assert len(used) == len(set(used)) == 10 - rows.num_free
        assert all(0 <= row < 10 for row in used)
    rows.reset()
    assert rows.num_free == 10
    assert sorted(rows.allocate("all", 10).tolist()) == list(range(10))


def test_positions_go_on_behind_the_prompt():
    prompt = np.array([[0, 1, 1, 2], [0, 1, 2, 2], [0, 1, 1, 2]], np.int32)
    positions = RotaryPositions(prompt, -1)
    np.testing.assert_array_equal(positions.between(1, 3), prompt[:, 1:3])
    np.testing.assert_array_equal(positions.between(3, 6), [[2, 3, 4]] * 3)
    np.testing.assert_array_equal(positions.between(7, 8), [[6]] * 3)


def test_rows_are_given_to_the_outputs_that_are_embeddings():
    rows = EncoderRows(8, num_extra_rows=2)
    places = rows.allocate_chosen("a", np.array([4, -1, 1, 4, -2], np.int32), 6)
    assert (places[[0, 2, 3, 5]] == 10).all()  # beyond the pool of 8 + 2 rows
    assert rows.num_free == 6
    assert rows.get("a").tolist() == [places[4], 8, places[1], places[4], 9]
    rows.free("a")
    assert rows.num_free == 8
    assert rows.allocate("b", 8).tolist() == rows.get("b").tolist()
