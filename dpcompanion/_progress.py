"""A progress bar if tqdm is installed, silence if not.

`show=None` shows the bar on a terminal only: notebooks, logs and pipes stay silent.  `show=True`
forces it, `show=False` switches it off.

>>> with bar(3, label="steps", show=False) as advance:
...     for _ in range(3):
...         advance()
"""

import contextlib
import sys


@contextlib.contextmanager
def bar(total, *, label="", done=0, show=None):
    """A context that gives a function `advance(steps=1)`; `done` of the `total` are behind us."""
    wanted = sys.stderr.isatty() if show is None else show
    try:
        from tqdm import tqdm
    except ImportError:
        wanted = False
    if not wanted:
        yield lambda steps=1: None
        return
    with tqdm(total=total, initial=done, desc=label, leave=False) as shown:
        yield shown.update
