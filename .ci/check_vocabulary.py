#!/usr/bin/env python3
"""Checks comments, doc comments, strings and documents for phrases that are not standard technical English.

Usage: check_vocabulary.py [--count] [FILE...]      without FILE: all files that git tracks

Prints `file:line: phrase -> replacement` for each match; exits with 1 if there is one, with 2 if the check cannot run.
`--count` prints the number of matches of each file instead.

The check covers comments and strings of Rust, C, CUDA, Python and shell code, and all of Markdown, JSON schemas and
text cells of notebooks. Identifiers, code spans, link targets, fixtures, golden files and raw measurements are excluded.
"""

import fnmatch
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

# (phrase, what to write instead, an example that must match). A space in a phrase matches a line break, too.
RULES = [
    (r"told|untold", "reports, prints, records, contains, is known; missing, unknown", "the unit is told"),
    (r"tells?|telling", "reports, prints, records, shows; distinguish", "it tells the size"),
    (r"beside", "next to, alongside, in addition to, compared with", "beside the other"),
    (r"behind (?:it|them|that one|each|every|the (?:last|one|kernels?|others?|header|copy|transfers?))", "after",
     "behind the header"),
    (r"anew|once more", "again, re-...", "writes it anew"),
    (r"(?:is|are|was|as|be) (?-i:none)\b(?! of)|is no number|no number from",
     "is missing, is unset, does not exist, is not a number", "where there is none"),
    (r"nobody|somebody", "nothing, no reader, a user, ...", "nobody reads it"),
    (r"(?-i:[Bb]egins?)|began|beginning with", "start, starts, started", "the run begins"),
    (r"mend(?:ed|s|ing)?", "fix", "mended"),
    (r"pictures?", "plot, chart, figure, screenshot", "draws a picture"),
    (r"remark(?:s|ed)?", "warning, note", "with a remark"),
    (r"travel(?:s|led|ed|ling|ing)?", "is copied, is transferred; H2D copy, D2H copy, in-flight copy", "what travels"),
    (r"the processor(?:s|'s)?", "the CPU", "on the processor"),
    (r"the host's (?:side|part)|on the host's", "the CPU", "the host's side"),
    (r"the link's|(?:of|through|over|on|what) the link", "PCIe, the interconnect", "speed of the link"),
    (r"(?:a|the|of|no|its|their|all|these|first|router|token's|same|other|million|whose|generated|counted|many) choices?"
     r"|choices (?:of|for|in|per|by|that|are|and)", "routing decision(s), selected experts, activations",
     "choices of the router"),
    (r"chose(?:n)? experts?|experts? chosen|experts? that \w+ chose|chosen by", "selected experts", "the chosen experts"),
    (r"even router", "uniform router", "an even router"),
    (r"share of (?:the )?hits", "hit rate", "expected share of hits"),
    (r"learned on|tested on the other", "training split, held-out split", "learned on one half"),
    (r"settle[sd]?|settling", "converges, converged", "the set settles"),
    (r"it holds|it does not hold|holds in part|whether (?:that|it) holds", "generalizes, does not generalize", "it holds in part"),
    (r"memory is full", "memory bandwidth is saturated", "the memory is full"),
    (r"moments?", "event, timestamp, time", "at this moment"),
    (r"errands?", "callback, closure", "an errand"),
    (r"lanes? (?:is|are|was) late|comes? too late", "missed (not ready in time)", "comes too late"),
    (r"so (?:much|many)", "N MiB, at most N, that number of", "so many bytes"),
    (r"a whole (?:number|file|run|pass|record)|whole numbers?|as a whole|whole (?:files|records|passes|runs|row groups)",
     "complete, integer, entire", "a whole number"),
    (r"(?:is|are|was|were|be|been) cut(?! (?:into|out|by))", "is truncated", "the file is cut"),
    (r"gives", "returns, yields, produces, specifies", "the function gives"),
    (r"looks? up whether|looks? that|looks? whether", "checks", "a test looks that"),
    (r"made-up", "synthetic", "a made-up model"),
    (r"leaves? (?:it |them |this |these |that )?out|left out|leaving (?:it |them )?out|leave the option out", "omit, skip, drop",
     "the rest is left out"),
    (r"alike", "like, the same as, the same way", "read and count alike"),
    (r"held against|held to llama", "compared with, checked against", "held against 40 answers"),
    (r"(?:learn|test|hold)s? nothing of|knows? nothing of", "is independent of, has no dependency on", "knows nothing of it"),
    (r"cannot be told|is not told|are not told|be told apart", "cannot be determined, is not recorded, distinguish",
     "cannot be told"),
    (r"who(?:m)?ever|wherein|whence|lest|thereof|hereof", "plain words", "whoever reads"),
    (r"strangers?", "unknown entries, other threads, ...", "a stranger"),
    (r"arriv(?:e|es|ed|al)|lands|landed", "is copied, is ready, is received", "the copy arrives"),
    (r"(?:two|three|five|ten|\d+) times so|fold of", "N times", "two times so"),
    (r"processor time", "CPU time", "minutes of processor time"),
    (r"goes on with|go on with", "continues with", "goes on with the next"),
    (r"comes by itself|by itself comes", "is fetched individually", "comes by itself"),
    # Not at the start of a comment: there it is a noun phrase, such as "What the parser reports."
    (r"(?:(?<=[.;!-]\s)|(?<=\|\s))What (?:is|are|was|the|an?|does not|cannot|did|it|they|has|runs|can)\b(?![^.;|\0]*\?)",
     "start the sentence with a noun", "- What is late stays on the CPU."),
    (r"worth having|what (?:that|it) is worth", "pays off, the benefit", "is not worth having"),
]

