"""``python -m ullage``: the same as the ``ullage`` command."""

import sys

from ullage.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
