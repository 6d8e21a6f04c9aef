r"""Tests of reward.py: the marked answer, exact numbers, labels, formulas, workers, command line.

Where the public cases leave both outcomes open, this is what reward.py does and why:

    two boxes, two '####', a second question       the last one counts: the documented rule judges no prose
    a box that is not closed                       no answer: it may have been cut off
    three hashes, \boxed 72, 'The answer is 18.'   no answer: only the two documented marks are marks
    nested boxes                                   the outermost; 50 around one number are the number
    72% for 0.72, 90 minutes for 1.5               wrong: nothing is converted
    1/3 for 0.333, 0.333 for 0.33                  wrong: nothing is rounded
    1e3, 1.8 x 10^3                                right for 1000, 1800: they are exact decimals
    12,34                                          not a number: no thousands separator stands there
    Arabic-Indic digits, zero-width space          right: they are read
    (7)                                            7, not -7
    about 72, ~72, > 72, 72!                       not one value: hedged, a bound, perhaps a factorial
    72nd                                           72: a suffix is a unit
    5:30 for 5.5                                   not one number
    label [72], true, 'blue', '12 or 13'           refused: neither one number nor a formula
"""

import json
import os
import random
import subprocess
import sys
import threading
import time
from decimal import Decimal
from pathlib import Path

import pytest

import reward
from reward import Grader, extract_answer, grade, read_label

ROOT = Path(__file__).resolve().parents[1]
CASES = ROOT.parent / "shared" / "cases"
TOUCHED = Path("/tmp/grader_was_here")
RIGHT, WRONG, UNPARSED = "right", "wrong", "unparsed"
TOWER = "\\boxed{9^{9^{9^{9^{9}}}}}"


# ------------------------------------------------------------------------------------------- public cases
@pytest.mark.parametrize("name", ["grading_cases", "grading_contested"])
def test_public_cases(name):
    path = CASES / f"{name}.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is not here")
    rows = [json.loads(line) for line in path.read_bytes().split(b"\n") if line]
    for row in rows:
        started = time.perf_counter()
        verdict = grade(row["response"], row["label"])
        assert time.perf_counter() - started < row.get("time_limit_s", 2.0), row["id"]
        outcome = "error" if verdict.kind == "error" else verdict.reward == 1.0
        assert outcome in row.get("acceptable", [row["expected"]]), (row["id"], verdict)
        assert verdict.said is None or len(verdict.said) <= reward.SAID
    assert not TOUCHED.exists()


# ------------------------------------------------------------------------------------------- numbers by kind
EQUAL = {       # label -> answers that say it
    "72": ["72", "72.", "72.00 ", "+72", "072", "$72$", "$$72$$", r"\$72", "$72", "72$", "US$72", "USD 72",
           "Rs. 72", "¥72", "72€", "72%", r"72\%", "72 percent", "72 km", "72km", "72 m^2", "72 m²", "72 cm³",
           "72 m2", r"72\text{ cm}^3", r"72\ \text{cm}^{3}", "72 km/h", "72 miles per hour", "72°", "72 °C",
           r"72^\circ", r"72^{\circ}\text{C}", "72 sq. ft.", "72-inch", "72 U.S. dollars", "72/day",
           "72 a day", "72元", "72 pens!", "72, thanks", r"72\,\text{km}", "72~km", "72 (8 boxes of 9 pens)",
           "72 (8 * 9 = 72)", "72 [note 3]", "72, because 8 * 9 = 72", "72. There were 8 boxes of 9 pens.",
           "72 — that is 8 times 9", "72 is the answer", "The answer is 72.", "**Answer:** 72",
           "Answer: **72**", "**72**", "*72*", "__72__", "`72`", "72**", "** 72 **", "**72** pens", "“72”",
           "(72)", "[72]", r"\(72\)", r"\[72\]", r"\text{72}", r"\mathbf{72}", r"{{72}}", r"\left(72\right)",
           r"\displaystyle 72", "x = 72", "= 72", "Total cost = $72", r"\text{Total} = 72", "8 * 9 = 72",
           "80 - 8 = 72", "72 = 8 * 9", "8 x 9 = 72", r"8 \times 9 = 72", r"\frac{144}{2} = 72", "x_1 = 72",
           "8 boxes * 9 pens = 72 pens", "f(2) = 72", r"\theta = 72^\circ", "０７２", "٧٢", "७२", "72\u200b",
           "72\ufeff", "72①", "144/2", "0" * 20000 + "72", "72." + "0" * 20000, "7.2e1", "72<|im_end|>",
           "72<|endoftext|>", "72</s>"],
    "-7": ["-7", "−7", "–7", "- 7", "-$7", "$-7", "minus 7", "(-7)", "-7.0", "-14/2", r"\frac{-14}{2}"],
    "8500": ["8500", "8,500", "$8,500.00", r"8{,}500", r"8,\!500", r"8\,500", "8\u00a0500", "8.5e3",
             "8.5 x 10^3", r"8.5 \times 10^{3}", "8.5×10³", "¥８，５００"],
    "0.75": ["0.75", ".75", "0.750", "3/4", "3 / 4", "6/8", r"\frac{3}{4}", r"\dfrac34",
             r"\tfrac{1,500}{2,000}", "¾", r"\frac{3}{4}\text{ cup}", "3/4 cups"],
    "3.25": ["3 1/4", "3¼", r"3\frac{1}{4}", "13/4", "3 1/4 cups", "3.250"],
    "-3 1/4": ["-3.25", r"-3\frac14", "−3¼"],
    "1/3": ["1/3", r"\frac{2}{6}"], "-0.5": [r"-\frac{1}{2}", r"\frac{1}{-2}", "-.5"],
    "0": ["0", "-0", "0.00", "00"]}
