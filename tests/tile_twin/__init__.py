"""The twin of AMX for processors without it: tiles in memory, which a few lines of C load, multiply and store.

`python -m tests.tile_twin` runs the tests that ask for tiles with it, on any processor with AVX512-BF16 and a C
compiler, and hands its arguments on to pytest. Python imports `site/sitecustomize.py` in each of their processes;
nothing of the product knows of it.
"""
