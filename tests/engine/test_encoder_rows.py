"""Rows of the encoder pool: distinct while held, all back in the end."""

from hypothesis import given
from hypothesis import strategies as st

from mmjax.engine.device.encoder import EncoderRows


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
