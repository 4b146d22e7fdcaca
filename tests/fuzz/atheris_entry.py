"""Run one target under Atheris (coverage-guided), also as a fuzzer of OSS-Fuzz.

    pip install atheris
    python -m tests.fuzz.atheris_entry dump tests/fuzz/corpus/dump -max_total_time=600

The first argument is the target; the others are libFuzzer's.
"""

from __future__ import annotations

import argparse
import sys


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", help="A name of `tests.fuzz.targets.TARGETS`.")
    options, for_libfuzzer = parser.parse_known_args()
    import atheris

    # Readers import modules when they first need them, so a valid input is read in here.
    with atheris.instrument_imports(include=["distsim"]):
        from tests.fuzz.targets import TARGETS

        target = TARGETS[options.target]
        target.fuzz(min(target.seeds(), key=len))
    atheris.Setup([sys.argv[0], *for_libfuzzer], target.fuzz)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
