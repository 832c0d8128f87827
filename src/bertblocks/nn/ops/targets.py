"""What C sources are compiled for. The build of wheels reads this too, so it imports nothing."""

from __future__ import annotations

OPTIONS = ["-O3", "-std=gnu11", "-fopenmp", "-fPIC", "-shared"]
AVX512_VNNI = {
    "avx512f": "-mavx512f",
    "avx512bw": "-mavx512bw",
    "avx512dq": "-mavx512dq",
    "avx512vl": "-mavx512vl",
    "avx512_vnni": "-mavx512vnni",
}
#: The libraries to compile of each source, the fastest first: by Linux' names the instruction sets that it needs, with
#: the compiler's options.
TARGETS = {"int8.c": [AVX512_VNNI | {"avx512_bf16": "-mavx512bf16"}, AVX512_VNNI]}
