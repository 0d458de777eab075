import os

from rqwen3_pipeline.slurm.snapshot import take_snapshot


def checkout(folder):
    for name in ("rqwen3_pipeline/a.py", "rqwen3_pipeline/sub/b.j2", "model/c.py", "configs/demo.toml", "dagster.yaml"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (folder / "model" / "__pycache__").mkdir()
    (folder / "model" / "__pycache__" / "c.pyc").write_text("compiled")
    (folder / "notes.txt").write_text("of no job")
    return folder


def files(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_snapshot_holds_the_sources_and_what_was_added_and_nothing_else(tmp_path):
    base = checkout(tmp_path / "co")
    (tmp_path / "mine.toml").write_text("mine")
    taken = take_snapshot(base, tmp_path / "code", {"profile/mine.toml": tmp_path / "mine.toml"})
    expected = [
        "COMMIT",
        "configs/demo.toml",
        "dagster.yaml",
        "model/c.py",
        "profile/mine.toml",
        "rqwen3_pipeline/a.py",
    ]
    assert files(taken) == [*expected, "rqwen3_pipeline/sub/b.j2"]


def test_snapshot_of_the_same_sources_is_used_again_and_an_edit_makes_another(tmp_path):
    base = checkout(tmp_path / "co")
    first = take_snapshot(base, tmp_path / "code")
    os.utime(base / "model" / "c.py", (1, 1))
    assert take_snapshot(base, tmp_path / "code") == first
    (base / "model" / "c.py").write_text("edited")
    second = take_snapshot(base, tmp_path / "code")
    assert second != first
    assert (first / "model" / "c.py").read_text() == "model/c.py"
    assert sorted(path.name for path in (tmp_path / "code").iterdir()) == sorted([first.name, second.name])
