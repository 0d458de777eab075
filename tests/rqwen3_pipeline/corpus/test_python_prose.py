import ast
import hashlib
import json
import random
import re
import unicodedata
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from model.errors import EnvironmentProblem, SourceError
from rqwen3_pipeline.corpus import demo_sources
from rqwen3_pipeline.corpus.docstring_html import blocks_of, has_latex, to_html, with_dollars
from rqwen3_pipeline.corpus.installed_prose import Passage, docstrings, installed_roots
from rqwen3_pipeline.corpus.python_prose import STAMP_NAME, write_python_prose

TARGET_TOKENS = 20_000
WORDS = [
    "the",
    "model",
    "reads",
    "a",
    "window",
    "of",
    "tokens",
    "and",
    "returns",
    "one",
    "value",
    "for",
    "each",
    "of",
    "them",
    "while",
    "nothing",
    "else",
    "changes",
]


def made_up_site(folder: Path, modules: int) -> dict[str, Path]:
    """A site folder of modules whose docstrings are made of words, some with LaTeX, some copied."""
    for number in range(modules):
        rng = random.Random(number)

        def prose(words: int, rng: random.Random = rng) -> str:
            return " ".join(rng.choice(WORDS) for _ in range(words)).capitalize() + "."

        paragraphs = "\n\n    ".join(prose(40) for _ in range(5))
        code = f'"""{prose(90)}\n\n{prose(60)}"""\n\n\nclass Thing{number}:\n    """{paragraphs}"""\n\n'
        code += f'    def load(self):\n        """{prose(30)}\n\n        {prose(40)}\n\n'
        code += f'            >>> f{number}(1)\n            2\n        """\n\n'
        code += f'def short{number}():\n    """{prose(6)}"""\n\n'
        formula = f".. math:: \\frac{{a}}{{{number + 1}}}"
        code += f'def area{number}():\n    r"""{prose(30)}\n\n    {formula}\n\n    {prose(40)}"""\n\n'
        code += 'def copied():\n    """' + " ".join(WORDS * 3) + '."""\n'
        path = folder / f"package{number % 7}" / f"module{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code, encoding="utf-8")
    return {"site": folder}


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    return made_up_site(tmp_path_factory.mktemp("site"), 220)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, roots):
    """A small corpus: its folder and its report."""
    folder = tmp_path_factory.mktemp("prose") / "sources"
    return folder, write_python_prose(folder, target_tokens=TARGET_TOKENS, roots=roots)


def rows_of(folder: Path, source: str) -> list[list[dict]]:
    return [pq.read_table(path).to_pylist() for path in sorted((folder / source).rglob("*.parquet"))]


