r"""Rewards: find the answer that a response marks, compare it exactly, tell wrong from unreadable.

    python reward.py responses.jsonl      # rows {"response", "label"}, a verdict a line ('-': standard input)
    python reward.py responses.jsonl --reward mine.py:score

Marked is the last \boxed{...}, without a box what follows the last '####' (docs/algorithms.md, "Rewards"). A
number is compared exactly, here; a formula (MATH) by math-verify, in worker processes with limits of time and
memory. Text of a model is never evaluated. It must say one value: '5-7', '10 or 12', '5:30', '80 - 8', 'about
72', '72!', '> 72', '2 million' are "unparsed". Units are not converted: 72% is 72, not 0.72. A reward of your
own, function(response, label, question) (texts) -> number or bool, runs there too and prints on stderr."""

import contextlib
import dataclasses
import json
import logging
import math
import os
import queue
import re
import resource
import runpy
import signal
import subprocess
import sys
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from multiprocessing.connection import Connection, Pipe
from typing import NamedTuple

SAID, FORMULA, DIGITS = 200, 1000, 600      # longest answer reported, given to math-verify, read as fraction
START_S = 120                               # a worker that is not ready by then has failed

# --------------------------------------------------------------------------------------- the marked answer
_TURN = re.compile(r"<\|(?:im_start|im_end|endoftext|end_of_text|eot_id)\|>|<end_of_turn>|</s>")
_BRACE = re.compile(r"\\boxed\s*\{|\\(?!\\boxed).|[{}]", re.DOTALL)         # an escaped brace is no brace
_BLANK, _INK = re.compile(r"\s*\}"), re.compile(r"[^\s*_:`$\\()\[\]]")


def extract_answer(text):
    """The marked answer; None without a mark or if the last box is not closed. Linear time. Text in
    <think>...</think> counts only when nothing else is marked; a lone </think> ends what the prompt began."""
    outside, inside, thinking = [], [], False
    pieces = ["</think>", *re.split(r"(</?think>)", _TURN.sub("\n", text))]
    for tag, piece in zip(pieces[::2], pieces[1::2]):
        if tag == "</think>" and not thinking:
            inside += outside
            outside = []
        thinking = tag == "<think>"
        (inside if thinking else outside).append(piece)
    tries = (find("\n".join(part)) for part in (outside, inside) for find in (_last_box, _after_hashes))
    return next((answer for marked, answer in tries if marked), None)


def _last_box(text):
    """(is there a box?, the content of the last, None if unclosed). An empty box, an echoed instruction, is
    none; of nested boxes the outermost counts, since it closes last."""
    opened, last = [], None                                     # (start of the content, is it a box's?)
    for brace in _BRACE.finditer(text):
        if brace[0] == "}":
            start, is_box = opened.pop() if opened else (0, False)
            last = (start, brace.start()) if is_box and not _BLANK.match(text, start) else last
        elif brace[0][-1] == "{" and brace[0] != "\\{":
            opened.append((brace.end(), brace[0] != "{"))
    unclosed = any(is_box and (not last or start > last[0]) for start, is_box in opened)
    return bool(last) or unclosed, text[slice(*last)].strip() if last and not unclosed else None


def _after_hashes(text):
    """(is there a '####'?, the rest of its line, else the next line with something on it, else None)."""
    _, mark, rest = text.rpartition("####")
    return bool(mark), next((line.strip() for line in rest.split("\n") if mark and _INK.search(line)), None)


# ------------------------------------------------------------------------------------exact numbers, labels
_WRAP = re.compile(r"\\(?:(?:text|math)[a-z]*|boxed|boldsymbol|bm|mbox|emph|underline|operatorname|left|"
                   r"right|displaystyle|q?quad|pounds|euro)(?![a-z])|\\[\\()\[\]$,;: ]|[$`]|(?<=[\w%])~|\*\*")
_FRAC = re.compile(r"\\[dtc]?frac\s*(?:\{([^{}]*)\}|([0-9]))\s*(?:\{([^{}]*)\}|([0-9]))")
_LEAD = re.compile(r"(?:(?:the|final|correct|so|thus|therefore|total|answer|result|value|is|are|equals|usd|"
                   r"eur|gbp|inr|us|rs)\b\.?\s*)*[:=]?\s*", re.I)
