"""Files as a token file, a token for each byte: what `ullage train --data` reads without a tokenizer.

python examples/bytes.py docs/*.md --out tokens.npy
"""

import argparse
from pathlib import Path

import numpy as np

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("files", nargs="+", type=Path)
parser.add_argument("--out", required=True, type=Path)
arguments = parser.parse_args()
np.save(
    arguments.out, np.frombuffer(b"".join(path.read_bytes() for path in arguments.files), np.uint8).astype(np.uint16)
)
