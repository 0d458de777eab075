import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from selectolax.lexbor import LexborHTMLParser

from rqwen3_pipeline.corpus import stackexchange
from rqwen3_pipeline.corpus.stackexchange import Answer, compose, html_to_text, ranked


def given_answer(number, score, selected=False, html="text"):
    return Answer(id=number, score=score, selected=selected, html=html)


@pytest.mark.parametrize(
    ("answers", "best"),
    [
        ([given_answer(1, 9), given_answer(2, 0, True)], 2),
        ([given_answer(3, 1), given_answer(4, 5)], 4),
        ([given_answer(12, 3), given_answer(7, 3), given_answer(30, 3)], 7),
        ([given_answer(5, -4), given_answer(6, -1)], 6),
        ([given_answer(8, 2, True), given_answer(9, 4, True)], 9),
        ([given_answer(10, 9, True, " <p> </p>"), given_answer(11, 3)], 11),
        ([given_answer(1, None), given_answer(2, -5)], 2),
        ([given_answer("10", 2.0), given_answer("9", 2.0)], "9"),
        ([given_answer(1, 5, "False"), given_answer(2, 0, "True")], 2),
        ([given_answer(1, 5, None), given_answer(2, 0, 1)], 2),
    ],
)
def test_compose_chooses_by_the_rule_in_every_order(answers, best):
    for order in (answers, answers[::-1], answers[1:] + answers[:1]):
        assert compose("q", order)[1].id == best


RANDOM = st.builds(
    Answer,
    id=st.one_of(st.none(), st.integers(0, 5), st.sampled_from(["3", "a", ""])),
    score=st.one_of(st.none(), st.just(float("nan")), st.integers(-2, 2).map(float)),
    selected=st.sampled_from([True, False, None, "True", "false", 0, 1]),
    html=st.sampled_from(["", "a", "b"]),
)


@given(st.lists(RANDOM, max_size=6), st.randoms())
def test_ranked_does_not_depend_on_the_order(answers, random):
    shuffled = list(answers)
    random.shuffle(shuffled)
    assert [repr((str(a.id), a.html)) for a in ranked(shuffled)] == [repr((str(a.id), a.html)) for a in ranked(answers)]


def test_compose_without_any_text_says_so():
    assert compose("q", []) == ("", None)
    assert compose("q", [given_answer(1, 1, html="<img src='x'>")]) == ("", None)
    assert compose("", [given_answer(1, 1)])[0] == ""


@pytest.mark.parametrize(
    ("html", "text"),
    [
        ("plain text", "plain text"),
        ("", ""),
        ("<p>one\ntwo</p>\n\n<p>three</p>", "one two\n\nthree"),
        ("a &amp;lt; b &lt; c &amp; d", "a &lt; b < c & d"),
        ("<p>a<br>b<br/>c</p>", "a\nb\nc"),
        ("<p>see <a href='u'>this <b>link</b></a>, <em>now</em></p>", "see this link, now"),
        ("<p>x<sup>2</sup> and a<sub>i</sub></p>", "x^2 and a_i"),
        ("<ul><li>one</li><li>two</li></ul>", "- one\n- two"),
        ("<ol start='3'><li>c<li>d</ol>", "3. c\n4. d"),
        ("<ul>\n<li><p>one</p>\n<p>more</p></li>\n<li>two</li>\n</ul>", "- one\n\n  more\n- two"),
        ("<blockquote><p>said\nso</p></blockquote><p>yes</p>", "> said so\n\nyes"),
        ("<p>call <code>f(x &lt; 1)</code> or <code>a`b</code></p>", "call `f(x < 1)` or ``a`b``"),
        ("<h2>Title</h2>text", "Title\n\ntext"),
        ("<table><tr><th>a</th><th>b</th></tr><tr><td>1</td><td>2</td></tr></table>", "a | b\n1 | 2"),
        ("<p>a</p><script>alert(1)</script><style>p{}</style><!-- no --><hr><p>b</p>", "a\n\nb"),
        ("<p>unclosed <b>tags", "unclosed tags"),
        ("if a < b then", "if a < b then"),
        ("<p>a vector<int> of $i<n$ and $a<b$</p>", "a vector<int> of $i<n$ and $a<b$"),
        ("<p>use <textarea> or <select> <B class='x'>now</B></p>", "use <textarea> or <select> now"),
        ("<p>open <code>f(x)</p><p>next</p>", "open `f(x)`\n\nnext"),
        ("a</b></code></div></p>b", "a\n\nb"),
        ("<CODE class='c'>X</CODE> <PRE>Y</PRE>", "`X`\n\n```\nY\n```"),
        ("<pre><code>a <b>x</b>\n<pre> in</pre></code></pre>z", "```\na x\n in\n```\n\nz"),
        ("<pre><code>x &lt; y<p>para</p>z", "```\nx < y\npara\nz\n```"),
        ("<ul><li><pre>x\n  y</pre></li></ul>", "- ```\n  x\n    y\n  ```"),
        ("<p>\\(a &lt; b &amp;amp; c\\) &amp;quot;</p>", "\\(a < b &amp; c\\) &quot;"),
        ("<p>\u00a0kept</p>", "\u00a0kept"),
    ],
)
def test_html_becomes_text(html, text):
    assert html_to_text(html) == text


def test_html_code_keeps_indentation_blank_lines_and_entities():
    body = "def f(x):\n\n    if x &lt; 3 &amp;&amp; y:\n        return  1\n"
    html = f"<p>Try</p>\n<pre><code>{body}</code></pre>\n<p>done</p>"
    code = "```\ndef f(x):\n\n    if x < 3 && y:\n        return  1\n```"
    assert html_to_text(html) == f"Try\n\n{code}\n\ndone"


def test_html_code_that_holds_a_fence_gets_a_longer_one():
    assert html_to_text("<pre>a\n```\nb</pre>") == "````\na\n```\nb\n````"


@pytest.mark.parametrize(
    "formula",
    [
        "$a  <  b$",
        "$$\\begin{align}\n  a &= b \\\\ % note\n  c &= d\n\\end{align}$$",
        "\\begin{cases}\n 1 &  x\n\\end{cases}",
        "\\[ x\n  = y \\]",
        "\\( x  \\)",
    ],
)
def test_html_formula_stays_to_the_letter(formula):
    escaped = formula.replace("&", "&amp;").replace("<", "&lt;")
    assert html_to_text(f"<p>so\nlet {escaped} and\nso on</p>") == f"so let {formula} and so on"


def test_html_nested_deeply_or_full_of_openings_is_quick():
    began = time.monotonic()
    assert html_to_text("<blockquote>" * 3000 + "x").endswith("x")
    html_to_text("<p>" + "\\[ $ \\begin{a} " * 3000)
    html_to_text("<ol>" + "<li>x" * 20_000 + "</ol>")
    assert html_to_text("<div>" * 10_000 + "x" + "</div>" * 10_000) == "x"
    html_to_text("<ul><li>" * 3000 + "<span>" * 3000 + "<p>x" * 3000)
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("mark", ["font", "a", "b", "code", "CODE"])
def test_html_whose_marks_were_left_open_grows_no_tree_of_them(mark):
    html = "<p>" + "".join(f"<{mark} c={i}>" for i in range(600)) + "<p>x" * 4000
    root = LexborHTMLParser(stackexchange._renamed(html)).root
    assert sum(1 for _ in root.traverse(include_text=True)) < 20_000
    assert html_to_text(html).count("x") == 4000


@given(st.text())
def test_html_of_any_text_gives_text_that_utf8_holds(html):
    html_to_text(html).encode()
