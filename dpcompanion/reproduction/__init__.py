"""The reproduction of five papers: what they print, what was run here, and how the two compare.

It stands on the library, which knows nothing of it.

* `published`: the papers' numbers; `records`: what runs leave behind; `intervals`: what a few of
  them say;
* `storage`, `pieces`, `provenance`: how records lie on the disk, how a run that was interrupted
  goes on, and what it was made with;  `workers`: who does its pieces;
* `experiments`: the registry, one experiment for each exhibit that computes; `runs`: what one sees
  of its run; `papers`: the experiments;
* `comparison`, `findings`, `states`, `scoreboard`: compare our values with the printed ones;
  `plotting`, `moving`, `mosaic`: how it looks;
* `chapters`: what a chapter of the book calls;  `places`: where the book shows an exhibit;
  `exports`: the same for machines.
"""
