"""The pictures of a report that the documents show: python tests/screenshots.py runs/demo/report.html docs"""

from __future__ import annotations

import argparse
from pathlib import Path

from page_helpers import screenshot


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path, help="a report.html")
    parser.add_argument("to", type=Path, help="where report-light.png and report-phone-dark.png go")
    given = parser.parse_args()
    screenshot(given.report, given.to / "report-light.png", 1280, 1420)
    screenshot(given.report, given.to / "report-phone-dark.png", 390, 1500, dark=True)


if __name__ == "__main__":
    main()