DIFFERENT = {   # label -> answers that say another number
    "72": ["71.9", "7.2", "-72", "0.72", "72.000000000000000000000000000001", "9" * 20000, "720", "½"],
    "7": ["-7", "−7", "70"], "0.72": ["72%", r"72\%"], "0.333": ["1/3", "0." + "3" * 20000], "1/3": ["0.333"],
    "0": ["0.0000001", "1e-400", "5"], "9007199254740993": ["9007199254740992"], "1000001": ["1000000"],
    "3": ["3 1/4", "3.0001"], "4": ["3/4"], "0.1": ["0.10000000000000001"], "1": ["1e400"]}
# no answer of one number, whatever piece of it the label is
UNREADABLE = [
    "5-7", "5–7", "5 to 7", "5 - 7", "between 5 and 7", "10 or 12", "either 10 or 12", "10, 12", "10; 12",
    "10 and 12", "10 (or 12)", "10, or 12", "10. Or 12.", "10 or maybe 12", "10 or twelve", "1 2 3", "72 73",
    r"\{10, 12\}", "[10, 12]", "(10, 12)", "(3,400)", "x = 10 or x = 12", "x = 10, y = 12", "72 (73)",
    "72. Wait, 73", "80 - 8", "8 * 9", "8 x 9", "8×9", r"8 \times 9", "8+9", "80 -", "72 +", "2^3", "10^3",
    "2**3", "5²", "5!", r"5 \cdot 3", "72 ÷ 2", "2(3)", "72(8)", "72 -5", r"\sqrt{4}", r"2\pi", "2π", "2x",
    "2 x", "3i", "80 plus 8", "5 squared", "2x = 144", "5 = x + 3", "x + 3 = 10", "x != 72", r"x \neq 72",
    "x ≠ 72", "x < 72", "> 72", "72 = 73", "-x = 5", "not = 72", "5:30", "5:30 pm", "12:05", "3:4", "nan",
    "inf", "-Infinity", "None", "null", "N/A", r"\infty", "true", "e", "zero", "0x48", "1_000", "0b1", "5e",
    "1e999999999", "1e-999999999", "5 hours 30 minutes", "5 hours and 30 minutes", "5 feet, 3 inches",
    "5'3\"", "5 and a half", "5 and one third", "3 dollars and 50 cents", "3 thirds", "5K", "2 million",
    "3 thousands", "3 point 5", "72 is not right", "not 72", "about 72", "~72", "≈72", r"\approx 72",
    "at least 72", "72 or more", "72+", "72?", "72...", "0.333…", "~~72~~", r"0.\overline{3}", "72 +/- 1",
    "72 ± 1", "Step 1: 72", "Step 2: check", "the answer is not 72", "12,34", "1,23", "0,5", "0,500",
    "1.234,56", "1,0000", "1,000,00", "1.2.3", "1/2/3", "3/0", r"\frac{72}{0}", "3 5/4", "+-7", "--7", "±7",
    ",", ".", "-", "$", "%", "/", "()", "", "-" * 50000, "9" * 20000 + "/3", "1," * 20000 + "x", "3 1/4 1/2",
    "72 per 8 boxes", "__import__('os').system('touch /tmp/grader_was_here')"]