def hashes(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def text_of(source: str, row: dict) -> str:
    if source == "stackexchange":
        chosen = min(row["answers"], key=lambda a: (not a["selected"], -a["pm_score"], a["answer_id"]))
        return re.sub("<[^>]+>", "", row["question"] + "\n\n" + chosen["text"])
    return row["content" if source == "pes2o" else "text"]


def verdict(source: str, row: dict) -> str:
    """The design's filters, written down a second time."""
    text = unicodedata.normalize("NFC", text_of(source, row))
    least = {
        "fineweb_edu": 100,
        "wikipedia": 500,
        "openwebmath": 200,
        "stackexchange": 100,
        "pes2o": 1000,
        "textbooks": 100,
    }[source]
    if source == "fineweb_edu" and row["score"] < 3.0:
        return "score"
    if source == "wikipedia" and row["title"].endswith("(disambiguation)"):
        return "disambiguation by title"
    if source == "wikipedia" and "may refer to:" in text[:100]:
        return "disambiguation by lead"
    if not text.strip():
        return "blank"
    if len(text) < least:
        return "short"
    if source == "fineweb_edu" and len(text) > 100_000:
        return "long"
    return "kept"


def test_write_python_prose_any_target_has_the_six_sources_files_and_columns(corpus):
    folder, report = corpus
    assert list(report) == ["fineweb_edu", "wikipedia", "openwebmath", "stackexchange", "pes2o", "textbooks"]
    for source, figures in report.items():
        paths = sorted((folder / source).rglob("*.parquet"))
        assert figures["files"] == len(paths) >= 2
        assert figures["documents"] == sum(pq.read_metadata(path).num_rows for path in paths)
    first = pq.read_schema(folder / "fineweb_edu/sample/100BT/000_00000.parquet")
    assert first.names == [
        "text",
        "id",
        "dump",
        "url",
        "file_path",
        "language",
        "language_score",
        "token_count",
        "score",
        "int_score",
    ]
    assert [str(first.field(name).type) for name in ("score", "int_score")] == ["double", "int64"]
    questions = pq.read_schema(next((folder / "stackexchange").rglob("*.parquet")))
    assert questions.names == ["qid", "question", "answers", "date", "metadata"]
    assert str(questions.field("answers").type).startswith("list<")
    answer = questions.field("answers").type.value_type
    assert [field.name for field in answer] == (
        ["answer_id", "author", "author_id", "author_profile", "pm_score", "selected", "text"]
    )
    assert (folder / "wikipedia/20231101.en/train-00000-of-00003.parquet").is_file()
    assert len({path.parent.name for path in (folder / "stackexchange").rglob("*.parquet")}) >= 3


def test_write_python_prose_same_installation_gives_the_same_bytes(corpus, roots, tmp_path):
    folder, report = corpus
    assert write_python_prose(tmp_path / "again", target_tokens=TARGET_TOKENS, roots=roots) == report
    assert hashes(tmp_path / "again") == hashes(folder)


def test_write_python_prose_after_filters_and_dedup_fills_each_share_with_spare(corpus):
    folder, _ = corpus
    shares = {
        "fineweb_edu": 7.0,
        "wikipedia": 2.0,
        "openwebmath": 1.5,
        "stackexchange": 1.0,
        "pes2o": 1.0,
        "textbooks": 0.5,
    }
    seen: dict[str, set[str]] = {source: set() for source in shares}
    for source in ("wikipedia", "fineweb_edu", "openwebmath", "stackexchange", "pes2o", "textbooks"):
        for rows in rows_of(folder, source):
            seen[source] |= {text_of(source, row) for row in rows if verdict(source, row) == "kept"}
    seen["fineweb_edu"] -= seen["wikipedia"]
    for source, share in shares.items():
        needed = TARGET_TOKENS * 4 * share / 13 * 1.3
        assert sum(map(len, seen[source])) * 0.95 >= needed * 0.97, source


def test_write_python_prose_every_file_has_work_for_filters_and_dedup(corpus):
    folder, _ = corpus
    kept_somewhere: dict[str, set[str]] = {}
    for source in ("wikipedia", "fineweb_edu", "openwebmath", "stackexchange", "pes2o", "textbooks"):
        files = rows_of(folder, source)
        texts = [Counter(text_of(source, row) for row in rows) for rows in files]
        for index, rows in enumerate(files):
            verdicts = Counter(verdict(source, row) for row in rows)
            expected = {"kept", "short"}
            expected |= {"score", "long", "blank"} if source == "fineweb_edu" else set()
            expected |= {"disambiguation by title", "disambiguation by lead"} if source == "wikipedia" else set()
            assert expected <= set(verdicts), (source, index, verdicts)
            assert max(texts[index].values()) >= 2, "a copy inside the file"
            others = set().union(*(texts[i] for i in range(len(files)) if i != index))
            assert others & set(texts[index]), "a copy in another file"
        kept_somewhere[source] = {
            text_of(source, row) for rows in files for row in rows if verdict(source, row) == "kept"
        }
        if source == "fineweb_edu":
            assert all(set(t) & kept_somewhere["wikipedia"] for t in texts), "a copy of an article in each file"
        if source == "wikipedia":
            assert sum("For other uses" in text[:30] for text in kept_somewhere[source]) == len(files)


def test_write_python_prose_lead_disambiguation_pages_are_no_stubs(corpus):
    pages = [row for rows in rows_of(corpus[0], "wikipedia") for row in rows if "may refer to:" in row["text"][:100]]
    assert len(pages) == 3
    assert all(len(page["text"]) >= 500 and "disambiguation" not in page["title"] for page in pages)


def test_write_python_prose_scores_lie_around_three_and_are_rounded(corpus):
    rows = [row for rows in rows_of(corpus[0], "fineweb_edu") for row in rows]
    assert all(row["int_score"] == int(row["score"] + 0.5) for row in rows)
    assert any(row["score"] < 3.0 and row["int_score"] == 3 for row in rows), "the trap of the rounded score"
    share = sum(row["score"] >= 3.0 for row in rows) / len(rows)
    assert 0.75 < share < 0.95


def test_write_python_prose_questions_have_votes_in_all_combinations(corpus):
    answers = [row["answers"] for rows in rows_of(corpus[0], "stackexchange") for row in rows]
    selected_has_fewer = sum(
        any(a["selected"] and a["pm_score"] < max(b["pm_score"] for b in group) for a in group) for group in answers
    )
    none_selected = [group for group in answers if not any(a["selected"] for a in group)]
    all_negative = [group for group in answers if all(a["pm_score"] < 0 for a in group)]
    two_selected = [group for group in answers if sum(a["selected"] for a in group) == 2]
    assert selected_has_fewer
    assert none_selected
    assert all_negative
    assert two_selected
    assert all(len(group) >= 2 for group in answers)
    assert any(group[0] is not min(group, key=lambda a: a["answer_id"]) for group in answers), "the order says nothing"


def test_write_python_prose_metadata_of_openwebmath_is_a_json_string_and_latex_is_preferred(corpus):
    rows = [row for rows in rows_of(corpus[0], "openwebmath") for row in rows if len(row["text"]) >= 200]
    assert all(isinstance(json.loads(row["metadata"]), dict) for row in rows)
    assert sum("\\frac" in row["text"] for row in rows) > 0.9 * len(rows)


def test_write_python_prose_finished_folder_is_left_alone(corpus, roots):
    folder, report = corpus
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert write_python_prose(folder, target_tokens=TARGET_TOKENS, roots={"site": folder / "nowhere"}) == report
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


@pytest.mark.parametrize("damage", ["truncate", "remove", "unfinished"])
def test_write_python_prose_damaged_folder_is_made_whole(damage, roots, tmp_path):
    write_python_prose(tmp_path, target_tokens=3000, roots=roots)
    whole = hashes(tmp_path)
    victim = next((tmp_path / "pes2o").rglob("*.parquet"))
    if damage == "truncate":
        victim.write_bytes(victim.read_bytes()[:-100])
    elif damage == "remove":
        victim.unlink()
    else:  # what a kill while writing leaves
        stamp = json.loads((tmp_path / STAMP_NAME).read_text())
        (tmp_path / STAMP_NAME).write_text(json.dumps({**stamp, "finished": False, "files": {}}))
        victim.unlink()
    write_python_prose(tmp_path, target_tokens=3000, roots=roots)
    assert hashes(tmp_path) == whole


def test_write_python_prose_foreign_parquet_is_refused_and_untouched(tmp_path, roots):
    real = tmp_path / "fineweb_edu/sample/100BT/000_00000.parquet"
    real.parent.mkdir(parents=True)
    real.write_bytes(b"somebody's download")
    with pytest.raises(SourceError, match="not written from this Python installation"):
        write_python_prose(tmp_path, target_tokens=3000, roots=roots)
    assert real.read_bytes() == b"somebody's download"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [real]


def test_write_python_prose_too_little_prose_says_how_much_and_writes_nothing(tmp_path):
    roots = made_up_site(tmp_path / "site", 3)
    with pytest.raises(EnvironmentProblem, match=r"about enough for [\d,]+ tokens.*Install more packages") as caught:
        write_python_prose(tmp_path / "out", target_tokens=500_000, roots=roots)
    assert "fineweb_edu" in str(caught.value)
    assert "500,000" in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_write_python_prose_tells_progress(tmp_path, roots):
    calls: list[tuple[str, int, int]] = []
    write_python_prose(tmp_path, target_tokens=3000, roots=roots, progress=lambda *call: calls.append(call))
    assert calls
    assert all(done > 0 and wanted > 0 for _, done, wanted in calls)


def test_write_python_prose_standard_library_alone_suffices_for_a_small_target(tmp_path):
    roots = {"stdlib": installed_roots()["stdlib"]}
    report = write_python_prose(tmp_path, target_tokens=10_000, roots=roots)
    assert all(figures["documents"] > 0 for figures in report.values())


def test_docstrings_of_a_file_equal_those_that_importing_shows(tmp_path):
    code = (
        '"""The module."""\nif True:\n    def inner():\n        """In a branch.\n\n            Indented.\n        """\n'
        'class Outer:\n    """A class."""\n    async def method(self):\n        "One line."\n        x = "none"\n'
        'def bad():\n    "half \\ud800 surrogate"\ntry:\n    pass\nexcept OSError:\n    pass\n'
    )
    (tmp_path / "thing.py").write_text(code)
    (tmp_path / "broken.py").write_text('"""Never seen."""\ndef (:\n')
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_thing.py").write_text('"""Not prose."""')
    found = {passage.name: passage for passage in docstrings({"site": tmp_path})}
    namespace: dict = {}
    exec(code, namespace)
    assert found["thing"].text == "The module."
    assert found["thing.inner"].text == ast.get_docstring(ast.parse(code).body[1].body[0])  # pyright: ignore
    assert found["thing.Outer"].text == namespace["Outer"].__doc__
    assert found["thing.Outer.method"].text == "One line."
    assert found["thing.bad"].text == "half \ufffd surrogate"
    assert len(found) == 5
    assert found["thing.inner"].address == "site/thing.py#3"


def test_docstrings_dense_files_come_before_sparse_ones_and_all_come(tmp_path):
    for number in range(6):
        (tmp_path / f"dense{number}.py").write_text(f'"""{"Word " * 40}{number}."""\n')
        (tmp_path / f"sparse{number}.py").write_text(f'"""Short {number}."""\n' + "x = 1\n" * 200)
    names = [passage.name for passage in docstrings({"site": tmp_path})]
    assert {name[:-1] for name in names[:6]} == {"dense"}
    assert {name[:-1] for name in names[6:]} == {"sparse"}


def test_to_html_keeps_code_lists_math_and_entities():
    text = (
        "Compare ``a < b`` & more.\n\n    for x in y:\n        print('<p>')\n\n    done()\n\n"
        "* first\n* second\n  line\n\nLet :math:`x_i < 3`.\n\n.. math::\n\n    \\frac{a}{b}\n    + c\n\nEnd."
    )
    assert has_latex(text)
    html = to_html(blocks_of(with_dollars(text)))
    assert "<p>Compare <code>a &lt; b</code> &amp; more.</p>" in html
    code = "<pre><code>    for x in y:\n        print(&#x27;&lt;p&gt;&#x27;)\n\n    done()\n</code></pre>"
    assert code in html
    assert "<ul>\n<li>first</li>\n<li>second\n  line</li>\n</ul>" in html
    assert "<p>Let $x_i &lt; 3$.</p>" in html
    assert "<p>$$\n\\frac{a}{b}\n+ c\n$$</p>" in html
    assert html.endswith("<p>End.</p>")


def test_row_chosen_answer_is_the_second_half_of_the_docstring_whatever_the_votes():
    for number in range(60):
        passage = Passage(
            address=f"site/m.py#{number}", name="m.f", kind="function", text="One.\n\nTwo two.\n\nThe chosen end."
        )
        others = [Passage(address=f"o{i}", name="o", kind="function", text="Wrong.") for i in range(2)]
        row = demo_sources.row("stackexchange", passage, others)
        chosen = min(row["answers"], key=lambda a: (not a["selected"], -a["pm_score"], a["answer_id"]))
        assert "The chosen end." in chosen["text"]
        assert "One." in row["question"]
