"""What is written down is read back as it was, without a line that was cut off."""

from pathlib import Path

from fleet.verify.record_files import RecordFile, read_record


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    record = RecordFile(tmp_path)
    record.write("update", n=1)
    record.close()
    with (tmp_path / "events.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"kind": "upd')
    assert read_record(tmp_path) == [{"kind": "update", "n": 1}]
    assert read_record(tmp_path, "update", "end") == [{"kind": "update", "n": 1}]
    assert read_record(tmp_path, "upd") == []
