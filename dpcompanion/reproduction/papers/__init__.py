"""Each paper's exhibits: `printed.toml`, and a module for each group. No paper imports another."""
