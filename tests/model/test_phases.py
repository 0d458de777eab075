import hashlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from model import phases


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    phases.announce_to(tmp_path / "phases")
    yield tmp_path / "phases"
    phases.announce_to(None)


def said(file: Path) -> list[tuple[str, str | None, int | None, bool]]:
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [(line["phase"], line["within"], line["step"], line["background"]) for line in lines]


def test_phases_are_appended_with_what_they_are_part_of(file: Path) -> None:
    phases.enter("evaluation", 3)
    with phases.within("dry_step"):
        phases.enter("writing", 1)
    thread = threading.Thread(target=phases.enter, args=("hashing", 3))
    thread.start()
    thread.join()
    assert said(file) == [
        ("evaluation", None, 3, False),
        ("dry_step", None, None, False),
        ("writing", "dry_step", 1, False),
        ("hashing", None, 3, True),
    ]


def test_micro_batch_names_its_windows_by_their_bytes(file: Path) -> None:
    tokens_BL = np.array([[1, 2, 3], [4, 5, 6]], dtype=np.int64)
    phases.enter_micro_batch("micro_batch", 1, tokens_BL)
    expected = [hashlib.sha256(np.array(row, dtype="<u4").tobytes()).hexdigest()[:16] for row in tokens_BL.tolist()]
    assert json.loads(file.read_text())["windows"] == expected


def test_without_a_file_nothing_is_written(tmp_path: Path) -> None:
    phases.announce_to(None)
    phases.enter("evaluation", 3)
    phases.enter_micro_batch("micro_batch", 1, None)  # not even looked at
    assert list(tmp_path.iterdir()) == []
