import hashlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from model.errors import CorpusError, SourceError
from rqwen3_pipeline.corpus.build import GROUP_KEY, items_of, run_stage
from rqwen3_pipeline.corpus.dedup import find_survivors, heldout_mask, shadowed_path
from rqwen3_pipeline.corpus.lock import lock_folder

from .made import prose


def test_heldout_mask_is_arithmetic_on_the_first_eight_bytes():
    digests = [hashlib.sha256(str(i).encode()).digest() for i in range(500)]
    array = np.frombuffer(b"".join(digests), dtype=np.uint8).reshape(-1, 32)
    expected = [int.from_bytes(digest[:8], "big") % 7 == 0 for digest in digests]
    assert heldout_mask(array, 7).tolist() == expected
    assert 30 < sum(expected) < 120
    assert heldout_mask(array[:0], 7).tolist() == []


def until_survivors(root, config, lock):
    for stage in ("raw", "filtered", "digests", "survivors"):
        outcomes = run_stage(stage, root, config, lock, items_of(stage, config, lock))
        assert [o.error for o in outcomes if o.error] == []
    return {(o.source, o.key): o.report for o in outcomes}


def test_survivors_over_all_files_and_against_wikipedia_equal_a_plain_loop(root, config, folder):
    lock = lock_folder(root, config, folder)
    reports = until_survivors(root, config, lock)
    seen, lost = {}, []
    for source in ("wikipedia", "fineweb_edu"):
        for file in lock.files(source):
            texts = pq.read_table(root.filtered(source, file.key)).column("text").to_pylist()
            stays = []
            for row, text in enumerate(texts):
                place = {"source": source, "key": file.key, "row": row}
                if text in seen:
                    lost.append(place | {f"by_{name}": value for name, value in seen[text].items()})
                else:
                    seen[text] = place
                    stays.append(row)
            survivors = np.load(root.survivors(source, file.key))
            assert survivors.dtype == np.uint32
            assert survivors.tolist() == stays
    assert pq.read_table(shadowed_path(root, "wikipedia_fineweb_edu")).to_pylist() == lost
    report = reports["wikipedia_fineweb_edu", GROUP_KEY]
    assert report["wikipedia"]["shadowed"] == 0
    assert report["fineweb_edu"]["shadowed"] == 3
    assert report["fineweb_edu"]["shadowed_by"] == {"wikipedia": 1, "fineweb_edu": 2}


def test_survivors_within_a_source_count_over_its_partitions(root, one_source):
    parts = [[{"text": prose(i)} for i in (0, 1, 0)], [{"text": prose(i)} for i in (1, 2, 3, 3)]]
    config, lock = one_source("textbooks", *parts)
    report = until_survivors(root, config, lock)["textbooks", GROUP_KEY]["textbooks"]
    left = sum(len(np.load(root.survivors("textbooks", key))) for key in ("00000", "00001"))
    assert (left, report["survivors"], report["documents"], report["shadowed"]) == (4, 4, 7, 3)


def test_survivors_with_an_empty_file_among_them(root, one_source):
    config, lock = one_source("textbooks", [{"text": prose(1)}], [{"text": None}], [{"text": prose(1)}])
    until_survivors(root, config, lock)
    lengths = {file.path[-9]: len(np.load(root.survivors("textbooks", file.key))) for file in lock.files("textbooks")}
    assert lengths["1"] == 0
    assert sum(lengths.values()) == 1
    assert pq.read_table(shadowed_path(root, "textbooks")).schema.field("row").type == pa.uint32()


def test_survivors_of_a_source_that_keeps_too_little_over_all_files_are_refused(root, one_source):
    files = [[{"text": prose(n)}] + [{"text": "short"}] * 60 for n in range(2)]
    config, lock = one_source("textbooks", *files, min_share_kept=0.5)
    for stage in ("raw", "filtered", "digests"):
        run_stage(stage, root, config, lock, items_of(stage, config, lock))
    with pytest.raises(SourceError, match=r"textbooks \(2 of 2 files\): 2 of 122 rows kept"):
        find_survivors(root, config, lock, "textbooks")


def test_survivors_before_all_digests_are_there_are_refused(root, one_source):
    config, lock = one_source("textbooks", [{"text": prose(1)}], [{"text": prose(2)}])
    for stage in ("raw", "filtered", "digests"):
        run_stage(stage, root, config, lock, [("textbooks", "00000")])
    with pytest.raises(CorpusError, match=r"00001\.npy is not made yet"):
        find_survivors(root, config, lock, "textbooks")


def test_survivors_from_changed_digests_are_refused(root, one_source):
    config, lock = one_source("textbooks", [{"text": prose(1)}])
    for stage in ("raw", "filtered", "digests"):
        run_stage(stage, root, config, lock, [("textbooks", "00000")])
    path = root.digests("textbooks", "00000")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(CorpusError, match="it is damaged; its stamp was removed"):
        find_survivors(root, config, lock, "textbooks")
