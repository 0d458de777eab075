import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.errors import ConfigError, CorpusError, SourceError
from model.files import sha256_file
from rqwen3_pipeline.corpus.build import items_of, run_stage
from rqwen3_pipeline.corpus.lock import (
    LONGEST_NAME_BYTES,
    lock_folder,
    raw_names,
    read_lock,
    seeded_order,
    weighted_order,
)
from rqwen3_pipeline.settings import RunRoot

from .made import prose, run_config, tree, write


def test_lock_lists_every_file_with_its_hash(root, config, folder):
    lock = lock_folder(root, config, folder)
    assert [file.path for file in lock.files("wikipedia")] == ["wikipedia.parquet"]
    assert sorted(file.name for file in lock.files("fineweb_edu")) == [
        "fineweb-edu__a.parquet",
        "fineweb-edu__b.parquet",
    ]
    for file in lock.files("openwebmath"):
        path = folder / file.path
        assert (file.size_bytes, file.sha256, file.rows) == (path.stat().st_size, sha256_file(path), 24)
    assert [file.key for file in lock.files("fineweb_edu")] == ["00000", "00001"]
    assert lock.sha256 == sha256_file(root.lock)
    assert read_lock(root) == lock


def test_lock_twice_touches_nothing(root, config, folder):
    lock_folder(root, config, folder)
    before = {path: path.stat().st_mtime_ns for path in root.path.rglob("*")}
    lock_folder(root, config, folder)
    assert {path: path.stat().st_mtime_ns for path in root.path.rglob("*")} == before


def test_lock_of_a_copied_folder_has_the_same_bytes(root, config, folder, tmp_path):
    lock_folder(root, config, folder)
    before = root.lock.read_bytes()
    shutil.copytree(folder, tmp_path / "moved")
    lock = lock_folder(root, config, tmp_path / "moved")
    assert root.lock.read_bytes() == before
    assert str(folder) not in before.decode()
    assert lock.origin == tmp_path / "moved"


def test_lock_without_a_source_names_it(root, config, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "few")
    (tmp_path / "few" / "pes2o.parquet").unlink()
    with pytest.raises(SourceError, match=r"no pes2o\.parquet and no folder pes2o/"):
        lock_folder(root, config, tmp_path / "few")
    assert not root.lock.exists()


