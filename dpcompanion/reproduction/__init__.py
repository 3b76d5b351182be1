"""The reproduction of five papers: what they print, what was run here, and how the two compare.

It stands on the library, which knows nothing of it.

* `published`: the papers' numbers and exhibits; `records`: what runs leave behind; `intervals`: what a few of them say;
* `experiments`: the registry, one experiment for each exhibit that computes; `papers`: the experiments;
* `comparison`, `scoreboard`: how ours stand beside the printed;  `plotting`: how it looks.
"""