def marked(answer):
    return [f"That is it.\n#### {answer}"] + ["So \\boxed{" + answer + "}, done."] * ("<" not in answer)


@pytest.mark.parametrize("label", EQUAL)
def test_equal_numbers(label):
    for answer in EQUAL[label]:
        for response in marked(answer):
            assert grade(response, label)[:2] == (1.0, RIGHT), response[:80]


@pytest.mark.parametrize("label", DIFFERENT)
def test_different_numbers(label):
    for answer in DIFFERENT[label]:
        for response in marked(answer):
            assert grade(response, label)[:2] == (0.0, WRONG), response[:80]


@pytest.mark.parametrize("answer", UNREADABLE, ids=lambda a: a[:20])
def test_pieces_of_an_answer_never_count(answer):
    pieces = {"0", "1", "72", *"".join(c if c in "0123456789." else " " for c in answer[:60]).split()} - {"."}
    pieces = [p for p in pieces if p.count(".") < 2 and p.strip(".")]
    for response in marked(answer):
        for label in pieces:
            assert grade(response, label)[:2] == (0.0, UNPARSED), (response[:80], label)


def test_values_never_go_through_float():
    digits = "1234567890" * 40
    assert grade(f"#### {digits}.5", f"{digits}.5").kind == RIGHT
    assert grade(f"#### {digits}.5", f"{digits}.6").kind == WRONG
    assert grade(f"#### {digits}1/3", f"{digits}2/3").kind == WRONG


# ------------------------------------------------------------------------------------------- extraction
@pytest.mark.parametrize("text, answer", [
    ("\\boxed{5} then \\boxed{45}", "45"), ("#### 10\nCorrected: #### 12", "12"),
    ("\\boxed{72} and #### 9", "72"), ("#### 9\n\\boxed{72}", "72"), ("use \\boxed{}.\n#### 72", "72"),
    ("\\boxed{72} in a \\boxed{ }", "72"), ("####\n72\n73", "72"), ("####\n\n  72  \n", "72"),
    ("#### 72 ####", None), ("##### 72", "72"), ("####72\r\nbye", "72"), ("**#### 72**", "72**"),
    ("####\n$$\n72\n$$", "72"), ("### 72", None), ("72", None), ("", None), ("####", None),
    ("#### \n \t", None), ("\\boxed{72", None), ("\\boxed{7} \\boxed{72", None), ("\\boxed{72 #### 9", None),
    ("in \\boxed{ put it: \\boxed{72}", "72"), ("\\boxed{\\boxed{7} + 2}", "\\boxed{7} + 2"),
    ("\\boxed {72}", "72"), ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"), ("\\boxed{a}}} b", "a"),
    ("{{ \\boxed{a}", "a"), ("\\\\boxed{72}", "72"), ("\\boxed{\\frac{1}{2}} x {", "\\frac{1}{2}"),
    ("\\boxed{615}\n\n**Final**\n\\boxed{615}", "615"), ("<think>\\boxed{10}</think> \\boxed{12}", "12"),
    ("<think>\\boxed{10}</think> so 12", "10"), ("<think>\\boxed{10}</think>\n#### 12", "12"),
    ("#### 12 <think>\\boxed{10}", "12"), ("<think>#### 10", "10"),
    ("guess \\boxed{10}</think> \\boxed{12}", "12"), ("guess \\boxed{10}</think> yes", "10"),
    ("guess \\boxed{10}</think>\n#### 12", "12"), ("<think>\\boxed{10}</think>\n####", None),
    ("<think>\\boxed{10}</think> \\boxed{12", None),
    ("<think>a<think>\\boxed{1}</think> b </think> #### 2", "2"),
    ("\\boxed{12} <think>\\boxed{10}</think>", "12"), ("<think>\n\n</think>\n\n#### 72", "72"),
    ("\\boxed{1}<think>x</think>\\boxed{2}<think>\\boxed{3}</think>", "2"),
    ("#### 72<|im_end|>\n<|im_start|>user\n5", "72"), ("#### <|im_end|>", None)])