# (files, regular expression, reason): a match that lies inside a match of this expression is allowed.
ALLOW = [
    ("*", r"at your choice", "idiom of licenses"),
    ("*", r"multiple choice", "term of benchmarks"),
    ("*", r"if there (?:is|are) none", "idiomatic after the noun that it refers to"),
    ("*", r"gives (?:them|it|each|the thread) ", "gives somebody something"),
    ("crates/moe-foreign/src/importers/responses*", r"(?:\w+ )?choices?(?: \w+)?", "`choices` of OpenAI-compatible responses"),
    ("crates/moe-server/*", r"(?:\w+ )?choices?(?: \w+)?", "`choices` of OpenAI's API"),
    ("crates/moe-foreign/tests/it/binary/*", r"choices(?: \w+)?", "`choices` of OpenAI-compatible responses"),
    ("crates/moe-analysis/src/survey/order.rs", r"First choice", "quotation from the Mixtral paper"),
    ("crates/moe-synth/*", r"moments", "statistical moments"),
]

EXCLUDED = [
    "crates/moe-engine/tests/fixtures/*",
    "fixtures/*.json*", "fixtures/foreign/*", "fixtures/prompts/*", "fixtures/reference/*", "fixtures/quants/*",
    "fixtures/simulate/*.csv", "fixtures/server-dumps/*", "fixtures/reliability/*", "tests/golden/*", "docs/measurements/*.txt",
    "*.lock", "LICENSE-*", ".ci/check_vocabulary.py",
]

C_LIKE = re.compile(
    r"""(?P<comment>//[^\n]*|/\*.*?\*/)
      | (?P<raw>\bb?c?r(?P<hash>\#*)".*?"(?P=hash))
      | (?P<string>b?c?"(?:\\.|[^"\\])*")
      | (?P<char>b?'(?:\\(?:x..|u\{[^}]*\}|.)|[^'\\\n])')""",
    re.VERBOSE | re.DOTALL,
)
PYTHON = re.compile(
    r'''(?P<comment>\#[^\n]*)|(?P<raw>[rbfu]*(?P<hash>"""|\'\'\').*?(?P=hash))|(?P<string>[rbfu]*"(?:\\.|[^"\\\n])*"|[rbfu]*'(?:\\.|[^'\\\n])*')''',
    re.DOTALL,
)
CODE_SPAN = re.compile(r"`+[^`\n]+`+")
LINK_TARGET = re.compile(r"\]\([^)\s]*\)|<?https?://[^\s)>]+>?")
PLACEHOLDER = re.compile(r"\{[\w.:#?>$*]*\}|(?<![\w-])--?[a-z][\w-]*|[\w.-]*/[\w./-]+|\b\w+_\w+\b|\b\w+(?:\.|::)\w+\b")
COMMENT_MARK = re.compile(r"^[ \t]*(?:///|//!|//|\#!?|\*(?!\*)|>)", re.MULTILINE)


def blank(match):
    """Spaces in place of the match, line breaks kept."""
    return re.sub(r"[^\n]", " ", match.group())


def erase(match):
    """Characters that no phrase can span, line breaks kept."""
    return re.sub(r"[^\n]", "\0", match.group())


def pieces_of_code(pattern, text):
    """Comments and strings at their places; everything else is replaced by characters that match nothing."""
    out, at = [], 0
    for match in pattern.finditer(text):
        between = text[at : match.start()]
        only_space = not between.strip() and match.lastgroup != "string"
        out.append(between if only_space else re.sub(r"[^\n]", "\0", between))
        piece = match.group()
        is_string = match.group("comment") is None
        if match.groupdict().get("char") or (is_string and not re.search(r"\s", piece.strip("\"'"))):
            piece = re.sub(r"[^\n]", "\0", piece)  # one word: a name, not prose
        elif is_string:
            piece = piece.replace("\\n", " \0").replace("\\\n", " \n")
            piece = re.sub(r'^[rbfu]*#*["\']+|["\']+#*$', erase, piece)
        out.append(piece)
        at = match.end()
    out.append(re.sub(r"[^\n]", "\0", text[at:]))
    return "".join(out)


