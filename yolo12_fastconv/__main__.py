"""``python -m yolo12_fastconv``: the same as the command ``yolo12-fastconv``."""

import sys

from yolo12_fastconv.cli import main

if __name__ == "__main__":
    sys.exit(main())