def test_extract_answer(text, answer):
    assert extract_answer(text) == answer


@pytest.mark.parametrize("tail", ["\n" + "closing words, 9 of 12. " * 60,
                                  ". " + "closing words, 9 of 12. " * 60,
                                  " because " + "closing words 9 or 12 " * 60])
def test_tails_of_any_length(tail):
    assert grade("#### 42" + tail, "42").kind == RIGHT
    assert grade("so \\boxed{42}" + tail, "42").kind == RIGHT


def test_time_is_linear():
    n = 100_000
    texts = ["\\boxed{" * n + "72" + "}" * n, "#### " * n, "\\boxed{" + "{" * n + "}" * n + "}", "9" * n,
             "#### " + "9" * n]
    n = 40_000
    texts += ["\\boxed{" * n, "\\boxed{}" * n, "#" * n, "####\n" * n, "{" * 2 * n, "\\" * n + "boxed{5}",
              "\\boxed" + " " * n, "#### 72" + " " * n + "x", "</think>" * n + "#### 72",
              "<think></think>\\boxed{5" * n, "#### " + "1=" * n, "#### " + "1+" * n + "=$x",
              "#### " + "*" * n, "#### " + "*a " * n, "#### 1" + ",111" * n + "x", "#### " + "1." * n,
              "\\boxed{" + "\\frac" * n, "\\boxed{" + "\\frac{1}{" * n + "2" + "}" * n + "}",
              "#### " + "the " * n, "#### 72 " + "word " * n, "#### 72" + "/" * n, "#### " + "(" * n,
              "#### 72 " + "m^2" * n, "#### " + "½" * n, "#### x" + "_1" * n + "=5", "#### 1" + "e1" * n,
              "#### 1" + " million" * n, "#### 72" + "-a" * n, "#### " + "a:.-" * n + "=5",
              "#### 0." + "3" * n, "#### " + "- " * n + "1/2", "<|" * n, "\\text{" * n + "72"]
    for text in texts:
        started = time.process_time()
        grade(text, "72")
        assert time.process_time() - started < 1.2, text[:40]         # all take about 0.02 to 0.4 s


PIECES = ["\\boxed{", "}", "{", "####", " ", "\n", "\\frac{", "\\text{", "\\", "\\$", "$", "72", "1,800",
          "3 1/4", "-", "−", ".", ",", "/", "%", "=", "x", "or", "**", "<think>", "</think>", "<|im_end|>",
          "½", "²", "７", "\u200b", "\ud800", "\0", "(", ")", "e9", "^", "km", "\\circ", "nan", "9" * 700,
          "million", ":", "—", "|", "~", "\U0001f600", "\\left("]


def fuzz(count, seed):
    draw = random.Random(seed)
    for _ in range(count):
        verdict = grade("".join(draw.choices(PIECES, k=draw.randint(1, 40))), "72")
        assert verdict.kind in (RIGHT, WRONG, UNPARSED) and verdict.reward == float(verdict.kind == RIGHT)


def test_fuzz():
    fuzz(5_000, 1)


@pytest.mark.slow
def test_fuzz_long():
    fuzz(100_000, 2)


# ------------------------------------------------------------------------------------------- labels
NUMERIC_LABELS = [
    (72, "72", False), (72.0, "72", False), (-3, "-3", False), (0, "0", False), (0.1, "0.1", False),
    (Decimal("4.50"), "4.5", False), (1e22, "1" + "0" * 22, False), (10 ** 4500, "1" + "0" * 4500, False),
    (" 72 \n", "72", False), ("$1,800", "1800", False), ("31.00", "31", False), ("3 1/4", "13/4", False),
    (r"\frac{3}{4}", "3/4", False), ("72%", "72", False), ("1e3", "1000", False),
    ("8 boxes of 9\n8*9=<<8*9=72>>72\n#### 72", "72", True), ("#### -1,200", "-1200", True),
    ("so \\boxed{72}.", "72", True), (r"90^\circ", "90", False), ("100", "100", False), ("x = 5", "5", False),
    ("(7)", "7", False)]