_INT = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)"
_DEC = rf"(?:{_INT}(?:\.[0-9]+)?|\.[0-9]+)"
_NUMBER = re.compile(                                           # 3 1/4, 3/4, 1,800.50, 1e3, 1.8 x 10^3
    rf"([+-]|(?:minus|negative)\b)?\s*(?:(?:({_INT})\s)?({_DEC})\s?/\s?(-?{_DEC})|({_DEC})(?:(?:e|\s?"
    rf"(?:[x×·*]|\\times|\\cdot)\s?10\s?\^\s?)([+-]?[0-9]{{1,4}})(?![0-9]))?)", re.I)
# Next come units with exponents, then perhaps a comment, from _CUT on. A digit among the units is a second
# number; after a _BAD word there (a variable, 'or', 'half') or a _HEDGE the number is a part of what is said.
_UNIT = re.compile(r"(?:(?<!\s)-|\s?[/·]\s?)?[^\W\d_]+\.?(?:(?:\^\(?-?[0-9]\)?|[23])(?![0-9A-Za-z]))?")
_CUT = re.compile(r"[.;:。](?=\s|$)|,(?=\s*[^\W\d_]|\s*$)|(?<=[^\W\d_])!|\s[(\[]|—|"
                  r"\b(?:because|since|which|that|this|as|where)\b|\Z", re.I)
_BAD = re.compile(r"(?<![^\W\d_])(?:(?!a [^\W\d_])(?![mglshdLWVJNCFUS])[A-Za-z\u0391-\u03c9]|(?i:or|not|"
                  r"never|pi|xy|sin|cos|tan|log|ln|squared|cubed|times|plus|minus|point|half|halves|thirds|"
                  r"(?:four|fif|six|eigh|ten)ths|(?:hundred|thousand|(?:m|b|tr)illion)s?|"
                  r"and (?:an?|one|two|three)))(?![^\W\d_])")
_HEDGE = re.compile(r"[\s.,;:。!—(\[]*(?:(?:or|maybe|perhaps|possibly|alternatively|either|wait|[b-hj-z])"
                    r"(?![^\W\d_])|and\s+\S*[0-9])|[\s.,;:。!—]*[0-9]|\s*[(\[][\s0-9.,/%+-]*[)\]]\W*$", re.I)


@lru_cache(maxsize=4096)
def _ascii(char):
    """A character in this file's notation: digits of any script, ½, ², dashes, currency, full width."""
    plain = unicodedata.normalize("NFKC", char).replace("\u2044", "/")
    kind = {"<frac": " ", "<supe": "^", "<wide": ""}.get(unicodedata.decomposition(char)[:5])
    return {"Pd": char if char in "—―" else "-", "Sc": " ", "Cf": "", "Zs": "\\,",
            "Nd": str(unicodedata.digit(char, ""))}.get(
        "Pd" if char == "−" else unicodedata.category(char), char if kind is None else kind + plain)


def _one(text):
    """Decimal or Fraction if `text`, without LaTeX, says one number, perhaps with units and a comment."""
    text = re.sub(r"\A[(\[]([^()\[\],]*)[)\]]\.?\Z", r"\1", text.strip(" *_#\"'“”‘’•")).strip()
    found = _NUMBER.match(text, _LEAD.match(text).end())
    if not found:
        return None
    tail = text[found.end():]
    cut = _CUT.search(tail).start()
    if _UNIT.sub("", tail[:cut]).strip(" %°'\"’′″") or _BAD.search(tail[:cut]) or _HEDGE.match(tail[cut:]):
        return None
    sign, whole, over, under, decimal, power = ((g or "").replace(",", "") for g in found.groups())
    minus = sign not in ("", "+")
    if decimal:                                                 # exact at any length, which int() refuses
        return Decimal(f"{'-' * minus}{decimal}e{power or 0}")
    if len(found[0]) > DIGITS or not Fraction(under):
        return None
    part = Fraction(over) / Fraction(under)
    return None if whole and not 0 < part < 1 else (int(whole or 0) + part) * (-1) ** minus