@pytest.mark.parametrize("damage", ["cut_last_byte", "cut_half", "empty", "foreign"])
def test_lock_of_a_damaged_file_names_it(root, config, folder, tmp_path, damage):
    shutil.copytree(folder, tmp_path / "bad")
    path = tmp_path / "bad" / "textbooks.parquet"
    data = path.read_bytes()
    path.write_bytes(
        {"cut_last_byte": data[:-1], "cut_half": data[: len(data) // 2], "empty": b""}.get(damage, b"<html>")
    )
    with pytest.raises(SourceError, match=r"textbooks\.parquet: not a whole parquet file"):
        lock_folder(root, config, tmp_path / "bad")


def test_lock_without_a_column_names_file_and_column(root, config, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "bad")
    write(tmp_path / "bad" / "fineweb-edu" / "b.parquet", [{"text": prose(1), "int_score": 4}])
    with pytest.raises(SourceError, match=r"b\.parquet: lacks the column 'score'; it has text, int_score"):
        lock_folder(root, config, tmp_path / "bad")


def test_lock_without_a_field_of_the_answers_names_it(root, config, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "bad")
    write(tmp_path / "bad" / "stackexchange.parquet", [{"question": "q", "answers": [{"answer_id": 1, "body": "b"}]}])
    with pytest.raises(SourceError, match=r"'answers' lacks the field 'pm_score'"):
        lock_folder(root, config, tmp_path / "bad")


def test_lock_never_reads_unfinished_or_hidden_files(root, config, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "more")
    web = tmp_path / "more" / "fineweb-edu"
    for name in ("c.parquet.incomplete", "c.parquet.tmp", ".c.parquet", ".cache/c.parquet"):
        (web / name).parent.mkdir(exist_ok=True)
        (web / name).write_bytes(b"not parquet")
    assert len(lock_folder(root, config, tmp_path / "more").files("fineweb_edu")) == 2


ODD = [
    "part,one",
    "a...b",
    "[0-9]",
    "with space",
    "ünï",
    "wikipedia|20231101.en|0",
    "CON",
    "x" * 150,
    "sample-10BT/000_00000",
]


def test_partition_keys_are_digits_one_to_one_with_files_however_odd_their_names(root, config, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "odd")
    web = tmp_path / "odd" / "fineweb-edu"
    for name in ODD:
        (web / f"{name}.parquet").parent.mkdir(exist_ok=True)
        shutil.copy(web / "a.parquet", web / f"{name}.parquet")
    files = lock_folder(root, config, tmp_path / "odd").files("fineweb_edu")
    assert sorted(file.key for file in files) == [f"{i:05d}" for i in range(len(ODD) + 2)]
    assert {f"fineweb-edu/{name}.parquet" for name in ODD} < {file.path for file in files}
    assert len({file.name for file in files}) == len(files)
    for file in files:  # and each can be made under its name
        raw = root.raw("fineweb_edu", file.name)
        raw.parent.mkdir(parents=True, exist_ok=True)
        raw.touch()


def test_files_whose_joined_names_are_too_long_for_the_file_system_are_built_like_any_other(root, one_source):
    rows = [{"text": prose(i)} for i in range(20)]
    deep = "/".join(("数" * 40, "e" * 120, "数" * 40))
    config, lock = one_source("textbooks", rows)
    for number in range(2):
        write(lock.origin / "textbooks" / f"{deep}{number}" / "f.parquet", rows)
    lock = lock_folder(root, config, lock.origin)
    outcomes = [run_stage(stage, root, config, lock, items_of(stage, config, lock)) for stage in ("raw", "filtered")]
    assert [outcome.error for made in outcomes for outcome in made] == [None] * 6
    names = [file.name for file in lock.files("textbooks")]
    assert "textbooks__0.parquet" in names
    assert len(set(names)) == 3
    assert sorted(len(name.encode()) for name in names)[1:] >= [217, 217]


@given(st.text(st.characters(codec="utf-8", exclude_characters="/"), min_size=1, max_size=300))
def test_raw_name_changes_only_where_it_would_be_too_long_to_be_written(name):
    (given_,) = raw_names([f"{name}.parquet"], "web", "folder").values()
    if len(f"{name}.parquet".encode()) <= LONGEST_NAME_BYTES:
        assert given_ == f"{name}.parquet"
    longest = f".{Path(given_).with_suffix('.stamp.json').name}.{'0' * 8}-{2**22}-{10**10 - 1}.tmp"
    assert len(longest.encode()) <= 255
    assert given_.endswith(".parquet")


def test_lock_of_a_file_whose_name_is_no_utf8_says_so(root, config, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "latin")
    odd = os.fsencode(tmp_path / "latin" / "fineweb-edu") + b"/caf\xe9.parquet"
    shutil.copy(folder / "pes2o.parquet", odd)
    with pytest.raises(SourceError, match=r"latin: the name of the file 'fineweb-.*caf\\udce9\.parquet' is no UTF-8"):
        lock_folder(root, config, tmp_path / "latin")


@pytest.mark.parametrize("name", [*ODD, "..", ""])
def test_experiment_whose_name_would_make_odd_keys_is_refused(name):
    run = run_config()
    with pytest.raises(ConfigError, match=r"run\.name"):
        dataclasses.replace(run, name=name)
    with pytest.raises(ConfigError, match="is no experiment name"):
        RunRoot(Path("home")).experiment(name)


def test_lock_of_two_paths_with_one_name_is_refused(root, config, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "same")
    web = tmp_path / "same" / "fineweb-edu"
    (web / "x").mkdir()
    shutil.copy(web / "a.parquet", web / "x" / "y.parquet")
    shutil.copy(web / "a.parquet", web / "x__y.parquet")
    with pytest.raises(SourceError, match=r"would both be raw/fineweb_edu/fineweb-edu__x__y\.parquet"):
        lock_folder(root, config, tmp_path / "same")


def test_lock_of_a_source_that_is_there_twice_is_refused(root, config, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "twice")
    shutil.copy(folder / "wikipedia.parquet", tmp_path / "twice" / "wikipedia")
    (tmp_path / "twice" / "wikipedia").unlink()
    write(tmp_path / "twice" / "wikipedia" / "a.parquet", [{"text": "t", "title": "t"}])
    with pytest.raises(SourceError, match=r"wikipedia\.parquet and wikipedia are both there"):
        lock_folder(root, config, tmp_path / "twice")


def test_lock_of_another_version_is_refused(root, config, folder):
    lock_folder(root, config, folder)
    root.lock.write_text(json.dumps({"format_version": 99, "sources": {}}))
    with pytest.raises(CorpusError, match="not a lock of format version 1"):
        read_lock(root)


def test_relock_with_fewer_files_removes_what_was_made_of_the_others(root, config, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "fewer")
    lock_folder(root, config, folder)
    for place in (root.filtered("fineweb_edu", "00001"), root.tokens / "fineweb_edu-00001-00.bin"):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(b"old")
    (root.tokens / "fineweb_edu-00000-00.bin").write_bytes(b"stays")
    (tmp_path / "fewer" / "fineweb-edu" / "a.parquet").unlink()
    lock_folder(root, config, tmp_path / "fewer")
    assert [name for name in tree(root) if name.startswith(("filtered", "tokens"))] == [
        "tokens/fineweb_edu-00000-00.bin"
    ]


def test_relock_without_files_that_an_experiment_was_trained_on_is_refused(root, config, folder, tmp_path):
    for name in ("fewer", "more"):
        shutil.copytree(folder, tmp_path / name)
    (tmp_path / "fewer" / "fineweb-edu" / "a.parquet").unlink()
    shutil.copy(folder / "fineweb-edu" / "a.parquet", tmp_path / "more" / "fineweb-edu" / "z.parquet")
    lock_folder(root, config, folder)
    checkpoint = root.experiment("one") / "checkpoints" / "step_5.pt"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.touch()
    before = root.lock.read_bytes()
    with pytest.raises(SourceError, match=r"1 locked files \(fineweb-edu/a.parquet first\).* one has been trained on"):
        lock_folder(root, config, tmp_path / "fewer")
    assert root.lock.read_bytes() == before
    lock_folder(root, config, tmp_path / "more")  # what was read is still there
    checkpoint.unlink()
    lock_folder(root, config, tmp_path / "fewer")


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 40)), unique=True), st.integers(0, 9), st.randoms())
def test_seeded_order_goes_round_the_folders(places, seed, random):
    paths = [f"{name}/{number}.parquet" for name, number in places]
    ordered = seeded_order(list(paths), seed)
    random.shuffle(paths)
    assert seeded_order(paths, seed) == ordered
    assert sorted(ordered) == sorted(paths)
    left = {name: sum(1 for other, _ in places if other == name) for name, _ in places}
    while ordered:
        turn = [ordered.pop(0)[0] for _ in range(sum(1 for count in left.values() if count))]
        assert sorted(turn) == sorted(name for name, count in left.items() if count)
        left = {name: count - (count > 0) for name, count in left.items()}