def test_numeric_labels():
    for label, text, converted in NUMERIC_LABELS:
        assert read_label(label) == (text, converted)
        assert grade(f"#### {text}", label).kind == RIGHT and grade("#### 0.123", label).kind == WRONG


@pytest.mark.parametrize("label", [
    "", "  ", None, True, False, [72], {"a": 72}, "blue", "four", "None", "nan", "inf", float("nan"),
    float("inf"), "12 or 13", "5-7", "5:30", "80 - 8", "12,34", "3/0", "N/A", "####", "steps #### ",
    "steps #### four", "\\boxed{}", "\\boxed{72", r"\frac{", r"\frac{1}{}", r"\sqrt{2", r"\frac{\sqrt{3}}{2",
    "72 (8 of 9)", "72: total", "He had 4 apples and 3 pears.", "5 boxes were sold.",
    "48 friends bought some clips", "8*9=<<8*9=72>>72", "a\nb", "July 4", b"72"],
    ids=repr)
def test_refused_labels(label):
    with pytest.raises(ValueError, match=r"^data\.jsonl:3: label ") as error:
        read_label(label, "data.jsonl:3")
    assert "\n" not in str(error.value)
    verdict = grade("#### 72", label)
    assert verdict.kind == "error" and verdict.reward == 0.0 and verdict.detail


def test_read_text_takes_any_text():
    assert reward.read_text(" blue ") == (" blue ", False) and reward.read_text(7) == ("7", False)
    for label in ("", " ", None, [1]):
        with pytest.raises(ValueError, match="^row 3: label "):
            reward.read_text(label, "row 3")


# ------------------------------------------------------------------------------------------- formulas
@pytest.fixture(scope="module")
def grader():
    with Grader(workers=2, timeout_s=10.0) as grader:
        yield grader


FORMULAS = [
    (r"\frac{\sqrt{3}}{2}", r"\dfrac{\sqrt3}2", RIGHT), (r"\sqrt{2}", r"\frac{2}{\sqrt{2}}", RIGHT),
    ("(x+1)^2", "x^2+2x+1", RIGHT), (r"\sqrt{2}", "1.414214", WRONG), (r"2\pi", "6.283185307179586", WRONG),
    (r"2\pi", r"2\pi \text{ cm}", RIGHT), ("(1,2)", r"\left( 1, 2 \right)", RIGHT), ("(1,2)", "(2,1)", WRONG),
    ("[0,1)", "[0,1]", WRONG), ("6, 9", "9, 6", RIGHT), ("6, 9", "6", WRONG),
    (r"\text{Evelyn}", "Evelyn", RIGHT), (r"\text{Evelyn}", r"\text{Bob}", WRONG), ("2xy", "2yx", RIGHT),
    ("p - q", "q - p", WRONG), (r"\infty", r"-\infty", WRONG), (r"\sqrt{2}", "", UNPARSED),
    (r"\sqrt{2}", r"\foo", UNPARSED), (r"\sqrt{2}", "x" * 2000, UNPARSED),
    (r"\sqrt{2}", r"\text{__import__('os').system('touch /tmp/grader_was_here')}", WRONG),
    (r"\sqrt{2}", "__import__('os').system('touch /tmp/grader_was_here')", UNPARSED)]


def test_formulas(grader):
    pytest.importorskip("math_verify")
    verdicts = grader.grade(["\\boxed{" + said + "}" for _, said, _ in FORMULAS],
                            [label for label, *_ in FORMULAS])
    assert [v.kind for v in verdicts] == [kind for *_, kind in FORMULAS]
    assert not TOUCHED.exists()


