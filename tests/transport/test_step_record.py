"""What P1 notes can be read after its death, in the middle of a write too."""

from pathlib import Path

from mmjax.transport.step_record import (
    SLOT_BYTES,
    StepRecord,
    create_step_record,
    read_step_record,
)


def test_the_last_note_is_read(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    create_step_record(path)
    assert read_step_record(path) == ()
    record = StepRecord(path)
    for ids in (("a",), ("a", "b"), ("c\n",), (), ("d" * 200,)):
        record.write(ids)
        assert read_step_record(path) == record.request_ids == ids
    record.close()


def test_a_write_that_was_cut_off_leaves_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    create_step_record(path)
    record = StepRecord(path)
    for number in range(4):
        record.write((f"before {number}",))
        before = path.read_bytes()
        record.write((f"after {number}",))
        after = path.read_bytes()
        (changed,) = (at for at in (0, SLOT_BYTES) if before[at:][:64] != after[at:][:64])
        for cut in range(1, 40):
            torn = after[: changed + cut] + before[changed + cut :]
            path.write_bytes(torn)
            assert read_step_record(path) in ((f"before {number}",), (f"after {number}",))
        path.write_bytes(after)
        record = StepRecord(path)
        record._number = 2 * (number + 1)


def test_what_does_not_fit_is_unknown(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    create_step_record(path)
    record = StepRecord(path)
    record.write(["x" * 100] * 1000)
    assert read_step_record(path) == ()
    record.write(["y"])
    assert read_step_record(path) == ("y",)


def test_without_a_file_nothing_is_noted(tmp_path: Path) -> None:
    missing = tmp_path / "not there" / "steps"
    create_step_record(missing)
    record = StepRecord(missing)
    record.write(["a"])
    assert read_step_record(missing) == ()
    damaged = tmp_path / "damaged"
    damaged.write_bytes(b"\xff" * 100)
    assert read_step_record(damaged) == ()