def _number(text):
    """The one number that `text` says, or None. Of an equation the sides that are numbers must agree; a name
    ('x', 'f(2)') or a calculation without variables ('8 boxes * 9') may stand beside them."""
    text = re.sub(r"[^\x00-\x7f]", lambda m: _ascii(m[0]), text).replace("\\!", "").replace("\\%", "%")
    text = re.sub(r"(?<=[0-9])\\[,;: ](?=[0-9]{3}(?![0-9]))", ",", text)    # 1\,800
    text = re.sub(r"\^?\s?\{?(?:°|\\(?:circ|degree)(?![a-z]))\}?", "°", text)
    text = _FRAC.sub(lambda m: f" {m[1] or m[2] or ''}/{m[3] or m[4] or ''} ", _WRAP.sub(" ", text))
    text = " ".join(text.replace("{", "").replace("}", "").split())         # unknown commands keep their \
    value, values = _one(text), []
    for side in text.split("=") if value is None else ():
        bare = re.sub(r"\\[A-Za-z]+|_\w+|\([^()]*\)|(?<=[0-9 ])x(?= ?[0-9])", "*", side)
        if (number := _one(side)) is not None:
            values.append(number)
        elif re.search(r"[<>!?≠≈~;|]|^ ?-\D|\b(?:or|not)\b", side) or re.search(r"[0-9]", bare) and (
                re.search(r"(?<![^\W\d_])[A-Za-z](?![^\W\d_])", bare) or not re.search(r"[-+*/×÷·^]", bare)):
            return None
    return values[0] if values and all(v == values[0] for v in values) else value


def read_label(label, where=""):
    r"""(canonical text of `label`, was it cut out of a rationale '... #### 72' or '... \boxed{72}'?). It is a
    number (72, 72.0, '$1,800' -> '1800', '3 1/4' -> '13/4', '72%' -> '72') or a formula for math-verify
    (LaTeX, an expression, an interval, 1, 2). ValueError, one line that begins with `where`: words (see
    read_text), sentences, ranges, times, bool, list, an empty label."""
    try:
        if isinstance(label, bool) or not isinstance(label, (str, int, float, Decimal)):
            raise ValueError("is null" if label is None else f"is a {type(label).__name__}")
        text = label.strip() if isinstance(label, str) else format(
            Decimal(label if isinstance(label, int) else str(label)), "f")
        if "####" in text:
            return _label(text.rpartition("####")[2].strip())[0], True
        boxed = "\\boxed" in text
        return _label(extract_answer(text) or "" if boxed else text)[0], boxed
    except ValueError as error:
        raise ValueError(f"{where}{where and ': '}label {label!r:.80} {error}") from None


def read_text(label, where=""):
    """read_label for rewards of your own: any number or text that is not empty, as text, unchanged."""
    if isinstance(label, (str, int, float, Decimal)) and str(label).strip():
        return str(label), False
    raise ValueError(f"{where}{where and ': '}label {label!r:.80} is empty or no text")


def label_reader(spec):
    """read_label for the built-in grading, read_text for a reward of your own."""
    return read_label if spec == "math" else read_text


@lru_cache(maxsize=65536)
def _label(text):
    """(canonical text, its number or None for a formula). A label has no comment: at most four words."""
    sentence = len(text.split()) > 4 or re.search(r"[^\W\d_]{2}\.$|[\n:;]| \(", text)
    if not sentence and (value := _number(text)) is not None:
        shown = str(value) if isinstance(value, Fraction) else format(value, "f")
        return (shown.rstrip("0").rstrip(".") if "." in shown else shown) if value else "0", value
    bare = re.sub(r"\\(?:text|mathrm|begin|end)\s*\{[^{}]*\}|\\[A-Za-z]+|sqrt|sin|cos|tan|log", " ", text)
    if (len(text) > FORMULA
            or re.search(r"[^\W\d_]{3}|\b(?:or|of|to|is|at|in|am|pm|no|on|by|kg|km|cm|mm|N/A)\b|<<|\n", bare)
            or not re.search(r"\\[A-Za-z]|[\^_+*/=<>(\[|]|[0-9-][A-Za-z]|[A-Za-z] -|, |^[A-Za-z]$", text)
            or not re.search(", |,-", text) and re.fullmatch(r"[0-9+-][0-9\s.,:/+\-–%*x]*", text)):
        raise ValueError("is neither one number nor a formula" if text else "is empty")
    if not (reply := _SHARED.ask(text, text, "")).get("value"):
        raise ValueError(f"is no formula that can be read ({reply.get('error', 'math-verify')})")
    return text, None


