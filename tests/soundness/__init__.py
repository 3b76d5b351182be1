"""The trial of the library: random cases against oracles that share no code with it.

Each piece is a module with `cases(seed, count)`, an iterator of cases, and `violations(case)`, a
list of what is wrong with one in words, empty where nothing is. `python -m tests.soundness` runs
all of them and writes the table of README.md; a short seeded part is in `make prove`
(test_soundness.py).
"""

#: Piece -> (how many cases the whole trial has, how many the short part).
PIECES = {
    "accounts": (10_000, 4),
    "histories": (500, 1),
    "filters": (500, 5),
    "clippings": (3_000, 20),
    "crashes": (200, 6),
    "bits": (300, 40),
    "calculator": (2000, 2),
}
