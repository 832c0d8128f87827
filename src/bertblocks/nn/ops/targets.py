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
AVX512_BF16 = AVX512_VNNI | {"avx512_bf16": "-mavx512bf16"}
AVX2 = {"avx2": "-mavx2", "fma": "-mfma"}
#: The libraries to compile of each source for each architecture, the fastest first: by Linux' names the instruction
#: sets that it needs, with the compiler's options.
TARGETS = {
    "kernels.c": {
        "x86_64": {
            "AMX": AVX512_BF16 | {"amx_tile": "-mamx-tile", "amx_int8": "-mamx-int8"},
            "AVX512-VNNI with bf16": AVX512_BF16,
            "AVX512-VNNI": AVX512_VNNI,
            "AVX-VNNI": AVX2 | {"avx_vnni": "-mavxvnni"},
            "AVX2": AVX2,
        },
        "aarch64": {"NEON": {"asimddp": "-march=armv8.2-a+dotprod"}},
    }
}