def prose_of_notebook(text):
    """Lines of Markdown cells, and comments and strings of code cells; a line of the JSON is a line of a cell."""
    lines, cell, in_source = [], None, False
    for line in text.split("\n"):
        if kind := re.match(r'\s*"cell_type": "(\w+)"', line):
            cell = kind.group(1)
        if re.match(r'\s*"\w[\w/+.-]*": ', line):
            in_source = re.match(r'\s*"source": \[', line) is not None
            lines.append(erase(re.match(".*", line)))
            continue
        source = line.replace("\\n", "  ") if in_source else erase(re.match(".*", line))
        if in_source and cell == "code":
            quoted = re.match(r'(\s*")(.*?)(\s*",?\s*)$', source)
            inner = pieces_of_code(PYTHON, quoted.group(2).replace('\\"', "'\0")) if quoted else ""
            source = " " * len(quoted.group(1)) + inner if quoted else erase(re.match(".*", source))
        lines.append(source)
    return "\n".join(lines)


def prose(path, text):
    """The text of the file with everything that is not prose blanked; offsets and lines are those of the file."""
    if path.suffix in (".rs", ".c", ".h", ".cu", ".cuh", ".cpp"):
        text = COMMENT_MARK.sub(blank, pieces_of_code(C_LIKE, text))
    elif path.suffix == ".py":
        text = COMMENT_MARK.sub(blank, pieces_of_code(PYTHON, text))
    elif path.suffix == ".ipynb":
        text = prose_of_notebook(text)
    elif path.suffix not in (".md", ".json", ".toml"):
        text = COMMENT_MARK.sub(blank, text)
    for pattern in (CODE_SPAN, LINK_TARGET, PLACEHOLDER):
        text = pattern.sub(erase, text)
    return text


def compact(text):
    """The text without its lines of code, and the line number in the file of each line that is left."""
    kept, numbers = [], []
    for number, line in enumerate(text.split("\n"), 1):
        line = re.sub("\0+", "\0", line)
        if line.strip() != "\0" or (kept and kept[-1] != "\0"):
            kept.append(line)
            numbers.append(number)
    return "\n".join(kept), numbers


def compile_rules():
    rules = []
    for phrase, instead, example in RULES:
        pattern = re.compile(r"(?<![\w-])(?:" + phrase.replace(" ", r"\s+") + r")(?![\w-])", re.IGNORECASE)
        if not pattern.search(example):
            cannot_run(f"the rule {phrase!r} does not match its example {example!r}")
        rules.append((pattern, instead))
    return rules


def cannot_run(reason):
    print(f"vocabulary: NOT CHECKED: {reason}", file=sys.stderr)
    sys.exit(2)


def tracked_files():
    try:
        listing = subprocess.run(["git", "ls-files", "-z"], capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        cannot_run(f"git ls-files failed ({error}); name the files as arguments")
    return listing.decode().split("\0")[:-1]


def is_checked(name):
    suffixes = (".rs", ".c", ".h", ".cu", ".cuh", ".py", ".sh", ".md", ".json", ".toml", ".ipynb")
    known = name.endswith(suffixes) or name == ".ci/run"
    return known and not any(fnmatch.fnmatch(name, pattern) for pattern in EXCLUDED)


def is_allowed(name, text, match):
    """Whether the match lies inside a match of the allow-list."""
    start = max(0, match.start() - 60)
    context = text[start : match.end() + 60]
    for files, allowed, _reason in ALLOW:
        if fnmatch.fnmatch(name, files):
            spans = re.finditer(allowed.replace(" ", r"\s+"), context, re.IGNORECASE)
            if any(start + span.start() <= match.start() and match.end() <= start + span.end() for span in spans):
                return True
    return False


def main(arguments):
    rules = compile_rules()
    count_only = "--count" in arguments
    named = [argument for argument in arguments if argument != "--count"]
    names = named or [name for name in tracked_files() if is_checked(name)]
    found, files = Counter(), 0
    for name in names:
        path = Path(name)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            cannot_run(f"{name}: {error}")
        files += 1
        text, lines = compact(prose(path, text))
        matches = []
        for pattern, instead in rules:
            matches += [(match, instead) for match in pattern.finditer(text) if not is_allowed(name, text, match)]
        found[name] += len(matches)
        if count_only:
            continue
        for match, instead in sorted(matches, key=lambda pair: pair[0].start()):
            start = match.end() - len(match.group().lstrip(" \n\0"))
            line = lines[text.count("\n", 0, start)]
            phrase = re.sub(r"[\s\0]+", " ", match.group()).strip()
            print(f"{name}:{line}: {phrase} -> {instead}")
    if count_only:
        for name, n in sorted(found.items(), key=lambda pair: -pair[1]):
            if n:
                print(f"{n:5} {name}")
    total = sum(found.values())
    print(f"vocabulary: {total} phrases in {sum(n > 0 for n in found.values())} of {files} files", file=sys.stderr)
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