def test_same_verdict_in_any_thread(grader):
    pytest.importorskip("math_verify")
    responses, labels = ["\\boxed{2/\\sqrt{2}}", "\\boxed{3}", "#### 72"], [r"\sqrt{2}", r"\sqrt{2}", "72"]
    here, there = list(map(grade, responses, labels)), []
    thread = threading.Thread(target=lambda: there.extend(map(grade, responses, labels)))
    thread.start()
    thread.join()
    assert here == there == grader.grade(responses, labels)
    assert [v.kind for v in here] == [RIGHT, WRONG, RIGHT]


def test_a_tower_costs_only_itself():
    pytest.importorskip("math_verify")
    labels = [r"\sqrt{2}"] * 8
    responses = [f"\\boxed{{{i + 4}/\\sqrt{{2}}-{i + 2}/\\sqrt{{2}}}}" for i in range(8)]
    with Grader(workers=2, timeout_s=2.5) as grader:
        grader.grade(responses, labels)                                     # starts the workers
        seconds = []
        for third, kind in ((responses[3], RIGHT), (TOWER, "timeout"), (responses[3], RIGHT)):
            started = time.perf_counter()
            verdicts = grader.grade(responses[:3] + [third] + responses[4:], labels)
            seconds.append(time.perf_counter() - started)
            assert [v.kind for v in verdicts] == [RIGHT] * 3 + [kind] + [RIGHT] * 4
            assert verdicts[3].reward == float(kind == RIGHT)
        assert seconds[1] < 60 and seconds[2] < 2 * seconds[0] + 1.0


def test_numbers_start_no_worker_and_import_nothing_heavy():
    code = ("import sys, reward; g = reward.Grader(); v = g.grade(['#### 72'] * 9, [72, '7'] * 4 + ['72']); "
            "print([x.kind for x in v].count('right'), any(w.process for w in g.workers), "
            "[m for m in ('torch', 'numpy', 'sympy', 'math_verify') if m in sys.modules])")
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                         check=True).stdout
    assert out.strip() == "5 False []"


# --------------------------------------------------------------------------------------- rewards of your own
OWN = '''
import os, subprocess, sys, time
import helper
def score(response, label, question):
    print("noise")
    if response == "raise": raise KeyError("no such thing")
    if response == "hang":
        while True: pass
    if response == "sleep": time.sleep(30)
    if response == "exit": sys.exit(3)
    if response == "die": os._exit(3)
    if response == "pid": time.sleep(0.05); return os.getpid()
    if response == "memory": return len(bytearray(3 << 30))
    if response == "child":
        open(question, "w").write(str(subprocess.Popen(["sleep", "60"]).pid))
        time.sleep(60)
    return {"nan": float("nan"), "inf": 1e999, "none": None, "text": "1", "half": 0.5, "minus": -1,
            "yes": True, "huge": 10 ** 400}.get(response, helper.same(response, label, question))
'''


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    (folder / "mine.py").write_text(OWN, encoding="utf-8")
    (folder / "helper.py").write_text("def same(r, a, q): return r == a + q\n", encoding="utf-8")
    return folder / "mine.py"


def test_own_reward(own):
    asked = ["blue?", "blue!", "half", "minus", "yes", "raise", "nan", "inf", "none", "text", "exit", "huge",
             "memory", "die",
             "hang", "sleep", "blue?"]
    with Grader(f"{own}:score", workers=3, timeout_s=1.0, memory_gib=1.0) as grader:
        verdicts = grader.grade(asked, ["blue"] * len(asked), ["?"] * len(asked))
        kinds = [RIGHT, WRONG, RIGHT, WRONG, RIGHT] + ["error"] * 9 + ["timeout"] * 2 + [RIGHT]
        assert [v.kind for v in verdicts] == kinds
        assert [v.reward for v in verdicts] == [1.0, 0.0, 0.5, -1.0, 1.0] + [0.0] * 11 + [1.0]
        details = [v.detail for v in verdicts]
        assert "KeyError" in details[5] and "nan" in details[6] and "SystemExit" in details[10]
        assert "Memory" in details[12] and "died" in details[13] and "1 s" in details[14]
        assert all(details[5:16])
        assert grader.grade(["child"], ["1"], [str(own.parent / "pid")])[0].kind == "timeout"
        state = Path("/proc", (own.parent / "pid").read_text(), "stat")     # gone, or at least a zombie
        assert not Path("/proc").exists() or not state.exists() or " Z " in state.read_text()
        pids = {v.reward for v in grader.grade(["pid"] * 12, ["1"] * 12)}
        assert len(pids) == 3
    with Grader(f"{own}:score", workers=3, concurrency=1) as grader:
        assert len({v.reward for v in grader.grade(["pid"] * 5, ["1"] * 5)}) == 1
    assert all(worker.process is None for worker in grader.workers)