# ----------------------------------------------------------------------------------------------- verdicts
class Verdict(NamedTuple):
    reward: float
    kind: str               # right | wrong | unparsed | error | timeout; the last two judge no response
    said: str | None        # the marked answer, shortened
    detail: str | None = None


class Grader(contextlib.AbstractContextManager):
    """Grades batches, `concurrency` responses at a time. Formulas and rewards of your own (`spec`; ValueError
    if it cannot be loaded) go to `workers` processes, each for `timeout_s`, with `memory_gib` above what it
    has after loading. One that hangs or dies is replaced; only its response is "timeout" or "error"."""
    def __init__(self, spec="math", workers=4, concurrency=16, timeout_s=5.0, memory_gib=4.0):
        if min(workers, concurrency) < 1 or not min(timeout_s, memory_gib) > 0:
            raise ValueError("workers, concurrency, timeout_s and memory_gib must be positive")
        self.spec, self.concurrency = spec, concurrency
        self.workers = [_Worker(spec, timeout_s, memory_gib) for _ in range(workers)]
        self.idle = queue.LifoQueue()                           # a warm worker before a new one
        for worker in self.workers:
            self.idle.put(worker)
        if spec != "math" and (error := worker.start()):        # a missing file or function shows now
            raise ValueError(error)

    def close(self, *_):
        for worker in self.workers:
            worker.stop()
    __exit__ = close

    def ask(self, *job):
        worker = self.idle.get()
        try:
            return worker.ask(job)
        finally:
            self.idle.put(worker)

    def grade(self, responses, labels, questions=None):
        """Verdicts of `responses` against `labels` in order; `questions` are for a reward of your own."""
        questions = [""] * len(responses) if questions is None else questions
        if not len(responses) == len(labels) == len(questions):
            raise ValueError(f"{len(responses)} responses, {len(labels)} labels, {len(questions)} questions")
        with ThreadPoolExecutor(self.concurrency) as threads:
            return list(threads.map(self.verdict, responses, labels, questions))

    def verdict(self, response, label, question=""):
        """Verdict of one response. It never raises: a label that is no label gives "error", never "wrong"."""
        said = extract_answer(response) if isinstance(response, str) else None
        reply = (self._compare(response, said, label) if self.spec == "math" else
                 self.ask(response, str(label), question))
        value = reply.get("value")
        kind = "unparsed" if value is None else "right" if value > 0 else "wrong"
        return Verdict(float(value or 0), reply.get("kind", "error") if "error" in reply else kind,
                       said and said[:SAID], reply.get("error"))

    def _compare(self, response, said, label):
        """A reply as of a worker; one is asked only about a formula that `said` does not repeat literally."""
        try:
            text, gold = _label(read_label(label)[0])
        except ValueError as error:
            return {"error": str(error)}
        if said is None:
            return {"kind": "unparsed" if isinstance(response, str) else "error", "error": "no marked answer"}
        number = None if gold is None else _number(said)
        if number is not None or "".join(said.split()) == "".join(text.split()):
            return {"value": number == gold}
        if gold is not None or len(said) > FORMULA:
            return dict(kind="unparsed", error="too long for a formula" if gold is None else "not one number")
        return self.ask(said, text, "")


# ------------------------------------------------------------------------------------------------ workers
class _Worker:
    """This file as a child process; JSON to and fro. The limit is a kill from outside, which ends any loop in
    any code; the parent needs no signal handler and no fork, so that each of its threads may ask."""
    def __init__(self, *settings):
        self.settings, self.process = settings, None            # spec, timeout_s, memory_gib

    def start(self):                                            # returns what went wrong
        self.pipe, theirs = Pipe()
        with theirs:
            command = [sys.executable, os.path.abspath(__file__), "--worker", theirs.fileno(), *self.settings]
            self.process = subprocess.Popen([*map(str, command)], pass_fds=[theirs.fileno()], stdout=2,
                                            stdin=subprocess.DEVNULL, start_new_session=True)
        if error := self._reply(START_S).get("error"):
            self.stop()
            return f"reward {self.settings[0]!r}: {error}"

    def stop(self):
        if self.process:
            with contextlib.suppress(OSError), self.process, self.pipe:         # wait for it, close the pipe
                os.killpg(self.process.pid, signal.SIGKILL)     # with the children of a user's function
            self.process = None

    def ask(self, job):
        """{"value"} or {"error"}, with "kind" when the worker hung or died; then it is replaced at once."""
        if not self.process and (error := self.start()):
            return {"error": error}
        with contextlib.suppress(OSError):
            self.pipe.send_bytes(json.dumps(job).encode())
        reply = self._reply(self.settings[1])
        if "kind" in reply:
            self.stop()
            self.start()
        return reply

    def _reply(self, seconds):
        with contextlib.suppress(EOFError, OSError):
            return (json.loads(self.pipe.recv_bytes()) if self.pipe.poll(seconds) else
                    {"kind": "timeout", "error": f"no verdict within {seconds:g} s"})
        return {"kind": "error", "error": "the worker died"}