def test_seeded_order_of_another_seed_differs():
    paths = [f"{i}.parquet" for i in range(30)]
    assert seeded_order(paths, 1) != seeded_order(paths, 2)
    assert Path(seeded_order(paths, 1)[0]).suffix == ".parquet"


@given(
    st.dictionaries(st.tuples(st.sampled_from("abc"), st.integers(0, 60)), st.integers(1, 50), min_size=1),
    st.integers(0, 9),
    st.tuples(*[st.floats(0.1, 9.0)] * 3),
)
def test_weighted_order_spends_bytes_by_weight_up_to_one_file(places, seed, chosen):
    weights = dict(zip("abc", chosen, strict=True))
    sizes = {f"data/{name}/{number}.parquet": size for (name, number), size in places.items()}
    order = weighted_order(sizes, weights, seed)
    assert sorted(order) == sorted(sizes)
    assert weighted_order(dict(reversed(sizes.items())), weights, seed) == order
    left = {name: sum(1 for other, _ in places if other == name) for name, _ in places}
    spent = dict.fromkeys(left, 0.0)
    for path in order:
        name = path.split("/")[1]
        behind = min(spent[other] for other, count in left.items() if count)
        assert spent[name] == behind
        spent[name] += sizes[path] / weights[name]
        left[name] -= 1