def test_worker_processes_end(own):
    grader = Grader(f"{own}:score", workers=1)
    pid = grader.workers[0].process.pid
    grader.close()
    with pytest.raises(OSError):
        os.kill(pid, 0)


@pytest.mark.slow
def test_a_hanging_worker_does_not_outlive_its_parent(own):
    code = (f"import reward; g = reward.Grader('{own}:score', workers=1, timeout_s=1.0)\n"
            "print(g.workers[0].process.pid, flush=True)\n"
            "g.workers[0].settings = (0, 99, 0); g.grade(['hang'], ['1'])")
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    time.sleep(0.5)
    parent.kill()
    parent.wait()
    os.kill(pid, 0)
    for _ in range(100):
        time.sleep(0.1)
        if not Path(f"/proc/{pid}").exists() or " Z " in Path(f"/proc/{pid}/stat").read_text():
            return
    pytest.fail("the worker still runs")


@pytest.mark.parametrize("spec", ["nowhere.py:score", "{own}:missing", "{own}", "maths", "{broken}:score"])
def test_own_reward_that_cannot_be_loaded(own, spec):
    broken = own.parent / "broken.py"
    broken.write_text("def score(:", encoding="utf-8")
    with pytest.raises(ValueError) as error:
        Grader(spec.format(own=own, broken=broken))
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_grader_refuses_nonsense():
    for options in ({"workers": 0}, {"concurrency": 0}, {"timeout_s": 0}, {"memory_gib": -1}):
        with pytest.raises(ValueError, match="positive"):
            Grader(**options)
    with Grader() as grader, pytest.raises(ValueError, match="2 responses, 1 labels"):
        grader.grade(["a", "b"], ["1"])
    assert Grader().grade([], []) == []


# ------------------------------------------------------------------------------------------- command line
def run(*args, **options):
    return subprocess.run([sys.executable, "reward.py", *args], cwd=ROOT, capture_output=True,
                          encoding="utf-8", **options)


def test_command_line(tmp_path):
    rows = [{"id": "a", "response": "#### 72", "label": "72"},
            {"response": "#### 7\ud800", "label": "steps\n#### 72"},
            {"response": "no\u2028mark", "label": 72}, {"id": 3, "response": "#### 1", "label": ""},
            {"response": "#### 1"}]
    path = tmp_path / "rows.jsonl"
    path.write_text("\ufeff" + "".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    done = run(str(path))
    out = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0 and [r["verdict"] for r in out] == [RIGHT, UNPARSED, UNPARSED, "error",
                                                                    "error"]
    assert [r["reward"] for r in out] == [1.0, 0.0, 0.0, 0.0, 0.0] and [r.get("id") for r in out] == ["a",
                                                                                                      None,
                                                                                                      None, 3,
                                                                                                      None]
    assert set(out[1]) == {"reward", "verdict", "said", "detail"} and out[0]["said"] == "72"
    assert run("-", input=json.dumps(rows[0])).stdout == done.stdout.splitlines(True)[0]


def test_command_line_with_own_reward(own):
    done = run("-", "--reward", f"{own}:score", input='{"response": "half", "label": "blue"}\n')
    assert json.loads(done.stdout)["reward"] == 0.5 and "noise" in done.stderr


@pytest.mark.parametrize("args, says", [((), "JSONL"), (("nowhere.jsonl",), "nowhere.jsonl"), (("{bad}",),
                                                                                               "bad.jsonl:2"),
                                        (("{bad}", "--reward", "x.py:f"), "x.py:f")])
def test_command_line_mistakes(tmp_path, args, says):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"response": "#### 1", "label": 1}\n{"response": \n', encoding="utf-8")
    done = run(*(a.format(bad=bad) for a in args))
    assert done.returncode == 2 and says in done.stderr and len(done.stderr.strip().splitlines()) == 1