_SHARED = Grader(workers=1)             # for labels, too; its process starts with the first formula
grade = _SHARED.verdict                 # grade(response, label) -> Verdict


def _serve(fd, spec, timeout_s, memory_gib):
    """The worker's side; its first reply says that it is ready. An alarm ends it when the parent is gone."""
    def attempt(seconds, function, *args):
        signal.alarm(math.ceil(seconds))
        try:
            return {"value": function(*args)}
        except BaseException as error:                          # sys.exit() in a user's function is an error
            return {"error": f"{type(error).__name__}: {error}"[:300]}
        finally:
            signal.alarm(0)
    pipe = Connection(int(fd))
    reply = attempt(START_S, _math_function if spec == "math" else _own_function, spec)
    function = reply.pop("value", None)
    with contextlib.suppress(OSError, ValueError), open("/proc/self/statm") as pages:       # where it exists
        limit = int(pages.read().split()[0]) * resource.getpagesize() + int(float(memory_gib) * 2 ** 30)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with contextlib.suppress(EOFError):
        while True:
            pipe.send_bytes(json.dumps(reply).encode())
            reply = attempt(float(timeout_s) + 5, function, *json.loads(pipe.recv_bytes()))


def _own_function(spec):
    path, name = spec.rsplit(":", 1)
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    function = runpy.run_path(path)[name]
    def reward(*job):
        value = function(*job)
        if not hasattr(value, "__float__") or not math.isfinite(value):
            raise ValueError(f"{name} returned {value!r:.80}, not a finite number")
        return float(value)
    return reward


def _math_function(_spec):
    from math_verify import LatexExtractionConfig, parse, verify
    from sympy.parsing import sympy_parser
    logging.disable(logging.CRITICAL)
    config, evaluate = [LatexExtractionConfig(boxed_match_priority=0)], sympy_parser.eval_expr
    def guarded(code, *scope):                                  # the only way from text to eval()
        if not re.fullmatch(r"(?:Symbol|Integer|Float) \('?[\w.]+'? \)|\w ", code):
            raise ValueError("text is not evaluated")
        return evaluate(code, *scope)
    sympy_parser.eval_expr = guarded
    def reward(said, label, _question):
        gold, value = (parse(f"\\boxed{{{text}}}", config, "no_fallback", parsing_timeout=None)
                       for text in (label, said))
        return verify(gold, value, float_rounding=30, numeric_precision=30, timeout_seconds=None,
                      raise_on_error=True) if value else None
    reward("(x+1)^2", "x^2+2x+1", "")                           # what loads lazily is not on an answer's time
    return reward


@dataclasses.dataclass
class Config:
    file: str               # JSONL, rows {"response", "label"}, perhaps "id", "question"; '-': standard input
    reward: str = "math"    # 'math', or file.py:function
    timeout_s: float = 5.0  # seconds for one formula or call


def main(cfg):
    with open(0 if cfg.file == "-" else cfg.file, "rb") as lines, Grader(
            cfg.reward, workers=1, timeout_s=cfg.timeout_s) as grader:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line.decode("utf-8-sig"))
                job = row.get("response"), row.get("label"), row.get("question", "")
            except (ValueError, AttributeError) as error:
                raise ValueError(f"{cfg.file}:{number}: no JSON object ({error})") from None
            verdict = dict(zip(("reward", "verdict", "said", "detail"), grader.verdict(*job)))
            print(json.dumps({k: row[k] for k in ("id",) if k in row} | verdict, allow_nan=False), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        _serve(*sys.argv[2:])
    else:
        import cli
        with cli.user_errors():
            main(cli.parse(Config, __doc__))
