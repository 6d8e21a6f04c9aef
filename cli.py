"""Command lines from typed dataclasses; a user's mistake is one line on stderr and exit status 2.

Every script's options are one dataclass with a comment per field: `cfg = cli.parse(Config, __doc__)`. What is
wrong before the expensive part starts is raised anywhere below as ValueError or OSError and reported by `with
cli.user_errors():`. NANORPP_TRACEBACK=1 shows the full traceback.
"""

import contextlib
import dataclasses
import difflib
import io
import itertools
import os
import sys

import tyro


def parse(config_class, doc, argv=None):
    """`config_class` filled from `argv` (default: sys.argv). Unknown or malformed options exit with status 2
    and one line that names the option and the nearest one that exists."""
    argv, captured = sys.argv[1:] if argv is None else list(argv), io.StringIO()
    try:
        with contextlib.redirect_stderr(captured):
            return tyro.cli(config_class, args=argv, description=doc,
                            config=(tyro.conf.FlagCreatePairsOff, tyro.conf.PositionalRequiredArgs))
    except SystemExit as stop:
        if not stop.code:
            raise
        lines = [line.strip("│─╰╯ ") for line in captured.getvalue().splitlines()[1:]]      # [0] is a frame
        message = " ".join(itertools.takewhile(bool, lines)) or "the command line could not be read"
        fail(f"{message}{_suggestion(config_class, argv)} (--help lists the options)")


def _suggestion(config_class, argv):
    """The nearest options that exist: by beginning, by initials (learning-rate: lr), by spelling."""
    known = [("no-" if f.default is True else "") + f.name.replace("_", "-")
             for f in dataclasses.fields(config_class)]
    near = []
    for word in (a[2:].split("=")[0].replace("_", "-") for a in argv if a.startswith("--")):
        if word and word not in ("help", *known):
            close = [k for k in known if k.startswith(word) or k == "".join(w[:1] for w in word.split("-"))]
            near += (close or difflib.get_close_matches(word, known, n=1))[:1]
    return f"; did you mean {', '.join('--' + k for k in near)}?" if near else ""


def fail(message):
    """One line on stderr (once per machine under torchrun), exit status 2."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"{os.path.basename(sys.argv[0]) or 'nanorpp'}: error:", *str(message).split(), file=sys.stderr,
              flush=True)
    raise SystemExit(2)


@contextlib.contextmanager
def user_errors():
    """Around set-up code: ValueError and OSError become one line and exit status 2."""
    try:
        yield
    except (ValueError, OSError) as error:
        if os.environ.get("NANORPP_TRACEBACK"):
            raise
        fail(error)
