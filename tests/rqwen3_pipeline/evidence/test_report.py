import csv
import re
from html.parser import HTMLParser

import pytest

from model.files import append_jsonl, read_json
from rqwen3_pipeline.evidence.report import write_report

VOID = {"meta", "br", "link", "img", "hr", "input"}


class Page(HTMLParser):
    """Collects tags, attributes and text, and whether every tag is closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.seen, self.text, self.balanced = [], [], [], True
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        self.balanced = self.balanced and bool(self.open) and self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)

    @property
    def words(self):
        return re.sub(r"\s+", " ", " ".join(self.text))


def page_of(sample):
    write_report(sample.root, sample.run)
    return Page((sample.root.evidence("small") / "index.html").read_text(encoding="utf-8"))


def assert_self_contained(page):
    assert page.balanced
    assert page.open == []
    assert not any(tag in ("script", "link", "img", "iframe") for tag, _ in page.seen)
    targets = [attrs[name] for _, attrs in page.seen for name in ("href", "src") if name in attrs]
    assert all(target in ("loss.csv", "evidence.json") or target.startswith("#") for target in targets)
    ids = [attrs["id"] for _, attrs in page.seen if "id" in attrs]
    assert len(ids) == len(set(ids))
    named = [attrs["aria-labelledby"].split() for _, attrs in page.seen if "aria-labelledby" in attrs]
    assert all(name in ids for names in named for name in names)
    assert all(target[1:] in ids for target in targets if target.startswith("#"))
    style = "".join(page.text)
    assert "url(" not in style
    assert "@import" not in style


def test_write_report_of_a_finished_run_leaves_three_whole_files(finished_run):
    report = write_report(finished_run.root, finished_run.run)
    folder = finished_run.root.evidence("small")
    assert sorted(path.name for path in folder.iterdir()) == ["evidence.json", "index.html", "loss.csv"]
    assert report["verdict"] == read_json(folder / "evidence.json")["verdict"]
    assert report["checks"]["does_not_hold"] == report["checks"]["pending"] == 0
    with (folder / "loss.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(1, 201))
    assert [row["submission"] for row in rows] == ["1"] * 80 + ["2"] * 40 + ["3"] * 80


def test_write_report_twice_gives_the_same_bytes(finished_run):
    folder = finished_run.root.evidence("small")
    write_report(finished_run.root, finished_run.run)
    first = {path.name: path.read_bytes() for path in folder.iterdir()}
    write_report(finished_run.root, finished_run.run)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == first


def test_page_of_a_finished_run_is_self_contained_and_says_it_all(finished_run):
    page = page_of(finished_run)
    assert_self_contained(page)
    for text in (
        *("All 17 checks hold.", "Before training", "After training, step 200", "121 to 133", "#2 killed"),
        *("HellaSwag", "31.47 %", "Pythia-410M", "loosely comparable", "Above chance: 3.8 standard errors"),
        *("dropped: low_score", "Nothing.", "reads are repeats", "s was not recorded"),
    ):
        assert text in page.words
    assert "pending" not in re.sub(r"pending (for months|\{)|\.pending", "", page.words)


def test_page_escapes_what_the_model_wrote(finished_run):
    text = "</div><script>alert(1)</script>"
    append_jsonl(finished_run.folder / "samples.jsonl", {"step": 200, "prompt": "The theory", "text": text})
    page = page_of(finished_run)
    assert_self_contained(page)
    assert "<script>alert(1)</script>" in page.words


@pytest.mark.parametrize("state", ["empty", "corpus", "started"])
def test_page_of_an_unfinished_run_comes_out_and_names_the_commands(empty_run, corpus_run, state):
    sample = empty_run if state == "empty" else corpus_run
    if state == "started":
        sample.begin()
        sample.log_steps(1, 1, 3, loss=None, tokens_per_s=None)
    page = page_of(sample)
    assert_self_contained(page)
    assert "pending" in page.words
    assert "rqwen3 --profile FILE.toml run" in page.words
    assert "nan" not in page.words.lower().replace("finance", "")


def test_page_shows_a_loss_that_is_not_finite_as_text(finished_run):
    finished_run.log_steps(3, 200, 200, loss=None)
    page = page_of(finished_run)
    assert "step 200: not a number" in page.words
    assert "does not hold" in page.words
    rows = (finished_run.root.evidence("small") / "loss.csv").read_text(encoding="utf-8").splitlines()
    assert rows[-1].startswith("200,not a number,")
