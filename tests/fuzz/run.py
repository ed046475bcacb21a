"""Fuzz parsers by coverage: ``python tests/fuzz/run.py PARSER|all [--minutes M | --runs N]``.

Begins with what the corpus of hostile bundles is made from. A finding ends it, with a traceback and
the bytes in a file ``crash-…`` in the working folder.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from tempfile import TemporaryDirectory

import atheris

sys.path.insert(0, str(Path(__file__).parents[1]))

MAX_BYTES = 1 << 16
MAX_MEGABYTES = 1024  # beyond what it begins with, of which the process that started it is a part
MAX_SECONDS = 20  # of one input: what takes longer is a finding, too

with warnings.catch_warnings(), atheris.instrument_imports(include=["capsule", "ruamel"]):
    warnings.simplefilter("ignore")
    from fuzz.parsers import PARSERS, check


ALL = "all"  # by turns: the first byte of the data says which
NAMES = sorted(PARSERS)


def seeds(name: str) -> list[bytes]:
    """Return what to begin with."""
    if name != ALL:
        return PARSERS[name].seeds()
    return [bytes([number]) + seed for number, each in enumerate(NAMES) for seed in seeds(each)]


def fuzz(name: str, data: bytes) -> None:
    """Give bytes to a parser."""
    if name == ALL:
        name, data = NAMES[data[0] % len(NAMES) if data else 0], data[1:]
    check(name, data)


def main() -> None:
    """Fuzz as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parser", choices=[*NAMES, ALL])
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float, default=1.0)
    length.add_argument("--runs", type=int)
    options = parser.parse_args()
    limit = (
        f"-max_total_time={round(60 * options.minutes)}"
        if options.runs is None
        else f"-runs={options.runs}"
    )
    with TemporaryDirectory() as corpus:
        for number, seed in enumerate(seeds(options.parser)):
            Path(corpus, str(number)).write_bytes(seed)
        bounds = [
            f"-max_len={MAX_BYTES}",
            f"-rss_limit_mb={MAX_MEGABYTES + getrusage(RUSAGE_SELF).ru_maxrss // 1024}",
            f"-timeout={MAX_SECONDS}",
        ]
        arguments = [sys.argv[0], corpus, limit, *bounds, "-seed=1", "-print_final_stats=1"]
        atheris.Setup(arguments, lambda data: fuzz(options.parser, data))
        atheris.Fuzz()


if __name__ == "__main__":
    main()
