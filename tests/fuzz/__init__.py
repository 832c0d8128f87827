"""A seeded fuzzer of the command line: damaged and hostile configs, recipes, checkpoints, data files and arguments.

A case is a pure function of its number, so a failure is reproduced by it: `python -m tests.fuzz 1234`.
"""
