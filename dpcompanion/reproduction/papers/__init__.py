"""The exhibits of each paper: `printed.toml`, and a module for each group of them. No paper imports
another.
"""
