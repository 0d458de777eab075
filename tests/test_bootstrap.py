import importlib.util
import shutil
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "bootstrap.py"


@pytest.fixture
def bootstrap():
    spec = importlib.util.spec_from_file_location("bootstrap", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_python_too_old_is_refused_with_the_way_out(bootstrap, monkeypatch):
    monkeypatch.setattr(bootstrap.sys, "version_info", (3, 9, 2))
    with pytest.raises(SystemExit, match=r"Python 3\.9.*3\.11 or newer.*make PYTHON="):
        bootstrap.check_machine()


def test_disk_too_full_is_refused_before_anything_is_written(bootstrap, monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100 << 30, 99 << 30, 1 << 30))
    monkeypatch.setattr(bootstrap, "VENV", str(tmp_path / ".venv"))
    with pytest.raises(SystemExit, match=r"1\.0 GiB free"):
        bootstrap.main(["training"])
    assert not (tmp_path / ".venv").exists()


def test_script_is_valid_for_old_pythons():
    source = SCRIPT.read_text()
    compile(source, str(SCRIPT), "exec")
    assert 'f"' not in source, "an f-string is a syntax error before Python 3.6, and the message would be lost"


def test_fingerprint_changes_with_the_extras_and_the_constraints(bootstrap, monkeypatch, tmp_path):
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(bootstrap, "HERE", str(tmp_path))
    first = bootstrap.fingerprint(["training"])
    assert bootstrap.fingerprint(["training", "evaluation"]) != first
    (tmp_path / "constraints.txt").write_text("other")
    assert bootstrap.fingerprint(["training"]) != first
