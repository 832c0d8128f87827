"""Compares BertBlocks with other libraries: same weights, inputs and threads. `make bench` runs everything."""

import os

#: oneDNN's default for all contenders: importing bertblocks would leave the others a smaller cache of compiled code.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "1024")
